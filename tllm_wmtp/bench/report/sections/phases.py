"""The latency model: phases of a step, fitted lines, and predictions, from ``wmtp bench fit``."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import paper, plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Table, columns, origin
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.schema import FitLine, FitPrediction, FitResult, FitRow
from tllm_wmtp.bench.report.style import FALLING, LIGHT, LOOKS, RISING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = "wmtp bench fit --model demo --contexts 16k,64k --depths 2..9 --out DIR"
ARMS = ("native", "windowed")


@dataclass(frozen=True)
class Phases:
    """Phases of one step in ms; ``first`` is the first draft forward, ``later`` all others."""

    arm: str
    context: int
    depth: int
    verify: float
    first: float
    later: float

    @classmethod
    def of(cls, row: FitRow) -> Phases | None:
        if row.verify_ms is None or row.ctx_ms is None or row.fwd_ms is None:
            return None
        later = (row.gamma - 1) * row.fwd_ms
        return cls(row.arm, row.context, row.depth, row.verify_ms, row.ctx_ms, later)


def build(results: Results) -> Section:
    blocks: list[Figure | Table] = []
    fits = sorted(results.fit, key=lambda fit: (fit.model, contexts(fit)))
    for fit in fits:
        blocks.append(figure(fit))
        blocks.append(fit_table(fit))
        if fit.predictions:
            blocks.append(prediction_table(fit))
    return Section(
        key="phases",
        title="Where the time of a step goes",
        question=(
            "A step is t_verify + t_ctx + gamma t_fwd: one verify, gamma draft forwards, and what "
            "the first of them costs more because it feeds the accepted rows. Which of them does "
            "the window make smaller, and does the model predict the windowed step?"
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=headline(fits[0]) if fits else "",
    )


def contexts(fit: FitResult) -> list[int]:
    return sorted({row.context for row in fit.rows})


def deepest(fit: FitResult, context: int) -> list[Phases]:
    """Phases of both arms at the largest depth at which they were timed."""
    timed = [p for row in fit.rows if row.context == context and (p := Phases.of(row))]
    by_depth: dict[int, dict[str, Phases]] = {}
    for each in timed:
        by_depth.setdefault(each.depth, {})[each.arm] = each
    shared = [depth for depth, arms in by_depth.items() if set(ARMS) <= arms.keys()]
    return [by_depth[max(shared)][arm] for arm in ARMS] if shared else []


def sentence(fit: FitResult) -> str:
    context = contexts(fit)[-1]
    phases = deepest(fit, context)
    parts = []
    if phases:
        native, windowed = phases
        parts.append(
            f"{fit.model} at {context:,} tokens and depth {native.depth}: the verify takes "
            f"{words.number(native.verify)} ms natively and {words.number(windowed.verify)} ms "
            f"windowed, the first draft forward {words.number(native.first)} and "
            f"{words.number(windowed.first)} ms, the later ones together "
            f"{words.number(native.later)} and {words.number(windowed.later)} ms."
        )
    if fit.predictions:
        errors = [abs(p.relative_error) for p in fit.predictions]
        parts.append(
            f"The windowed step as predicted from the native one: median error "
            f"{words.percent(statistics.median(errors), 1)}, largest "
            f"{words.percent(max(errors), 1)}, over {words.plural(len(errors), 'prediction')}."
        )
    return (
        " ".join(parts)
        or f"{fit.model}: fitted at {words.listed(map(words.tokens, contexts(fit)))}."
    )


def headline(fit: FitResult) -> str:
    context = contexts(fit)[-1]
    phases = deepest(fit, context)
    if not phases:
        return sentence(fit)
    native, windowed = phases
    return (
        f"At {words.tokens(context)} tokens and depth {native.depth} the draft phase takes "
        f"{words.number(native.first + native.later)} ms natively and "
        f"{words.number(windowed.first + windowed.later)} ms windowed, the verify "
        f"{words.number(native.verify)} and {words.number(windowed.verify)} ms ({fit.model})."
    )


def source_text() -> str:
    native, windowed = paper.FORWARD_MS
    return (
        f"a draft forward of q35 at 1M tokens takes {native:.2f} ms natively and {windowed:.2f} ms "
        f"windowed; its fits have an R² of {paper.FIT_R_SQUARED} or more."
    )


def figure(fit: FitResult) -> Figure:
    panels = []
    for context in contexts(fit):
        phases = deepest(fit, context)
        if phases:
            panels.append(
                Panel(
                    f"Phases at depth {phases[0].depth}, {words.tokens(context)} tokens",
                    "ms per step, medians",
                    partial(draw_phases, phases=phases),
                    height=300,
                    left=76,
                    right=64,
                    top=70,
                )
            )
        panels.append(
            Panel(
                f"Step against gamma, {words.tokens(context)} tokens",
                "ms per step; points are medians, lines are fits",
                partial(draw_fit, fit=fit, context=context),
            )
        )
    said = sentence(fit)
    return Figure(
        title=f"Phases of a step and the fitted model: {fit.model}",
        alt=f"Stacked bars of a step's phases per arm, and lines of the step by drafts. {said}",
        panels=tuple(panels),
        sentence=said,
        origin=origin([fit]),
        source=source_text(),
    )


def draw_phases(axes: Axes, phases: list[Phases]) -> None:
    for index, each in enumerate(phases):
        left = 0.0
        colour, tint = LIGHT[each.arm], LIGHT[f"{each.arm}-tint"]
        for value, face, hatch in (
            (each.verify, tint, ""),
            (each.first, colour, FALLING),
            (each.later, colour, RISING),
        ):
            axes.barh(
                index, value, 0.55, left=left, facecolor=face, hatch=hatch,
                edgecolor=LIGHT["ground"], linewidth=0, zorder=3,
            )  # fmt: skip
            left += value
        axes.annotate(
            f"{words.number(left)} ms", (left, index), (5, 0), textcoords="offset points",
            va="center", fontsize=9.5, annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(phases)), [each.arm for each in phases])
    axes.set_ylim(len(phases) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    axes.set_xlabel("ms")
    gamma = phases[0].depth - 1
    plot.legend(
        axes,
        [
            ("verify", LIGHT["dense-tint"], ""),
            ("first draft forward", LIGHT["dense"], FALLING),
            (f"{gamma - 1} later ones", LIGHT["dense"], RISING),
        ],
    )


def draw_fit(axes: Axes, fit: FitResult, context: int) -> None:
    ends = []
    gammas = sorted({row.gamma for row in fit.rows if row.context == context})
    for arm in ARMS:
        rows = sorted(
            (row for row in fit.rows if (row.arm, row.context) == (arm, context)),
            key=lambda row: row.gamma,
        )
        if not rows:
            continue
        look = LOOKS[arm]
        xs, ys = [row.gamma for row in rows], [row.step_ms for row in rows]
        plot.line(axes, xs, ys, [row.step_ms_interval for row in rows], look, joined=False)
        ends.append((float(xs[-1]), ys[-1], arm, look.colour))
        for each in fit.fits:
            if (each.arm, each.context) == (arm, context):
                draw_line(axes, each, arm)
    plot.plain_ticks(axes, gammas)
    axes.set_xlabel("gamma, draft forwards per step")
    axes.set_xlim(gammas[0] - 0.4, gammas[-1] + 0.4)
    axes.set_ylim(bottom=0)
    plot.label_ends(axes, ends)


def draw_line(axes: Axes, fit: FitLine, arm: str) -> None:
    """The fit, in two pieces where it jumps."""
    look, first, last = LOOKS[arm], min(fit.gammas), max(fit.gammas)
    pieces = [(first, last, 0.0)]
    if fit.jump is not None:
        pieces = [(first, fit.jump.gamma - 1, 0.0), (fit.jump.gamma, last, fit.jump.jump_ms)]
    for begin, end, lift in pieces:
        ys = [fit.intercept_ms + lift + fit.slope_ms * x for x in (begin, end)]
        axes.plot([begin, end], ys, color=look.colour, linestyle=look.dash, linewidth=1.3)


def fit_table(fit: FitResult) -> Table:
    rows = []
    for each in sorted(fit.fits, key=lambda line: (line.context, line.arm)):
        jump = "none"
        if each.jump is not None:
            height = words.with_interval(each.jump.jump_ms, each.jump.jump_ms_interval)
            jump = f"gamma {each.jump.gamma}: {height} ms"
        timers = each.timers
        rows.append(
            (
                f"{each.context:,}",
                each.arm,
                f"{min(each.gammas)}{words.EN_DASH}{max(each.gammas)}",
                words.with_interval(each.slope_ms, each.slope_ms_interval),
                words.with_interval(timers.t_fwd_ms, timers.t_fwd_ms_interval)
                if timers
                else words.ABSENT,
                words.with_interval(each.intercept_ms, each.intercept_ms_interval),
                words.with_interval(timers.t_ctx_ms, timers.t_ctx_ms_interval)
                if timers
                else words.ABSENT,
                words.fixed(each.r_squared, 4),
                jump,
            )
        )
    return Table(
        caption=f"Step fitted against gamma, ms with 95 % intervals: {fit.model}",
        columns=columns(
            ("context", "arm"),
            ("gamma", "slope", "t_fwd timed", "intercept", "t_ctx timed", "R²", "break"),
        ),
        rows=tuple(rows),
        origin=origin([fit]),
        notes=(
            "The slope is t_fwd and what each further row costs the verify; the intercept is t_ctx "
            "and the verify at gamma = 0.",
        ),
    )


def prediction_table(fit: FitResult) -> Table:
    rows = tuple(
        (
            f"{p.context:,}",
            str(p.depth),
            words.number(p.native_step_ms),
            words.with_interval(p.delta_ms, p.delta_ms_interval),
            words.number(p.predicted_windowed_step_ms),
            words.number(p.windowed_step_ms),
            error(p),
        )
        for p in fit.predictions
    )
    return Table(
        caption=f"The windowed step predicted from the native one: {fit.model}",
        columns=columns(
            ("context",),
            (
                "depth", "native step ms", "Δ ms (95 %)", "predicted ms", "measured ms",
                "error (95 %)",
            ),
        ),
        rows=rows,
        origin=origin([fit]),
        notes=("Δ comes from other repetitions or depths than the steps that it predicts.",),
    )  # fmt: skip


def error(prediction: FitPrediction) -> str:
    """``+1.2 % (−0.3 % to +2.0 %)``."""
    ends = prediction.relative_error_interval
    text = signed(prediction.relative_error)
    return text if ends is None else f"{text} ({signed(ends[0])} to {signed(ends[1])})"


def signed(share: float) -> str:
    """``+1.2 %``."""
    return f"{words.MINUS if share < 0 else '+'}{abs(share) * 100:.1f} %"
