"""The best depth of each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import paper, plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Strong, Table, columns, grouped, origin
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.runs import (
    Case,
    Point,
    arranged,
    label,
    operating_points,
    overlap,
    reasons,
)
from tllm_wmtp.bench.report.schema import RunRow
from tllm_wmtp.bench.report.style import LIGHT, LOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = "wmtp bench run docs/benchmarks/suite.yaml --out DIR"
BEST, TIED = "◂ best", "≈"


@dataclass(frozen=True)
class Depths:
    """One case: rows by depth of the arms that draft, at one window and sink; TPOT is there."""

    case: Case
    dense: RunRow | None
    by_depth: dict[str, dict[int, RunRow]]

    def best(self, arm: str) -> RunRow | None:
        """The fastest of several depths; one depth alone is no choice."""
        rows = self.by_depth[arm].values()
        return min(rows, key=lambda row: row.tpot_ms or 0) if len(rows) > 1 else None

    @property
    def rows(self) -> list[RunRow]:
        rows = [row for arm in self.by_depth.values() for row in arm.values()]
        return rows if self.dense is None else [self.dense, *rows]

    @property
    def gain(self) -> float | None:
        """TPOT of native over windowed, each at its best depth."""
        native, windowed = self.best("native"), self.best("windowed")
        if native is None or windowed is None or not native.tpot_ms or not windowed.tpot_ms:
            return None
        return native.tpot_ms / windowed.tpot_ms


def build(results: Results) -> Section:
    found = depths(results)
    blocks: list[Figure | Table] = []
    for members in grouped(found, lambda each: each.case.machine).values():
        blocks += [figure(members), table(members)]
        if any(each.gain is not None for each in members):
            blocks.append(best_table(members))
    return Section(
        key="depth",
        title="Best depth of each arm",
        question=(
            "A fair comparison lets each arm choose its own depth. Which depth gives each arm its "
            "lowest time per output token, and what is left between the arms then?"
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=sentence(found) if found else "",
    )


def depths(results: Results) -> list[Depths]:
    """Cases with two depths or more in an arm; windowed at the window of most depths."""
    points = operating_points(results.run)
    found = []
    for each in arranged(results.run):
        native = {depth: row for depth, row in each.native.items() if row.tpot_ms}
        windowed = most_depths(each.windowed, points.get(each.case.place))
        if max(len(native), len(windowed)) > 1:
            dense = each.dense if each.dense is not None and each.dense.tpot_ms else None
            by_depth = {"native": dict(sorted(native.items())), "windowed": windowed}
            found.append(Depths(each.case, dense, by_depth))
    return found


def most_depths(windowed: Mapping[Point, RunRow], point: Point | None) -> dict[int, RunRow]:
    """Rows by depth at the window and sink with most depths; of several, those of ``point``, then
    the widest."""
    by_reach: dict[tuple[int, int], dict[int, RunRow]] = {}
    for at, row in sorted(windowed.items()):
        if row.tpot_ms:
            by_reach.setdefault((at.window, at.n_sink), {})[at.depth] = row
    usual = (point.window, point.n_sink) if point else None
    chosen = max(
        by_reach, key=lambda reach: (len(by_reach[reach]), reach == usual, reach), default=None
    )
    return by_reach[chosen] if chosen is not None else {}


def sentence(found: Sequence[Depths]) -> str:
    gains = [each.gain for each in found if each.gain is not None]
    if not gains:
        return f"{words.plural(len(found), 'case')} with several depths in one arm only."
    spread = words.ratio(min(gains))
    if len(gains) > 1:
        spread += f" to {words.ratio(max(gains))}"
    best = [row.depth for each in found if (row := each.best("windowed")) is not None]
    native = [row.depth for each in found if (row := each.best("native")) is not None]
    return (
        f"Each at its own best depth, native takes {spread} the windowed arm's time per token over "
        f"{words.plural(len(gains), 'case')}; the windowed arm's best depth is "
        f"{words.listed(map(str, sorted(set(best))))}, native's "
        f"{words.listed(map(str, sorted(set(native))))}."
    )


def figure(found: Sequence[Depths]) -> Figure:
    cases = [each.case for each in found]
    said = sentence(found)
    low, high = paper.BEST_DEPTH_GAIN
    return Figure(
        title="Time per output token against depth",
        alt=f"Line charts of time per output token by depth, per arm. {said}",
        panels=tuple(
            Panel(
                label(each.case, cases),
                "ms per output token, with 95 % intervals; the best depth is ringed",
                partial(draw, each=each),
                height=280,
                right=84,
            )
            for each in found
        ),
        sentence=said,
        origin=origin([row for each in found for row in each.rows]),
        source=(
            f"windowed {words.ratio(low)} to {words.ratio(high)} over native, each at its best of "
            "the depths 3, 5, 7 and 9; the windowed optimum is often 3 or 5."
        ),
    )


def draw(axes: Axes, each: Depths) -> None:
    ends = []
    every = sorted({depth for rows in each.by_depth.values() for depth in rows})
    for arm, rows in each.by_depth.items():
        if not rows:
            continue
        xs, ys = list(rows), [row.tpot_ms or 0 for row in rows.values()]
        look = LOOKS[arm]
        plot.line(axes, xs, ys, [row.tpot_ms_interval for row in rows.values()], look)
        best = each.best(arm)
        if best is not None and best.tpot_ms is not None:
            axes.plot(
                [best.depth], [best.tpot_ms], "o", markersize=12, markerfacecolor="none",
                markeredgecolor=look.colour, markeredgewidth=1.2, zorder=5,
            )  # fmt: skip
        ends.append((xs[-1], ys[-1], arm, look.colour))
    if each.dense is not None and each.dense.tpot_ms is not None:
        level, look = each.dense.tpot_ms, LOOKS["dense"]
        axes.plot([every[0], every[-1]], [level, level], color=look.colour, linestyle=look.dash)
        ends.append((every[-1], level, "dense", look.colour))
    plot.plain_ticks(axes, every)
    axes.set_xlabel("depth: most tokens per step")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.06)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.05)
    plot.label_ends(axes, ends)
    axes.spines["bottom"].set_color(LIGHT["muted"])


def table(found: Sequence[Depths]) -> Table:
    cases = [each.case for each in found]
    every = sorted({d for each in found for rows in each.by_depth.values() for d in rows})
    rows = []
    for each in found:
        for arm, by_depth in each.by_depth.items():
            best = each.best(arm)
            if not by_depth:
                continue
            rows.append(
                (
                    label(each.case, cases),
                    arm,
                    *(cell(by_depth.get(depth), best) for depth in every),
                )
            )
    return Table(
        caption="Time per output token by depth, ms with 95 % intervals",
        columns=columns(("case", "arm"), [f"depth {depth}" for depth in every]),
        rows=tuple(rows),
        origin=origin([row for each in found for row in each.rows]),
        notes=(
            f"{BEST}: lowest of its row. {TIED}: its interval overlaps the best one's, so the data "
            "does not tell the two depths apart.",
            *reasons((row for each in found for row in each.rows), ("tpot_ms", "tpot_ms_interval")),
        ),
    )


def cell(row: RunRow | None, best: RunRow | None) -> str:
    if row is None:
        return words.ABSENT
    text = words.with_interval(row.tpot_ms, row.tpot_ms_interval)
    if best is None:
        return text
    if row is best:
        return Strong(f"{text} {BEST}")
    tied = overlap(row.tpot_ms_interval, best.tpot_ms_interval)
    return f"{text} {TIED}" if tied else text


def best_table(found: Sequence[Depths]) -> Table:
    cases = [each.case for each in found]
    rows = []
    for each in found:
        native, windowed = each.best("native"), each.best("windowed")
        if native is None or windowed is None:
            continue
        tied = overlap(native.tpot_ms_interval, windowed.tpot_ms_interval)
        rows.append(
            (
                label(each.case, cases),
                str(native.depth),
                words.with_interval(native.tpot_ms, native.tpot_ms_interval),
                str(windowed.depth),
                words.with_interval(windowed.tpot_ms, windowed.tpot_ms_interval),
                words.ratio(each.gain),
                words.ABSENT if tied is None else "overlap" if tied else "apart",
            )
        )
    return Table(
        caption="Both arms at their own best depth",
        columns=columns(
            ("case",),
            (
                "native depth", "native TPOT ms", "windowed depth", "windowed TPOT ms",
                "native / windowed",
                "intervals",
            ),
        ),
        rows=tuple(rows),
        origin=origin([row for each in found for row in each.rows]),
    )  # fmt: skip
