"""Conditional acceptance by draft position, native against windowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Table, columns, grouped, origin
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.runs import Case, arranged, operating_points, overlap, points_text
from tllm_wmtp.bench.report.schema import Alpha, RunRow
from tllm_wmtp.bench.report.style import LOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = "wmtp bench run docs/benchmarks/suite.yaml --out DIR"


@dataclass(frozen=True)
class Pair:
    """Native and windowed rows of one case at the operating point."""

    case: Case
    rows: dict[str, RunRow]

    @property
    def title(self) -> str:
        return f"{self.case.model}, {self.case.input}, {words.tokens(self.case.context)}"


def build(results: Results) -> Section:
    points = operating_points(results.run)
    pairs = [
        Pair(each.case, {arm: row for arm, row in each.at(point).items() if row.alpha})
        for each in arranged(results.run)
        if (point := points.get(each.case.place))
    ]
    pairs = [pair for pair in pairs if {"native", "windowed"} <= pair.rows.keys()]
    chosen = [
        longest(members)
        for members in grouped(
            pairs, lambda p: (p.case.machine, p.case.model, p.case.input)
        ).values()
    ]
    blocks: list[Figure | Table] = []
    for members in grouped(chosen, lambda pair: pair.case.machine).values():
        said = points_text(points, [pair.case for pair in members])
        blocks += [figure(members, said), table(members, said)]
    return Section(
        key="alpha",
        title="Acceptance by draft position",
        question=(
            "Of the steps that reached draft j, how many accept it? A window that took away what "
            "the draft needs would let the later positions collapse first."
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=sentence(chosen) if chosen else "",
    )


def longest(pairs: Sequence[Pair]) -> Pair:
    """The case with the longest context, then the smallest batch, the widest type and the most
    requests."""

    def rank(pair: Pair) -> tuple[int, int, bool, int, Case]:
        case = pair.case
        requests = min(row.n_runs for row in pair.rows.values())
        return case.context, -case.batch, case.kv_dtype == "float32", requests, case

    return max(pairs, key=rank)


def positions(pair: Pair) -> Iterator[tuple[int, Alpha, Alpha]]:
    """Draft positions, from 1, that both arms reached."""
    native, windowed = pair.rows["native"].alpha or (), pair.rows["windowed"].alpha or ()
    for j, (one, other) in enumerate(zip(native, windowed, strict=False), start=1):
        if one.value is not None and other.value is not None:
            yield j, one, other


def sentence(pairs: Sequence[Pair]) -> str:
    """At how many positions the intervals overlap; every other one by name."""
    both = [(pair, *entry) for pair in pairs for entry in positions(pair)]
    apart = [(p, j, n, w) for p, j, n, w in both if not overlap(n.interval, w.interval)]
    text = (
        f"At {len(both) - len(apart)} of {words.plural(len(both), 'draft position')} in "
        f"{words.plural(len(pairs), 'case')} the 95 % intervals of native and windowed acceptance "
        "overlap"
    )
    if not apart:
        return text + "."
    shown = "; ".join(
        f"{p.case.model}, {p.case.input}, draft {j}: {words.fixed(n.value)} natively, "
        f"{words.fixed(w.value)} windowed"
        for p, j, n, w in apart[:4]
    )
    more = f"; and {len(apart) - 4} more" if len(apart) > 4 else ""
    return f"{text}. Apart: {shown}{more}."


def figure(pairs: Sequence[Pair], point: str) -> Figure:
    said = sentence(pairs)
    return Figure(
        title=f"Conditional acceptance by draft position: {point}",
        alt=f"Dot charts of conditional acceptance by draft position, native and windowed. {said}",
        panels=tuple(
            Panel(
                pair.title,
                "share accepted of the steps that reached it, 95 % Wilson intervals",
                partial(draw, pair=pair),
                height=240,
                right=84,
            )
            for pair in pairs
        ),
        sentence=f"{said} Of each model and input the longest context is shown.",
        origin=origin([row for pair in pairs for row in pair.rows.values()]),
        source=(
            "on its three models the windowed profile stays within the 95 % intervals of the "
            "native one at nearly every position."
        ),
    )


def draw(axes: Axes, pair: Pair) -> None:
    ends = []
    for arm, shift in (("native", -0.08), ("windowed", 0.08)):
        known = [
            (j, each.value, each.interval)
            for j, each in enumerate(pair.rows[arm].alpha or (), start=1)
            if each.value is not None
        ]
        if not known:
            continue
        xs = [j + shift for j, _, _ in known]
        ys = [value for _, value, _ in known]
        plot.line(axes, xs, ys, [interval for _, _, interval in known], LOOKS[arm])
        ends.append((xs[-1], ys[-1], arm, LOOKS[arm].colour))
    last = max(len(row.alpha or ()) for row in pair.rows.values())
    plot.plain_ticks(axes, range(1, last + 1))
    axes.set_xlim(0.6, last + 0.4)
    axes.set_xlabel("draft position j")
    axes.set_ylim(0, 1.03)
    plot.label_ends(axes, ends)


def table(pairs: Sequence[Pair], point: str) -> Table:
    last = max(len(row.alpha or ()) for pair in pairs for row in pair.rows.values())
    rows = []
    for pair in pairs:
        for arm, row in pair.rows.items():
            if arm == "dense":
                continue
            cells = [
                words.with_interval(each.value, each.interval, 2)
                if each.value is not None
                else "not reached"
                for each in row.alpha or ()
            ]
            cells += [""] * (last - len(cells))
            rows.append((pair.title, arm, *cells))
    return Table(
        caption=f"Conditional acceptance with 95 % Wilson intervals, {point}",
        columns=columns(("case", "arm"), [f"draft {j}" for j in range(1, last + 1)]),
        rows=tuple(rows),
        origin=origin([row for pair in pairs for row in pair.rows.values()]),
        folded=True,
    )
