"""The full-attention kernel against PyTorch's, from ``wmtp bench attention``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Table, columns, grouped, newest, origin
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.schema import AttentionResult, AttentionRow
from tllm_wmtp.bench.report.style import LIGHT, VARIANTS, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = "wmtp bench attention --out DIR"


def build(results: Results) -> Section:
    blocks: list[Figure | Table] = []
    for members in grouped(results.attention, lambda result: result.machine).values():
        rows = list(
            newest(
                (row for result in members for row in result.rows),
                lambda row: (row.kv_dtype, row.head_dim, row.context, row.n_rows),
            ).values()
        )
        if len({row.context for row in rows}) > 1:
            blocks.append(figure(members, rows))
        blocks.append(table(members, rows))
    return Section(
        key="attention",
        title="The attention kernel",
        question=(
            "Few query rows over many cached keys: is our kernel as fast as the memory allows, and "
            "as fast as PyTorch's attention in its better layout?"
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=sentence(list(results.attention[-1].rows)) if results.attention else "",
    )


def sentence(rows: list[AttentionRow]) -> str:
    ratios = [row.speedup_over_best_sdpa for row in rows]
    shares = [row.fraction_of_read_bandwidth for row in rows]
    slower = sum(ratio < 1 for ratio in ratios)
    text = (
        f"Over {words.plural(len(rows), 'shape')} PyTorch's better layout takes "
        f"{words.ratio(min(ratios))} to {words.ratio(max(ratios))} the kernel's time, and the "
        f"kernel reads at {words.percent(min(shares))} to {words.percent(max(shares))} of the "
        "measured bandwidth"
    )
    return text + (f"; it is the slower one in {slower}." if slower else ".")


def shapes(rows: list[AttentionRow]) -> dict[tuple[str, int], list[AttentionRow]]:
    return grouped(rows, lambda row: (row.kv_dtype, row.n_rows))


def figure(members: list[AttentionResult], rows: list[AttentionRow]) -> Figure:
    said = sentence(rows)
    return Figure(
        title="Full attention over a long cache, against PyTorch's better layout",
        alt=f"Line charts of the speed over PyTorch's attention by number of keys. {said}",
        panels=tuple(
            Panel(
                f"{kv_dtype}, {words.plural(n_rows, 'query row')}",
                "PyTorch's time over ours; above 1 ours is faster",
                partial(draw, rows=shape),
                height=260,
            )
            for (kv_dtype, n_rows), shape in shapes(rows).items()
        ),
        sentence=said,
        origin=origin(members),
    )


def draw(axes: Axes, rows: list[AttentionRow]) -> None:
    ends = []
    for index, (head_dim, members) in enumerate(grouped(rows, lambda row: row.head_dim).items()):
        ordered = sorted(members, key=lambda row: row.context)
        marker, dash = VARIANTS[index % len(VARIANTS)]
        look = Look(LIGHT["ink"], marker, dash)
        xs = [row.context for row in ordered]
        ys = [row.speedup_over_best_sdpa for row in ordered]
        plot.line(axes, xs, ys, None, look)
        ends.append((xs[-1], ys[-1], f"head dim {head_dim}", look.colour))
    axes.axhline(1, color=LIGHT["muted"], linewidth=0.8)
    plot.context_axis(axes, sorted({row.context for row in rows}), "cached keys")
    axes.set_ylim(bottom=0)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.08)
    plot.label_ends(axes, ends)


def milliseconds(seconds: tuple[float, float]) -> tuple[float, float]:
    return seconds[0] * 1e3, seconds[1] * 1e3


def table(members: list[AttentionResult], rows: list[AttentionRow]) -> Table:
    return Table(
        caption="Attention kernel, ms per call",
        columns=columns(
            ("KV",),
            (
                "head dim", "keys", "rows", "ours", "quartiles", "SDPA gqa", "SDPA folded",
                "over the better", "GB/s", "of read bandwidth", "runs",
            ),
        ),
        rows=tuple(
            (
                row.kv_dtype,
                str(row.head_dim),
                f"{row.context:,}",
                str(row.n_rows),
                words.number(row.seconds * 1e3),
                words.interval(milliseconds(row.seconds_interquartile)),
                words.number(row.sdpa_gqa_seconds * 1e3),
                words.number(row.sdpa_fold_seconds * 1e3),
                words.ratio(row.speedup_over_best_sdpa),
                words.fixed(row.gb_per_second, 1),
                words.percent(row.fraction_of_read_bandwidth),
                words.count(row.n_runs),
            )
            for row in rows
        ),
        origin=origin(members),
        folded=True,
    )  # fmt: skip
