"""Every input: acceptance, time and answers, per arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import paper, plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Strong, Table, columns, grouped, origin
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.runs import (
    Case,
    Place,
    Point,
    arranged,
    label,
    operating_points,
    points_text,
    reasons,
)
from tllm_wmtp.bench.report.schema import RunRow
from tllm_wmtp.bench.report.style import ARMS, LIGHT, LOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Fields whose absence the tables explain.
SHOWN = ("al", "al_interval", "tpot_ms", "tpot_ms_interval", "ttft_s", "score", "output_digest")
ROW = 30  # pixels of a case in the figure
MEASURE = "wmtp bench run docs/benchmarks/suite.yaml --out DIR"


@dataclass(frozen=True)
class Task:
    """One case at the operating point: the rows of two arms or three."""

    case: Case
    rows: dict[str, RunRow]

    def over_dense(self, arm: str) -> float | None:
        """How many times the dense arm's time per token is the arm's."""
        dense, mine = self.rows.get("dense"), self.rows.get(arm)
        if dense is None or mine is None or not dense.tpot_ms or not mine.tpot_ms:
            return None
        return dense.tpot_ms / mine.tpot_ms

    @property
    def identical(self) -> bool | None:
        """Whether all arms made the same tokens; None where sampling or a digest is missing."""
        digests = [row.output_digest for row in self.rows.values()]
        if self.case.temperature != 0 or None in digests or len(digests) < 2:
            return None
        return len(set(digests)) == 1


def tasks(rows: Sequence[RunRow], points: Mapping[Place, Point]) -> list[Task]:
    """Cases with two arms or more at their place's operating point."""
    found = [
        Task(each.case, each.at(point))
        for each in arranged(rows)
        if (point := points.get(each.case.place))
    ]
    return [task for task in found if len(task.rows) > 1]


