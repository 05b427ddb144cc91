import dataclasses
import io
import re
import shlex

import pytest
from rich.console import Console

from advisor.report.blocks import blocks, footer
from advisor.report.heading import header
from advisor.report.report import Report
from advisor.report.terminal import render_terminal, report_console
from advisor.report.text import pasteable, plain_text

TITLES = ["USE THIS", "THE OTHERS, AND WHY NOT", "WHERE THE TIME GOES", "WHERE THE MEMORY GOES", "HOW IT SCALES", "WATCH OUT"]


def shown(report: Report, width: int = 100, *, encoding: str = "utf-8", colour: bool = False) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None, legacy_windows=False)
    render_terminal(report, console)
    stream.flush()
    return raw.getvalue().decode(encoding)


def stripped(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.mark.parametrize("width", [100, 60])
def test_golden(sample: Report, width: int, check_golden) -> None:
    check_golden(f"report/terminal-{width}.txt", stripped(shown(sample, width)))


def test_blocks_come_in_the_order_people_ask(sample: Report) -> None:
    lines = shown(sample).splitlines()
    found = [title for line in lines for title in TITLES if line.startswith(f" {title}")]
    assert found == TITLES


@pytest.mark.parametrize("width", [20, 40, 59, 79, 80, 99, 100, 240])
def test_no_line_is_wider_than_the_terminal(sample: Report, width: int) -> None:
    text = shown(dataclasses.replace(sample, plans=tuple(dataclasses.replace(p, launch="", check="") for p in sample.plans)), width)
    longest_word = max(len(word) for word in text.split())
    assert max(map(len, text.splitlines())) <= max(min(width, 100), longest_word + 8)


def test_every_block_says_how_to_read_it(sample: Report) -> None:
    assert all(block.how_to_read for block in blocks(sample))
    assert shown(sample).count("──") == len(TITLES)


def test_pipes_get_plain_text(sample: Report) -> None:
    assert "\x1b" not in shown(sample)


def test_colour_only_repeats_what_signs_say(sample: Report) -> None:
    coloured = shown(sample, colour=True)
    assert "\x1b[36m~11.7 s" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == shown(sample)


def test_each_provenance_has_its_sign(sample: Report) -> None:
    measured = dataclasses.replace(
        sample, profile={"source": "measured", "device": "NVIDIA H200", "step_time_s": 0.5, "peak_memory_bytes": 2**31}
    )
    text = shown(measured)
    assert "measured on NVIDIA H200, 500 ms*" in text
    assert "100 GB/s?" in text
    assert "~11.7 s a step" in text
    assert "8.03 B parameters" in text


def test_ascii_streams_get_ascii(hostile: Report) -> None:
    assert "TP 2 x FSDP 16" in shown(hostile, encoding="ascii")


def test_text_of_the_user_cannot_steer_the_terminal(hostile: Report) -> None:
    text = shown(hostile)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]" in text


def test_rejected_plans_say_what_they_need_and_what_there_is(sample: Report) -> None:
    text = " ".join(shown(sample, 60).split())
    assert "✗ DDP 32" in text
    assert "needs ~158 GiB, has 76.0: optimizer states alone" in text
    assert "16 does not divide the 8 key-value heads" in text


def test_long_rankings_are_cut_and_the_rest_is_named(sample: Report) -> None:
    many = tuple(dataclasses.replace(sample.plans[1], rank=i + 2, label=f"other {i}") for i in range(20))
    text = shown(dataclasses.replace(sample, plans=(sample.plans[0], *many)))
    assert "other 7" in text
    assert "other 8" not in text
    assert "12 more in report.html and report.json" in text


def test_images_are_counted_in_samples(sample: Report) -> None:
    plans = tuple(dataclasses.replace(p, estimate={**p.estimate, "tokens_per_s": None}) for p in sample.plans)
    text = shown(dataclasses.replace(sample, plans=plans, model={**sample.model, "seq_len": 0}))
    assert "samples/s" in text
    assert "tokens" not in text


