"""Reading, writing and looking up constants."""

import dataclasses

import pytest

from cost_models import calibration_toml, load_calibration
from cost_models.calibrate_io import CONSTANTS


def test_the_shipped_calibration_documents_every_constant():
    shipped = load_calibration()
    assert set(shipped.constants) == set(CONSTANTS)
    assert shipped.data["num_runs"] > 2000
    assert 1 < shipped.interval["known_runtime_factor"] < shipped.interval["unknown_runtime_factor"]


def test_an_unknown_runtime_gets_the_generic_value():
    shipped = load_calibration()
    assert shipped.value("host_s_per_kernel", runtime="never-heard-of") == shipped.constants["host_s_per_kernel"]


def test_factors_multiply():
    own = dataclasses.replace(
        load_calibration(), by_runtime={"r": {"step_s": 2.0}}, by_family={"f": {"step_s": 3.0}, "card": {"step_s": 5.0}}
    )
    assert own.value("step_s", "r", "f", "card") == pytest.approx(30 * own.constants["step_s"])


def test_a_written_calibration_reads_back(tmp_path):
    shipped = load_calibration()
    path = tmp_path / "own.toml"
    path.write_text(calibration_toml(dataclasses.replace(shipped, name='my "own"')), encoding="utf8")
    back = load_calibration(path)
    assert back.name == 'my "own"'
    assert back.constants == pytest.approx(dict(shipped.constants), rel=1e-4)
    assert back.by_runtime == shipped.by_runtime


def test_a_partial_file_keeps_the_shipped_rest(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("[constants]\nstep_s = 0.5\n", encoding="utf8")
    own = load_calibration(path)
    assert own.constants["step_s"] == 0.5
    assert own.constants["gemm_rate_share"] == load_calibration().constants["gemm_rate_share"]


@pytest.mark.parametrize(
    ("text", "word"),
    [("[constants]\nwarp_s = 1.0\n", "warp_s"), ("[constants]\nstep_s = -1.0\n", "-1.0"), ("not toml", "not a calibration"),
     ('[constants]\nstep_s = "fast"\n', "fast")],
)  # fmt: skip
def test_a_broken_file_is_explained(tmp_path, text, word):
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf8")
    with pytest.raises(ValueError, match=word):
        load_calibration(path)


def test_a_missing_file_is_explained(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        load_calibration(tmp_path / "nowhere.toml")
