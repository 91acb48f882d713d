"""Time to the first token with and without pruning, from ``wmtp bench prefill``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Table, columns, grouped, newest, origin
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.schema import PrefillRatio, PrefillRow
from tllm_wmtp.bench.report.style import LOOKS, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = "wmtp bench prefill --contexts 4k,16k,64k --out DIR"
CONTESTANTS = (("windowed", True), ("windowed", False), ("native", True), ("native", False))


@dataclass(frozen=True)
class Prefills:
    """The newest row of each contestant and context, of one model on one machine."""

    rows: dict[tuple[str, bool, int], PrefillRow]
    ratios: dict[tuple[str, int], PrefillRatio]

    @property
    def contexts(self) -> list[int]:
        return sorted({context for _, _, context in self.rows})

    @property
    def first(self) -> PrefillRow:
        return next(iter(self.rows.values()))


def build(results: Results) -> Section:
    every = [(row, result) for result in results.prefill for row in result.rows]
    groups = grouped(every, lambda p: (p[0].machine, p[0].model, p[0].window, p[0].n_sink))
    found = [
        Prefills(
            newest((row for row, _ in members), lambda row: (row.arm, row.pruned, row.context)),
            newest(
                (ratio for _, result in members for ratio in result.ratios),
                lambda ratio: (ratio.arm, ratio.context),
            ),
        )
        for members in groups.values()
    ]
    blocks: list[Figure | Table] = []
    for each in found:
        if len(each.contexts) > 1:
            blocks.append(figure(each))
        blocks.append(table(each))
    return Section(
        key="prefill",
        title="Prefill and pruning",
        question=(
            "Most prompt rows are needed by nobody in the last layer, and a windowed draft stores "
            "only the rows of its ring. What does leaving the others out save of the time to the "
            "first token?"
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=sentence(found[0]) if found else "",
    )


def sentence(each: Prefills) -> str:
    context = each.contexts[-1]
    parts = []
    for arm in ("windowed", "native"):
        pruned, whole = each.rows.get((arm, True, context)), each.rows.get((arm, False, context))
        if pruned and whole:
            parts.append(
                f"{arm} {words.number(whole.ttft_s)} s without pruning and "
                f"{words.number(pruned.ttft_s)} s with it"
            )
    return f"First token of a prompt of {words.tokens(context)} tokens: {'; '.join(parts)}."


def figure(each: Prefills) -> Figure:
    first, said = each.first, sentence(each)
    return Figure(
        title=(
            f"Time to the first token: {first.model}, window {first.window:,}, sink {first.n_sink}"
        ),
        alt=f"Line chart of the time to the first token by context, pruned and not. {said}",
        panels=(
            Panel(
                "Time to the first token",
                "seconds, log scale, with quartiles",
                partial(draw, each=each),
                right=132,
            ),
        ),
        sentence=said,
        origin=origin(list(each.rows.values())),
    )


def draw(axes: Axes, each: Prefills) -> None:
    ends = []
    for arm, pruned in CONTESTANTS:
        rows = [each.rows[arm, pruned, c] for c in each.contexts if (arm, pruned, c) in each.rows]
        if not rows:
            continue
        base = LOOKS[arm]
        look = base if pruned else Look(base.colour, base.marker, (0, (1, 2)), hollow=True)
        xs, ys = [row.context for row in rows], [row.ttft_s for row in rows]
        plot.line(axes, xs, ys, [row.ttft_s_interquartile for row in rows], look)
        ends.append((xs[-1], ys[-1], f"{arm}, {'pruned' if pruned else 'whole'}", look.colour))
    plot.context_axis(axes, each.contexts, "prompt, tokens")
    plot.log_values(axes, [end for r in each.rows.values() for end in r.ttft_s_interquartile])
    plot.label_ends(axes, ends)


def table(each: Prefills) -> Table:
    rows = []
    for context in each.contexts:
        for arm, pruned in CONTESTANTS:
            row = each.rows.get((arm, pruned, context))
            if row is None:
                continue
            ratio = each.ratios.get((arm, context)) if pruned else None
            rows.append(
                (
                    f"{row.prompt_tokens:,}",
                    arm,
                    "yes" if pruned else "no",
                    words.number(row.ttft_s),
                    words.interval(row.ttft_s_interquartile),
                    words.count(row.last_layer_rows),
                    words.count(row.draft_rows),
                    ""
                    if ratio is None
                    else words.with_interval(
                        ratio.unpruned_over_pruned, ratio.unpruned_over_pruned_interquartile, 2
                    ),
                    words.count(row.n_runs),
                )
            )
    return Table(
        caption=f"Prefill: {each.first.model}",
        columns=columns(
            ("prompt tokens", "arm", "pruned"),
            (
                "TTFT s", "quartiles", "rows of the last layer", "rows the draft stores",
                "unpruned / pruned", "runs",
            ),
        ),
        rows=tuple(rows),
        origin=origin(list(each.rows.values())),
    )  # fmt: skip