def test_a_bare_report_still_reads(bare: Report) -> None:
    text = shown(bare)
    assert "No plan fits this cluster." in text
    assert [title for title in TITLES if f" {title}" in text] == TITLES
    assert "None" not in text


def test_without_plans_the_closest_is_named(sample: Report) -> None:
    text = shown(dataclasses.replace(sample, plans=()))
    assert "closest: ZeRO-1 32 needs ~83.4 GiB, has 76.0" in text


@pytest.mark.parametrize("missing", ["plans", "rejected", "scaling", "findings", "hotspots", "assumptions", "files", "warnings"])
def test_any_list_may_be_empty(sample: Report, missing: str) -> None:
    assert "None" not in shown(dataclasses.replace(sample, **{missing: ()}))


@pytest.mark.parametrize("missing", ["memory", "cluster", "accuracy", "smallest_num_gpus", "inputs", "model", "profile"])
def test_any_mapping_may_be_empty(sample: Report, missing: str) -> None:
    assert "None" not in shown(dataclasses.replace(sample, **{missing: {}}))


def test_estimates_may_lack_figures(sample: Report) -> None:
    bare_plans = tuple(dataclasses.replace(p, estimate={"step_time_s": 1.0}) for p in sample.plans)
    assert "None" not in shown(dataclasses.replace(sample, plans=bare_plans))


def test_the_slower_plans_say_by_how_much(sample: Report) -> None:
    text = shown(sample)
    assert "+10.5%: four all-reduces a" in text
    assert "+9.67%: recomputing" in text


@pytest.mark.parametrize("width", [20, 40, 100])
@pytest.mark.parametrize("command", [
    "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint $HOST:29500 advice/plan-1/train.py -- 'my script.py' --name \"a b\" --x=1",
    "python it's", "", "one",
])  # fmt: skip
def test_broken_commands_paste_as_one(command: str, width: int) -> None:
    rows = pasteable(command, width)
    assert all(row.endswith("\\") for row in rows[:-1])
    pasted = "\n".join(rows).replace("\\\n", "")
    if "it's" in command:
        assert pasted.split() == command.split()
    else:
        assert shlex.split(pasted) == shlex.split(command)


def test_commands_in_the_report_paste_as_one(sample: Report) -> None:
    text = shown(sample, 60)
    start = text.index("torchrun")
    pasted = text[start : text.index("check it first")].replace("\\\n", "")
    assert shlex.split(pasted) == shlex.split(sample.plans[0].launch)


def test_header_and_footer_say_it_all(sample: Report) -> None:
    head = " ".join(plain_text(line) for line in header(sample))
    assert "LlamaForCausalLM" in head
    assert "4 nodes of 8 × a100-sxm-80gb" in head
    foot = " ".join(plain_text(line) for line in footer(sample))
    assert "flash attention" in foot
    assert "wrote advice/: report.html report.json plan-1/ plan-2/ plan-3/" in foot


def test_an_assumed_cluster_is_said_so(sample: Report) -> None:
    assumed = {**sample.cluster, "device": {"value": "h100-sxm-80gb", "unit": "", "source": "assumed"}}
    assert "h100-sxm-80gb (assumed)" in shown(dataclasses.replace(sample, cluster=assumed))


def test_the_header_says_which_error_is_meant(sample: Report) -> None:
    accuracy = {"num_runs": 2575, "unseen_source_median_share": 0.117, "unseen_model_median_share": 0.05}
    text = " ".join(shown(dataclasses.replace(sample, accuracy=accuracy)).split())
    assert "prices: fitted on 2,575 measured runs, median error 11.7% on sources not fitted on (mean of their medians)" in text


def test_a_calibration_of_the_users_is_named_with_its_runs(sample: Report) -> None:
    accuracy = {
        "file": "cal.toml",
        "num_own_runs": 5,
        "own_runs_median_share": 0.042,
        "num_runs": 2575,
        "unseen_source_median_share": 0.117,
    }
    text = " ".join(shown(dataclasses.replace(sample, accuracy=accuracy)).split())
    assert "prices: cal.toml, refitted on 5 runs of yours (left out in turn: median error 4.20%); before that fitted on 2,575" in text
    one = " ".join(shown(dataclasses.replace(sample, accuracy={"file": "cal.toml", "num_own_runs": 1})).split())
    assert "cal.toml, refitted on 1 run of yours; before that error not known" in one


