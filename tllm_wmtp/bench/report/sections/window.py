"""Dose and response: acceptance and agreement against the window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import paper, plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Table, columns, grouped, origin
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.runs import (
    Arms,
    Case,
    Place,
    Point,
    arranged,
    operating_points,
    overlap,
)
from tllm_wmtp.bench.report.schema import ProbeResult, RunRow
from tllm_wmtp.bench.report.style import LIGHT, Look, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = (
    "wmtp bench run docs/benchmarks/suite.yaml --out DIR\n"
    "wmtp probe --model demo --context 16k --windows 256,512,1024,2048,4032 --out DIR"
)


@dataclass(frozen=True)
class Dose:
    """One case at one depth: its windowed rows by window, and the native row."""

    case: Case
    windowed: tuple[RunRow, ...]
    native: RunRow | None

    @property
    def windows(self) -> list[int]:
        return [row.window for row in self.windowed if row.window is not None]


def doses(arms: Sequence[Arms], points: Mapping[Place, Point]) -> list[Dose]:
    """Cases with two windows or more at the depth and sink of their place's point."""
    found = []
    for each in arms:
        point = points.get(each.case.place)
        if point is None:
            continue
        rows = [
            row
            for at, row in sorted(each.windowed.items())
            if (at.depth, at.n_sink) == (point.depth, point.n_sink) and row.al is not None
        ]
        native = each.native.get(point.depth)
        if len(rows) > 1:
            known = native if native is not None and native.al is not None else None
            found.append(Dose(each.case, tuple(rows), known))
    return found


