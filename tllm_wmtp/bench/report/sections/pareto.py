"""Throughput against time per token, over the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Table, columns, grouped, origin
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.runs import Case, arranged, label, operating_points
from tllm_wmtp.bench.report.schema import RunRow
from tllm_wmtp.bench.report.style import ARMS, LOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = "wmtp bench run docs/benchmarks/suite.yaml --out DIR"


@dataclass(frozen=True)
class Front:
    """One case over batch sizes: each arm's rows, by batch."""

    case: Case
    arms: dict[str, list[RunRow]]

    @property
    def rows(self) -> list[RunRow]:
        return [row for rows in self.arms.values() for row in rows]


def fronts(results: Results) -> list[Front]:
    """Cases with two batch sizes or more in an arm."""
    points = operating_points(results.run)
    by_case = grouped(arranged(results.run), lambda each: each.case.without(batch=0))
    found = []
    for case, members in by_case.items():
        point = points.get(case.place)
        if point is None:
            continue
        arms: dict[str, list[RunRow]] = {}
        for arm in ARMS:
            rows = [at[arm] for each in members if arm in (at := each.at(point))]
            known = [row for row in rows if row.tpot_ms and row.tokens_per_s]
            if known:
                arms[arm] = sorted(known, key=lambda row: row.batch)
        if any(len(rows) > 1 for rows in arms.values()):
            found.append(Front(case, arms))
    return found


def build(results: Results) -> Section:
    found = fronts(results)
    blocks: list[Figure | Table] = []
    for members in grouped(found, lambda front: front.case.machine).values():
        blocks += [figure(members), table(members)]
    return Section(
        key="batch",
        title="Throughput against latency",
        question=(
            "More requests at once raise the throughput of a server and the time that each of them "
            "waits. Which arm gives more tokens per second at the same time per token?"
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=sentence(found[0]) if found else "",
    )


def sentence(front: Front) -> str:
    """Throughput of every arm at the largest batch that all of them have."""
    shared = set.intersection(*({row.batch for row in rows} for rows in front.arms.values()))
    if not shared:
        return "No batch size was measured in every arm."
    batch = max(shared)
    at = {arm: next(row for row in rows if row.batch == batch) for arm, rows in front.arms.items()}
    shown = ", ".join(
        f"{arm} {words.number(row.tokens_per_s)} tokens/s at {words.number(row.tpot_ms)} ms per "
        "token"
        for arm, row in at.items()
    )
    return f"{front.case.model}, {front.case.input}, {plural_batch(batch)}: {shown}."


def plural_batch(batch: int) -> str:
    return words.plural(batch, "request") + " at once"


def figure(found: Sequence[Front]) -> Figure:
    cases = [front.case for front in found]
    said = " ".join(sentence(front) for front in found)
    return Figure(
        title="Throughput against time per token; numbers at the points are batch sizes",
        alt=f"Line charts of tokens per second against time per output token, per arm. {said}",
        panels=tuple(
            Panel(
                label(front.case, cases),
                "output tokens per second of the whole batch",
                partial(draw, front=front),
                right=24,
                top=70,
            )
            for front in found
        ),
        sentence=f"{said} Up and to the left is better.",
        origin=origin([row for front in found for row in front.rows]),
    )


def draw(axes: Axes, front: Front) -> None:
    for arm, rows in front.arms.items():
        xs = [row.tpot_ms or 0 for row in rows]
        ys = [row.tokens_per_s or 0 for row in rows]
        look = LOOKS[arm]
        plot.line(axes, xs, ys, None, look)
        for row, x, y in zip(rows, xs, ys, strict=True):
            axes.annotate(
                str(row.batch), (x, y), (0, -14 if arm == "windowed" else 7),
                textcoords="offset points", ha="center",
                fontsize=9, color=look.colour,
            )  # fmt: skip
    axes.set_xlabel("time per output token, ms")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(0.12)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.08)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    plot.line_legend(axes, [(arm, LOOKS[arm]) for arm in front.arms])


def table(found: Sequence[Front]) -> Table:
    cases = [front.case for front in found]
    rows = tuple(
        (
            label(front.case, cases),
            arm,
            words.count(row.batch),
            words.number(row.tokens_per_s),
            words.with_interval(row.tpot_ms, row.tpot_ms_interval),
            words.number(row.step_ms),
            words.fixed(row.al),
            words.number(row.ttft_s),
        )
        for front in found
        for arm, members in front.arms.items()
        for row in members
    )
    return Table(
        caption="Batch sizes at the operating point",
        columns=columns(
            ("case", "arm"),
            ("batch", "tokens/s", "TPOT ms (95 %)", "step ms", "AL", "TTFT s"),
        ),
        rows=rows,
        origin=origin([row for front in found for row in front.rows]),
    )