def build(results: Results) -> Section:
    points = operating_points(results.run)
    found = tasks(results.run, points)
    blocks: list[Figure | Table] = []
    for members in grouped(found, lambda task: task.case.machine).values():
        said = points_text(points, [task.case for task in members])
        if any(task.over_dense("windowed") for task in members):
            blocks.append(figure(members, said))
        blocks += [speed_table(members, said), answer_table(members, said)]
    for rows in grouped(results.run, lambda row: row.machine).values():
        blocks.append(every_row(rows))
    return Section(
        key="tasks",
        title="Inputs",
        question=(
            "What does each arm give on each input: acceptance, time per token, speed over no "
            "speculation, the same output, the right answers?"
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=sentence(found) if found else "",
    )


def sentence(found: Sequence[Task]) -> str:
    parts = []
    for arm in ("windowed", "native"):
        known = [value for task in found if (value := task.over_dense(arm)) is not None]
        if known:
            spread = words.ratio(min(known))
            if len(known) > 1:
                spread += f" to {words.ratio(max(known))}"
            text = f"{arm} is {spread} as fast as dense over {words.plural(len(known), 'case')}"
            slower = sum(value < 1 for value in known)
            parts.append(text + (f" (slower in {slower})" if slower else ""))
    same = [task.identical for task in found if task.identical is not None]
    text = "; ".join(parts)
    text = f"{text[0].upper()}{text[1:]}." if text else ""
    if same:
        text += f" Outputs of the arms are identical in {sum(same)} of {len(same)} greedy cases."
    return text.strip()


def source_text() -> str:
    shown = ", ".join(
        f"{name} {words.signed_percent(gain - 1)} at AL {al:.1f}"
        for name, (gain, al) in paper.TASK_GAIN.items()
    )
    return f"q35 at 1M tokens, windowed over native end to end: {shown}."


def figure(found: Sequence[Task], point: str) -> Figure:
    batch = min(task.case.batch for task in found)
    shown = [
        task
        for task in found
        if task.over_dense("windowed") is not None and task.case.batch == batch
    ]
    return Figure(
        title=f"Speed over dense: {point}, batch {batch}",
        alt=(
            "Dot chart of the speed over no speculation per input, native and windowed. "
            + sentence(found)
        ),
        panels=(
            Panel(
                "Time per token of dense over the arm's",
                "ratio; right of 1 is faster than no speculation",
                partial(draw, found=shown),
                height=132 + ROW * len(shown),
                left=14,
                right=20,
                top=70,
            ),
        ),
        sentence=sentence(found),
        origin=origin([row for task in shown for row in task.rows.values()]),
        source=source_text(),
    )


def draw(axes: Axes, found: Sequence[Task]) -> None:
    """A line per case from native to windowed, with the case's name above it."""
    cases = [task.case for task in found]
    for index, task in enumerate(found):
        values = {arm: task.over_dense(arm) for arm in ("native", "windowed")}
        ends = [value for value in values.values() if value is not None]
        axes.plot([0, max(ends)], [index] * 2, color=LIGHT["rule"], linewidth=0.8, zorder=1)
        axes.plot([min(ends), max(ends)], [index] * 2, color=LIGHT["rule"], linewidth=3, zorder=2)
        for arm, value in values.items():
            if value is not None:
                axes.plot([value], [index], LOOKS[arm].marker, color=LOOKS[arm].colour, zorder=4)
        axes.annotate(
            label(task.case, cases), (0, index), (2, 6), textcoords="offset points", fontsize=9.5
        )
    axes.axvline(1, color=LIGHT["muted"], linewidth=1, zorder=1)
    axes.set_yticks([])
    axes.set_ylim(len(found) - 0.6, -0.8)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(left=0)
    plot.few_ticks(axes)
    axes.set_xlabel("time per token, dense / arm")
    plot.line_legend(axes, [(arm, LOOKS[arm]) for arm in ("native", "windowed")], joined=False)


def of(task: Task, arm: str, show: Callable[[RunRow], str]) -> str:
    row = task.rows.get(arm)
    return words.ABSENT if row is None else show(row)


def al(row: RunRow) -> str:
    return words.with_interval(row.al, row.al_interval, 2)


def tpot(row: RunRow) -> str:
    return words.with_interval(row.tpot_ms, row.tpot_ms_interval)


def speed_table(found: Sequence[Task], point: str) -> Table:
    cases = [task.case for task in found]
    rows = tuple(
        (
            label(task.case, cases),
            of(task, "native", al),
            of(task, "windowed", al),
            *(of(task, arm, tpot) for arm in ARMS),
            words.ratio(task.over_dense("native")),
            words.ratio(task.over_dense("windowed")),
        )
        for task in found
    )
    return Table(
        caption=f"Acceptance and time per output token, {point}",
        columns=columns(
            ("case",),
            (
                "AL native", "AL windowed", "TPOT ms dense", "TPOT ms native", "TPOT ms windowed",
                "over dense, native", "over dense, windowed",
            ),
        ),
        rows=rows,
        origin=origin([row for task in found for row in task.rows.values()]),
        notes=("In brackets: 95 % intervals, bootstrap over requests or steps.",),
    )  # fmt: skip


def answer_table(found: Sequence[Task], point: str) -> Table:
    cases = [task.case for task in found]
    rows = []
    for task in found:
        same = task.identical
        rows.append(
            (
                label(task.case, cases),
                *(of(task, arm, lambda row: words.number(row.ttft_s)) for arm in ARMS),
                "not compared" if same is None else "identical" if same else Strong("DIFFERS"),
                *(of(task, arm, lambda row: words.percent(row.score)) for arm in ARMS),
                words.count(max(row.n_runs for row in task.rows.values())),
                words.count(sum(row.screened for row in task.rows.values())),
            )
        )
    return Table(
        caption=f"Time to the first token, outputs and answers, {point}",
        columns=columns(
            ("case",),
            (
                *(f"TTFT s {arm}" for arm in ARMS), "outputs of the arms",
                *(f"answers found {arm}" for arm in ARMS), "requests", "screened",
            ),
        ),
        rows=tuple(rows),
        origin=origin([row for task in found for row in task.rows.values()]),
        notes=(
            *reasons((row for task in found for row in task.rows.values()), SHOWN),
            "Screened: requests left out because their output repeats itself, over all arms. "
            "Outputs are compared where tokens are chosen greedily.",
        ),
    )  # fmt: skip


def every_row(rows: Sequence[RunRow]) -> Table:
    cells = tuple(
        (
            row.model,
            row.input,
            row.arm,
            f"{row.context:,}",
            str(row.depth),
            "whole" if row.window is None else f"{row.window:,}",
            row.kv_dtype,
            str(row.batch),
            str(row.seed),
            words.fixed(row.al),
            words.number(row.tpot_ms),
            words.number(row.step_ms),
            words.number(row.draft_ms),
            words.number(row.verify_ms),
            words.number(row.tokens_per_s),
            words.number(row.ttft_s),
            row.config_hash,
        )
        for row in sorted(
            rows, key=lambda r: (r.model, r.input, r.context, r.batch, r.kv_dtype, r.arm, r.depth,
                                 r.window or 0, r.seed)
        )
    )  # fmt: skip
    return Table(
        caption=f"Every cell of the suite: {words.plural(len(rows), 'row')}",
        columns=columns(
            ("model", "input", "arm"),
            (
                "context", "depth", "window", "KV", "batch", "seed", "AL", "TPOT ms", "step ms",
                "draft ms", "verify ms", "tokens/s", "TTFT s", "configuration",
            ),
        ),
        rows=cells,
        origin=origin(rows),
        folded=True,
    )  # fmt: skip