def build(results: Results) -> Section:
    found = doses(arranged(results.run), operating_points(results.run))
    blocks: list[Figure | Table] = []
    for members in grouped(found, without_input).values():
        blocks += [figure(members), table(members)]
    probes = [probe for probe in results.probe if len(probe.curve) > 1]
    probes.sort(key=lambda probe: (probe.model, probe.context))
    blocks += [
        agreement_figure(list(members))
        for members in grouped(probes, lambda probe: probe.machine).values()
    ]
    return Section(
        key="window",
        title="How much of a window is enough",
        question=(
            "Does a larger window make the drafts better, and from which size on does the windowed "
            "draft do what the native one does?"
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=" ".join(sentence(dose) for dose in found[:1]),
    )


def without_input(dose: Dose) -> Case:
    return dose.case.without(input="", difficulty="", options=())


def below_native(dose: Dose, native: RunRow) -> list[int]:
    """Windows whose AL is below native's, and whose interval does not reach native's."""
    return [
        row.window
        for row in dose.windowed
        if row.window is not None
        and (row.al or 0) < (native.al or 0)
        and not overlap(row.al_interval, native.al_interval)
    ]


def sentence(dose: Dose) -> str:
    small, large = dose.windowed[0], dose.windowed[-1]
    text = (
        f"{dose.case.model}, {dose.case.input}: AL {words.fixed(small.al)} at a window of "
        f"{small.window:,} and {words.fixed(large.al)} at {large.window:,}"
    )
    if dose.native is None:
        return text + "; native was not measured."
    text += f", {words.fixed(dose.native.al)} natively; "
    below = below_native(dose, dose.native)
    judged = None not in (row.al_interval for row in (*dose.windowed, dose.native))
    beyond = " beyond the intervals" if judged else " (a single request has no interval)"
    which = {0: "no window is", len(dose.windowed): "every window is"}.get(
        len(below), f"{words.listed(f'{window:,}' for window in below)} is"
    )
    return f"{text}{which} below native{beyond}."


def source_text() -> str:
    shown = ", ".join(f"{al:.2f} at {window:,}" for window, al in paper.DOSE.items())
    return f"q35 at 1M tokens: AL {shown}, {paper.DOSE_NATIVE:.2f} natively."


def figure(members: Sequence[Dose]) -> Figure:
    case = members[0].case
    every = [row for dose in members for row in (*dose.windowed, dose.native) if row is not None]
    said = " ".join(sentence(dose) for dose in members)
    return Figure(
        title=(
            f"Acceptance length and time per token against the window: {case.model}, "
            f"{words.tokens(case.context)} tokens, depth {members[0].windowed[0].depth}"
        ),
        alt=f"Line charts of acceptance length and of time per output token by window. {said}",
        panels=(
            Panel(
                "Acceptance length",
                "tokens per step, with 95 % intervals",
                partial(draw, members=members, name="al"),
                right=plot.room(names(members)),
            ),
            Panel(
                "Time per output token",
                "ms, with 95 % intervals",
                partial(draw, members=members, name="tpot_ms"),
                right=plot.room(names(members)),
            ),
        ),
        sentence=f"{said} Native is a level line, since it has no window.",
        origin=origin(every),
        source=source_text(),
    )


def names(members: Sequence[Dose]) -> list[str]:
    if len(members) == 1:
        return ["windowed"]
    return [f"windowed, {dose.case.input}" for dose in members]


def draw(axes: Axes, members: Sequence[Dose], name: str) -> None:
    ends = []
    windows = sorted({window for dose in members for window in dose.windows})
    for index, dose in enumerate(members):
        rows = [row for row in dose.windowed if getattr(row, name) is not None]
        if not rows:
            continue
        shown = look("windowed", index)
        xs = [row.window or 0 for row in rows]
        ys = [getattr(row, name) for row in rows]
        plot.line(axes, xs, ys, [getattr(row, f"{name}_interval") for row in rows], shown)
        suffix = f", {dose.case.input}" if len(members) > 1 else ""
        ends.append((xs[-1], ys[-1], f"windowed{suffix}", shown.colour))
        if dose.native is not None and getattr(dose.native, name) is not None:
            level, other = getattr(dose.native, name), look("native", index)
            plot.line(axes, [windows[0], windows[-1]], [level, level], None, other)
            ends.append((windows[-1], level, f"native{suffix}", other.colour))
    plot.context_axis(axes, windows, "window, tokens")
    axes.margins(y=0.12)
    plot.few_ticks(axes, "y")
    plot.label_ends(axes, ends)


def table(members: Sequence[Dose]) -> Table:
    rows = []
    for dose in members:
        for row in (*dose.windowed, dose.native):
            if row is None:
                continue
            rows.append(
                (
                    dose.case.input,
                    row.arm,
                    words.count(row.window) if row.window is not None else "whole context",
                    words.with_interval(row.al, row.al_interval, 2),
                    words.with_interval(row.tpot_ms, row.tpot_ms_interval),
                    words.number(row.step_ms),
                    words.count(row.n_runs),
                )
            )
    case = members[0].case
    return Table(
        caption=(
            f"Window sweep: {case.model}, {words.tokens(case.context)} tokens, KV {case.kv_dtype}, "
            f"batch {case.batch}"
        ),
        columns=columns(
            ("input", "arm"),
            ("window", "AL (95 %)", "TPOT ms (95 %)", "step ms", "requests"),
        ),
        rows=tuple(rows),
        origin=origin([row for dose in members for row in dose.windowed]),
    )


def agreement_figure(probes: Sequence[ProbeResult]) -> Figure:
    said = " ".join(agreement_sentence(probe) for probe in probes)
    low, high = paper.AGREEMENT
    return Figure(
        title="Drafts that a window leaves unchanged, at the same hidden state",
        alt=f"Line chart of the share of unchanged drafts by window. {said}",
        panels=tuple(
            Panel(
                f"{probe.model}, {words.tokens(probe.context)} tokens",
                "share of drafts whose first choice stays, with 95 % Wilson intervals",
                partial(draw_agreement, probe=probe),
                right=plot.room(["paper, least", *(row.input for row in probe.rows)]),
            )
            for probe in probes
        ),
        sentence=said,
        origin=origin(probes),
        source=f"{words.percent(low)} to {words.percent(high)} at window 4,032, over its models.",
    )


def agreement_sentence(probe: ProbeResult) -> str:
    small, large = probe.curve[0], probe.curve[-1]
    return (
        f"{probe.model} at {probe.context:,} tokens: {words.percent(small.agreement, 1)} of "
        f"{small.drafts:,} drafts stay the same with a window of {small.window:,}, "
        f"{words.percent(large.agreement, 1)} with {large.window:,}."
    )


def draw_agreement(axes: Axes, probe: ProbeResult) -> None:
    windows = [point.window for point in probe.curve]
    ends = []
    inputs = grouped((row for row in probe.rows if row.curve), lambda row: row.input)
    if len(inputs) > 1:
        for index, (name, rows) in enumerate(inputs.items(), start=1):
            marker = look("windowed", index)
            thin = Look(LIGHT["muted"], marker.marker, marker.dash, hollow=True)
            ys = []
            for at in range(len(rows[0].curve)):
                same = sum(row.curve[at].drafts - row.curve[at].flips for row in rows)
                ys.append(same / sum(row.curve[at].drafts for row in rows))
            xs = [point.window for point in rows[0].curve]
            plot.line(axes, xs, ys, None, thin)
            ends.append((xs[-1], ys[-1], name, thin.colour))
    ys = [point.agreement for point in probe.curve]
    shown = look("windowed")
    plot.line(axes, windows, ys, [point.interval for point in probe.curve], shown)
    ends.append(
        (windows[-1], ys[-1], "all inputs" if len(inputs) > 1 else "windowed", shown.colour)
    )
    for share, name in zip(paper.AGREEMENT, ("least", "most"), strict=True):
        axes.axhline(share, color=LIGHT["source"], linestyle=(0, (1, 2)), linewidth=1.2)
        ends.append((windows[-1], share, f"paper, {name}", LIGHT["source"]))
    plot.context_axis(axes, windows, "window, tokens")
    axes.set_ylim(top=1.01)
    plot.few_ticks(axes, "y")
    plot.label_ends(axes, ends)
