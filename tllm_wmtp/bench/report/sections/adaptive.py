"""Fixed depths against the depth that adapts, from ``wmtp bench depth``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Table, columns, origin
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.schema import DepthRatio, DepthResult
from tllm_wmtp.bench.report.style import LIGHT, LOOKS, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = "wmtp bench depth --context 64k --out DIR"


def build(results: Results) -> Section:
    found = sorted(results.depth, key=lambda each: (each.model, each.context, each.window))
    blocks = [block for each in found for block in (figure(each), table(each))]
    return Section(
        key="adaptive",
        title="Depth that adapts",
        question=(
            "The controller chooses the depth of each step from what was accepted and what steps "
            "cost. How does it compare with every fixed depth, on texts from easy to hard?"
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=sentence(found[0]) if found else "",
    )


def workloads(result: DepthResult) -> list[str]:
    return list(dict.fromkeys(ratio.workload for ratio in result.ratios))


def of(result: DepthResult, workload: str) -> list[DepthRatio]:
    return [ratio for ratio in result.ratios if ratio.workload == workload]


def sentence(result: DepthResult) -> str:
    parts = []
    for workload in workloads(result):
        best = min(of(result, workload), key=lambda ratio: ratio.over_adaptive)
        parts.append(
            f"{workload}: {best.arm} {words.with_interval(best.over_adaptive, best.interval, 2)}"
        )
    return (
        "Time of the best fixed arm over that of the adaptive depth (below 1 the fixed one is "
        f"faster), {result.model} at {words.tokens(result.context)} tokens: {'; '.join(parts)}."
    )


def figure(result: DepthResult) -> Figure:
    said = sentence(result)
    names = workloads(result)
    rows = max(len(of(result, name)) for name in names)
    return Figure(
        title=f"Time of each fixed arm over the adaptive depth: {result.model}",
        alt=f"Dot charts of the time of each arm over the adaptive depth's, by text. {said}",
        panels=tuple(
            Panel(
                name,
                "time over the adaptive arm's for the same tokens, 95 % intervals",
                partial(draw, ratios=of(result, name)),
                height=112 + 22 * rows,
                left=72,
                right=28,
            )
            for name in names
        ),
        sentence=said
        + (" Outputs of all arms are identical." if result.lossless else " Outputs DIFFER."),
        origin=origin([result]),
    )


def draw(axes: Axes, ratios: list[DepthRatio]) -> None:
    for index, ratio in enumerate(ratios):
        look = LOOKS["dense"] if ratio.arm == "dense" else Look(LIGHT["windowed"], "D", "solid")
        axes.plot(list(ratio.interval), [index, index], color=look.colour, linewidth=1.4, zorder=3)
        axes.plot([ratio.over_adaptive], [index], look.marker, color=look.colour, zorder=4)
    axes.axvline(1, color=LIGHT["muted"], linewidth=1)
    axes.set_yticks(range(len(ratios)), [ratio.arm for ratio in ratios])
    axes.set_ylim(len(ratios) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    axes.set_xlabel("time over adaptive; left of 1 is faster than adaptive")
    plot.few_ticks(axes)


def table(result: DepthResult) -> Table:
    ratios = {(ratio.workload, ratio.arm): ratio for ratio in result.ratios}
    rows = []
    for row in result.rows:
        ratio = ratios.get((row.workload, row.arm))
        rows.append(
            (
                row.workload,
                row.arm,
                words.fixed(row.al),
                words.fixed(row.mean_depth, 1),
                words.number(row.tpot_ms),
                "1"
                if ratio is None
                else words.with_interval(ratio.over_adaptive, ratio.interval, 2),
            )
        )
    return Table(
        caption=(
            f"Fixed and adaptive depth: {result.model}, {words.tokens(result.context)} tokens, "
            f"window {result.window:,}"
        ),
        columns=columns(
            ("text", "arm"), ("AL", "mean depth", "TPOT ms", "time over adaptive (95 %)")
        ),
        rows=tuple(rows),
        origin=origin([result]),
        folded=True,
    )
