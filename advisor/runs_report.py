"""What `advise evaluate` and `advise calibrate` print: errors on measured runs, as blocks of the report's own kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from advisor.report.format import change, percent, significant
from advisor.report.text import Block, Column, Line, Table, joined
from advisor.words import counted
from cost_models import Calibration

if TYPE_CHECKING:
    import pandas as pd

    from advisor.measure.calibrate import CalibrationResult
    from advisor.measure.evaluate import Evaluation

_FIGURES = {
    "median_error_share": "median error", "p90_error_share": "90% within", "mean_of_source_medians": "mean of the sources' medians",
    "memory_median_error_share": "peak memory: median error", "memory_p90_error_share": "90% within",
}  # fmt: skip
_GROUPS = {"by_source": "source", "by_gpu": "GPU", "by_layout": "layout"}


def evaluation_blocks(found: Evaluation, calibration: Calibration) -> tuple[Block, ...]:
    """Predicted against measured: over all, by source, GPU and layout, how sweeps are ranked, and memory."""
    overall, memory = found.overall, found.memory
    timed: tuple[Block, ...] = ()
    if overall["num_measured"]:
        groups = (_group_block(getattr(found, name), word) for name, word in _GROUPS.items())
        timed = (*groups, _sweep_block(found.sweeps))
    return (
        Block(key="overall", title="HOW FAR OFF", how_to_read="|predicted / measured step time - 1|; bias is its median with the sign",
              lines=_overall_lines(overall, calibration)),
        *timed,
        Block(key="memory", title="PEAK MEMORY", how_to_read="|predicted / measured peak - 1|", lines=_memory_lines(memory)),
    )  # fmt: skip


def _overall_lines(overall: Mapping[str, float], calibration: Calibration) -> tuple[Line, ...]:
    rows = f"{counted(overall['num_rows'], 'row')}, {overall['num_priced']:,} priced, {overall['num_measured']:,} of them with a measured step time"
    if not overall["num_measured"]:
        return ((rows,), ("No row has a measured step time, so only memory was compared.",))
    figures = [(f"{word} {percent(overall[name])}",) for name, word in _FIGURES.items() if math.isfinite(overall.get(name, math.nan))]
    bias = change(math.expm1(overall["bias"]))
    inside = f"the intervals hold {percent(overall['interval_share'])} of the runs (meant to hold 80%)"
    return (
        (rows,), *((sentence,) for sentence in _in_sample(overall, calibration)),
        joined([*figures, (f"{percent(overall['within_20_percent_share'])} of the runs within 20%",), (f"bias {bias}",)]), (inside,),
    )  # fmt: skip


def _in_sample(overall: Mapping[str, float], calibration: Calibration) -> list[str]:
    """Says which of these errors flatter, since the constants have seen their runs or others of their sources."""
    known, total = overall["num_fitted_source_runs"], overall["num_measured"]
    sentences = []
    if known:
        which = "All of these runs are" if known == total else f"{known:,.0f} of these runs {'is' if known == 1 else 'are'}"
        unseen = calibration.error.get("unseen_source_median_share")
        expect = f" Runs of other sources were off by {percent(unseen)} (mean of the sources' medians)." if unseen is not None else ""
        others = f" The median error of the others is {percent(overall['other_median_error_share'])}." if known < total else expect
        sentences.append(f"In-sample: {which} of sources that the constants were fitted on; errors on them flatter.{others}")
    if calibration.data.get("num_own_runs"):
        own = counted(calibration.data["num_own_runs"], "run")
        sentences.append(f"The constants were refitted on {own} of yours; where these are among them, their errors flatter.")
    return sentences


def _group_block(table: pd.DataFrame, word: str) -> Block:
    columns = (
        Column(title=word, stretches=True),
        *(Column(title=t, numeric=True) for t in ("runs", "median error", "mean error", "90% within", "bias")),
    )
    rows = tuple(
        ((_name(name),), (f"{row.num_runs:,.0f}",), (percent(row.median_error_share),), (percent(row.mean_error_share),),
         (percent(row.p90_error_share),), (change(math.expm1(row.bias)),))
        for name, row in table.iterrows()
    )  # fmt: skip
    return Block(
        key=f"by-{word.lower()}", title=f"BY {word.upper()}", how_to_read="most runs first", table=Table(columns=columns, rows=rows)
    )


def _name(value: object) -> str:
    return "not stated" if str(value) in ("nan", "") else str(value)


def _sweep_block(sweeps: pd.DataFrame) -> Block:
    """Each sweep; the lines say the mean over all."""
    how = "how much slower the plan picked is than the best; rank correlation (1: the same order)"
    if not len(sweeps):
        none = ("No sweep_id has four measured runs or more, so no ranking was judged.",)
        return Block(key="sweeps", title="SWEEPS", how_to_read=how, lines=(none,))
    columns = (
        Column(title="sweep", stretches=True),
        *(Column(title=t, numeric=True) for t in ("runs", "picked slower by", "rank correlation")),
    )
    rows = tuple(
        ((_name(name),), (f"{row.num_runs:,.0f}",), (percent(row.regret),), (significant(row.spearman, 2),))
        for name, row in sweeps.iterrows()
    )
    mean = f"picked plan slower than the best by {percent(sweeps.regret.mean())} in the mean"
    line = (f"{counted(len(sweeps), 'sweep')}: {mean}, rank correlation {significant(sweeps.spearman.median(), 2)} in the median",)
    return Block(key="sweeps", title="SWEEPS", how_to_read=how, lines=(line,), table=Table(columns=columns, rows=rows))


def _memory_lines(memory: Mapping[str, float]) -> tuple[Line, ...]:
    if not memory["num_measured"]:
        return (("No row has a measured peak memory (peak_mem_gib), so only times were compared.",),)
    runs = f"{counted(memory['num_measured'], 'run')} with a measured peak"
    return (joined([(runs,), *((f"{word} {percent(memory[name])}",) for name, word in _FIGURES.items() if name in memory)]),)


def calibration_blocks(result: CalibrationResult) -> tuple[Block, ...]:
    """The error before and after a refit, and what it moved."""
    after = "after, on runs left out in turn" if result.num_runs > 1 else "after, on the run itself"
    errors = (("before", result.error_before), (after, result.error_after))
    lines = tuple(
        (f"{word}: ", *joined([(f"{_FIGURES[name]} {percent(value)}",) for name, value in error.items()])) for word, error in errors
    )
    helped = Block(key="error", title="WHETHER IT HELPS", how_to_read="|predicted / measured - 1| of your runs", lines=lines)
    return (helped, _moved_block(result.moved))


def _moved_block(moved: pd.DataFrame) -> Block:
    how = "factor on the shipped constant, and how far it moved; by over 1% only"
    if not len(moved):
        return Block(key="moved", title="WHAT MOVED", how_to_read=how, lines=(("nothing",),))
    columns = (Column(title="of"), Column(title="name"), Column(title="constant", stretches=True), Column(title="factor", numeric=True),
               Column(title="change", numeric=True))  # fmt: skip
    rows = tuple(
        ((str(row.kind),), (str(row["name"]) or "-",), (str(row.constant),), (significant(row.factor),), (change(row.change - 1),))
        for _, row in moved.iterrows()
    )
    return Block(key="moved", title="WHAT MOVED", how_to_read=how, table=Table(columns=columns, rows=rows))