def test_offloading_that_saves_no_gpu_is_left_out(sample: Report) -> None:
    sizes = {"single GPU": None, "single GPU + offload": 1, "FSDP": 2, "FSDP + offload": 2, "ZeRO-2": 4, "ZeRO-2 + offload": 2}
    text = " ".join(shown(dataclasses.replace(sample, smallest_num_gpus=sizes)).split())
    assert "single GPU at no size tried · single GPU + offload · FSDP ~2 · ZeRO-2 ~4 · ZeRO-2 + offload ~2" in text


def test_sentences_among_the_reasons_stand_alone(sample: Report) -> None:
    best = dataclasses.replace(sample.plans[0], reasons=("compute 87%", "1 GiB left", "No train file, as there is no optimizer."))
    lines = [line.strip() for line in shown(dataclasses.replace(sample, plans=(best,))).splitlines()]
    assert "compute 87%; 1 GiB left" in lines
    assert "No train file, as there is no optimizer." in lines


def test_findings_show_warnings_first_and_name_their_rule(sample: Report) -> None:
    text = " ".join(shown(sample).split())
    assert text.index("[hybrid-shard-on-slow-links]") < text.index("[logits-dominate]")
    assert "[convolution-dominates]" not in text
    assert "2 more rules stayed silent, 1 could not be evaluated" in text


def test_pipes_are_100_columns_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert report_console(io.StringIO()).width == 100
    monkeypatch.setenv("COLUMNS", "70")
    assert report_console(io.StringIO()).width == 70


def test_without_files_there_is_no_line_to_paste(sample: Report) -> None:
    assert "torchrun" not in shown(dataclasses.replace(sample, files=()))


def test_a_fit_says_its_day_and_its_age(sample: Report) -> None:
    own = {"file": "/home/me/own.toml", "num_own_runs": 5, "refitted_on": "2026-11-20", "fitted_on": "2026-11-01"}
    report = dataclasses.replace(
        sample, accuracy={**sample.accuracy, **own}, inputs={**sample.inputs, "created": "2026-11-30T08:00:00+00:00"}
    )
    text = " ".join(shown(report).split())
    assert "own.toml, refitted on 5 runs of yours on 2026-11-20 (10 days before)" in text
    assert "measured runs on 2026-11-01 (29 days before)" in text
    same_day = dataclasses.replace(report, inputs={**sample.inputs, "created": "2026-11-20T08:00:00+00:00"})
    assert "of yours on 2026-11-20; before that" in " ".join(shown(same_day).split())
    unknown = dataclasses.replace(report, accuracy={**report.accuracy, "refitted_on": "soon"})
    assert "of yours on soon; before that" in " ".join(shown(unknown).split())


def test_a_launch_that_needs_a_package_has_one_without_beside_it(sample: Report) -> None:
    best = dataclasses.replace(
        sample.plans[0],
        launch="torchrun advice/plan-1/train_deepspeed.py",
        launch_needs="deepspeed",
        launch_plain="torchrun advice/plan-1/train.py",
    )
    lines = [line.strip() for line in shown(dataclasses.replace(sample, plans=(best,))).splitlines()]
    at = lines.index("torchrun advice/plan-1/train_deepspeed.py")
    text = " ".join(lines[at + 1 : at + 4])
    assert "with PyTorch alone (the line above needs `pip install deepspeed`): torchrun advice/plan-1/train.py" in text


def test_a_plan_that_nothing_starts_names_the_next_that_is_started(sample: Report) -> None:
    first = dataclasses.replace(sample.plans[0], launch="", check="")
    second = dataclasses.replace(sample.plans[1], launch="torchrun advice/plan-2/train.py")
    text = " ".join(shown(dataclasses.replace(sample, plans=(first, second))).split())
    assert re.search(r"plan 2(, \+[\d.]+%)?, starts as it is: torchrun advice/plan-2/train.py", text)
