import subprocess
import sys

import pytest

from advisor.errors import ScriptError
from advisor.profiling import capture
from advisor.profiling.source import missing_modules, read_source

FUNCTIONS = "import torch\ndef build_model(): ...\ndef make_batch(batch_size): ...\n"
LOOP = "if __name__ == '__main__':\n    print('training')\n"


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="model.py"):
        (tmp_path / name).write_text(text, encoding="utf8")
        return str(tmp_path / name)

    return write_file


def test_a_script_with_both_functions_is_of_the_functions_form_even_with_a_loop_of_its_own(write):
    source = read_source(write(FUNCTIONS + LOOP))
    assert (source.form, source.entry) == ("functions", "build_model")


def test_a_script_with_build_model_and_a_loop_but_no_make_batch_runs_as_a_script(write):
    assert read_source(write("def build_model(): ...\n" + LOOP)).form == "script"


def test_build_model_alone_says_what_to_declare(write):
    with pytest.raises(ScriptError) as error:
        read_source(write("def build_model(): ...\n"))
    assert "no make_batch" in error.value.message
    assert "make_batch(batch_size)" in error.value.hint


def test_an_entry_may_stand_behind_the_path_or_apart(write):
    path = write("def get_model(): ...\ndef make_batch(batch_size): ...\n")
    assert read_source(f"{path}:get_model").entry == "get_model"
    assert read_source(path, "get_model").entry == "get_model"


def test_an_unknown_entry_is_refused_with_those_that_exist(write):
    with pytest.raises(ScriptError) as error:
        read_source(write(FUNCTIONS), "biuld")
    assert "declares no biuld" in error.value.message
    assert "build_model" in error.value.hint


def test_a_file_with_several_builders_lists_them(write):
    text = "def small(): ...\ndef large(width=8): ...\ndef make_batch(batch_size): ...\ndef loss_fn(model, batch): ...\n"
    path = write(text + "class Net(nn.Module): ...\nclass Deep(nn.Module):\n    def __init__(self, depth): ...\n")
    with pytest.raises(ScriptError) as error:
        read_source(path)
    assert error.value.message.endswith("no build_model(); what builds the model may be small, large, Net.")
    assert f"advise {path}:NAME" in error.value.hint
    assert read_source(f"{path}:large").form == "functions"


def test_make_batch_alone_says_what_to_declare(write):
    with pytest.raises(ScriptError, match="declares make_batch") as error:
        read_source(write("def make_batch(batch_size): ...\n"))
    assert "Declare build_model()" in error.value.hint


@pytest.mark.parametrize(
    ("text", "words"), [("def f(:\n", ":1 is not valid Python"), ("", "is empty"), ('"""Only words."""\n', "is empty")]
)
def test_broken_and_empty_files_are_told_in_one_sentence(write, text, words):
    with pytest.raises(ScriptError) as error:
        read_source(write(text))
    assert words in error.value.message
    assert error.value.exit_code == 2


def test_a_missing_file_names_its_nearest_neighbour(write, tmp_path):
    write("x = 1\n", "train_gpt.py")
    with pytest.raises(ScriptError) as error:
        read_source(str(tmp_path / "train_gtp.py"))
    assert "train_gpt.py" in error.value.hint


def test_a_folder_and_a_binary_file_are_no_scripts(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"\x80\x02\xff\x00")
    for path in (tmp_path, tmp_path / "model.pt"):
        with pytest.raises(ScriptError):
            read_source(str(path))


def test_all_missing_modules_are_named_in_the_order_of_the_text(write):
    text = "import json\nfrom no_such_lib.layers import Block\nimport no_such_wheel\ntry:\n    import no_such_extra\nexcept ImportError:\n    pass\n"
    assert missing_modules(read_source(write(text))) == ["no_such_lib", "no_such_wheel"]


def test_the_text_shows_groups_made_at_import_and_device_maps(write):
    text = 'import torch.distributed as dist\ndist.init_process_group("nccl")\nmodel = load("x", device_map="auto")\n'
    assert set(read_source(write(text)).facts) == {"process-group-at-import", "device-map-sequential"}
    guarded = "import torch.distributed as dist\ndef main():\n    dist.init_process_group()\n"
    assert not read_source(write(guarded)).facts


def test_importing_the_package_leaves_torch_alone():
    code = "import sys, advisor.profiling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nonsense_options_are_refused_before_anything_runs(write):
    path = write(LOOP)
    with pytest.raises(ValueError, match="capture is one of"):
        capture(path, capture="quick")
    with pytest.raises(ValueError, match="timeout_s"):
        capture(path, timeout_s=0)


@pytest.mark.parametrize(
    "raw", ["\ufeffimport torch\n".encode(), "# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"), b"print(1)\n"]
)
def test_every_encoding_that_python_reads_is_read_and_a_call_is_not_nothing(tmp_path, raw):
    (tmp_path / "train.py").write_bytes(raw)
    assert read_source(str(tmp_path / "train.py")).form == "script"


def test_notebooks_dangling_links_and_coroutines_get_their_own_sentence(write, tmp_path):
    (tmp_path / "link.py").symlink_to("gone.py")
    cases = {
        write("{}", "train.ipynb"): ("is a notebook", "nbconvert"),
        str(tmp_path / "link.py"): ("is a link to gone.py", "link"),
        write(FUNCTIONS.replace("def build_model", "async def build_model"), "coroutine.py"): ("is `async def`", "plain `def`"),
        write(FUNCTIONS, "functions.py") + ":make_batch": ("does not build a model", "build_model"),
    }
    for path, (words, hint) in cases.items():
        with pytest.raises(ScriptError) as error:
            read_source(path)
        assert words in error.value.message
        assert hint in error.value.hint
