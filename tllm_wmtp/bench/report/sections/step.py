"""Step cost against context, per arm, from ``wmtp bench step``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import paper, plot, words
from tllm_wmtp.bench.report.blocks import (
    Figure,
    Section,
    Table,
    columns,
    grouped,
    newest,
    origin,
    replaced,
)
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.schema import Machine, StepRatio, StepResult, StepRow
from tllm_wmtp.bench.report.style import ARMS, LIGHT, LOOKS, SOURCE_LOOKS, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = "wmtp bench step --contexts 16k,64k,256k,1m --out DIR"


@dataclass(frozen=True, order=True)
class Setting:
    """What all rows of one figure share."""

    model: str
    kv_dtype: str
    dtype: str
    depth: int
    window: int
    n_sink: int
    batch: int
    machine: Machine

    @classmethod
    def of(cls, row: StepRow) -> Setting:
        return cls(
            row.model, row.kv_dtype, row.dtype, row.depth, row.window, row.n_sink, row.batch,
            row.machine,
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.model}, depth {self.depth}, window {self.window:,}, sink {self.n_sink}, "
            f"{self.dtype}, KV {self.kv_dtype}, batch {self.batch}"
        )


@dataclass(frozen=True)
class Sweep:
    """The newest row of each arm and context, the newest ratio of each context, and how many older
    rows they replace."""

    setting: Setting
    rows: dict[tuple[str, int], StepRow]
    ratios: dict[int, StepRatio]
    replaced: int

    @property
    def contexts(self) -> list[int]:
        return sorted({context for _, context in self.rows})

    def of(self, arm: str) -> list[StepRow]:
        return [self.rows[arm, c] for c in self.contexts if (arm, c) in self.rows]


def sweeps(step: tuple[StepResult, ...]) -> list[Sweep]:
    """One per setting; float32 first, larger types before smaller ones."""
    rows = grouped((row for result in step for row in result.rows), Setting.of)
    ratios: dict[Setting, dict[int, StepRatio]] = {}
    for result in step:
        for setting in {Setting.of(row) for row in result.rows}:
            ratios.setdefault(setting, {}).update({r.context: r for r in result.ratios})
    found = []
    for setting, members in rows.items():
        kept = newest(members, lambda row: (row.arm, row.context))
        found.append(Sweep(setting, kept, ratios[setting], len(members) - len(kept)))
    return sorted(
        found, key=lambda s: (s.setting.model, s.setting.kv_dtype != "float32", s.setting)
    )


def build(results: Results) -> Section:
    found = sweeps(results.step)
    blocks: list[Figure | Table] = []
    for sweep in found:
        if len(sweep.contexts) > 1:
            blocks.append(figure(sweep))
        blocks.append(table(sweep))
    return Section(
        key="step",
        title="Cost of a step",
        question=(
            "How long does one step take, and how much of it is the draft? Keys and values are "
            "random numbers at the given context, which cost the same to read as real ones."
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=headline(found[0]) if found else "",
    )


def headline(sweep: Sweep) -> str:
    context = sweep.contexts[-1]
    ratio = sweep.ratios.get(context)
    if ratio is None:
        return f"Steps were measured at up to {words.tokens(context)} tokens."
    return (
        f"At {words.tokens(context)} tokens a native step takes "
        f"{words.ratio(ratio.step_native_over_windowed)} a windowed one "
        f"({sweep.setting.model}, KV {sweep.setting.kv_dtype})."
    )


def sentence(sweep: Sweep) -> str:
    """What the largest context shows, and whether the windowed draft phase stays flat."""
    contexts = sweep.contexts
    last, first = contexts[-1], contexts[0]
    parts = []
    native, windowed = sweep.rows.get(("native", last)), sweep.rows.get(("windowed", last))
    ratio = sweep.ratios.get(last)
    if native and windowed:
        text = (
            f"At {last:,} tokens a native step takes {words.number(native.step_ms)} ms "
            f"({words.interval(native.step_ms_interquartile)}) and a windowed one "
            f"{words.number(windowed.step_ms)} ms "
            f"({words.interval(windowed.step_ms_interquartile)})"
        )
        if ratio is not None:
            shown = words.with_interval(
                ratio.step_native_over_windowed, ratio.step_native_over_windowed_interquartile, 2
            )
            text += f": {shown} windowed steps in the time of a native one"
        parts.append(text + ".")
    start = {arm: sweep.rows.get((arm, first)) for arm in ("native", "windowed")}
    if native and windowed and start["native"] and start["windowed"] and first != last:
        parts.append(
            f"From {words.tokens(first)} to {words.tokens(last)} tokens the windowed draft phase "
            f"goes from {words.number(start['windowed'].draft_ms)} to "
            f"{words.number(windowed.draft_ms)} ms, the native one from "
            f"{words.number(start['native'].draft_ms)} to {words.number(native.draft_ms)} ms."
        )
    return " ".join(parts) or f"Measured at {words.listed(words.tokens(c) for c in contexts)}."


def source_text() -> str:
    sweep = "; ".join(
        f"{name} {words.signed_percent(low - 1)} to {words.signed_percent(high - 1)}"
        for name, (low, high) in paper.STEP_RATIO.items()
    )
    return f"native over windowed step, 261K to 1M tokens: {sweep}."


def figure(sweep: Sweep) -> Figure:
    low, high = sweep.contexts[0], sweep.contexts[-1]
    panels = [
        Panel("Whole step", "ms per step, log scale", lambda axes: draw_step(axes, sweep)),
        Panel(
            "Draft phase and verify",
            "ms per step, log scale",
            lambda axes: draw_parts(axes, sweep),
            right=116,
        ),
    ]
    if sweep.ratios:
        panels.append(
            Panel(
                "Native over windowed step",
                "ratio of step times; 1 is equal",
                lambda axes: draw_ratio(axes, sweep),
                right=104,
            )
        )
    return Figure(
        title=f"Step time against context: {sweep.setting}",
        alt=(
            f"Line charts of step time, draft and verify time and their ratio at contexts from "
            f"{low:,} to {high:,} tokens for the arms {words.listed(arms(sweep))}. "
            + sentence(sweep)
        ),
        panels=tuple(panels),
        sentence=sentence(sweep)
        + " Points are medians; bars span the quartiles of repeated steps.",
        origin=origin(list(sweep.rows.values())),
        source=source_text(),
    )


def arms(sweep: Sweep) -> list[str]:
    return [arm for arm in ARMS if sweep.of(arm)]


def draw_step(axes: Axes, sweep: Sweep) -> None:
    ends = []
    for arm in arms(sweep):
        rows = sweep.of(arm)
        xs, ys = [row.context for row in rows], [row.step_ms for row in rows]
        plot.line(axes, xs, ys, [row.step_ms_interquartile for row in rows], LOOKS[arm])
        ends.append((xs[-1], ys[-1], arm, LOOKS[arm].colour))
    plot.context_axis(axes, sweep.contexts)
    plot.log_values(axes, [end for row in sweep.rows.values() for end in row.step_ms_interquartile])
    plot.label_ends(axes, ends)


def draw_parts(axes: Axes, sweep: Sweep) -> None:
    ends, values = [], []
    for arm in ("native", "windowed"):
        rows = sweep.of(arm)
        if not rows:
            continue
        xs = [row.context for row in rows]
        draft, verify = [row.draft_ms for row in rows], [row.verify_ms for row in rows]
        for row in rows:
            values += [*row.draft_ms_interquartile, *row.verify_ms_interquartile]
        look = LOOKS[arm]
        plot.line(axes, xs, draft, [row.draft_ms_interquartile for row in rows], look)
        ends.append((xs[-1], draft[-1], f"draft, {arm}", look.colour))
        thin = Look(look.colour, look.marker, (0, (1, 2)), hollow=True)
        plot.line(axes, xs, verify, [row.verify_ms_interquartile for row in rows], thin)
        ends.append((xs[-1], verify[-1], f"verify, {arm}", look.colour))
    plot.context_axis(axes, sweep.contexts)
    if values:
        plot.log_values(axes, values)
    plot.label_ends(axes, ends)


def draw_ratio(axes: Axes, sweep: Sweep) -> None:
    contexts = sorted(sweep.ratios)
    ratios = [sweep.ratios[context] for context in contexts]
    ys = [ratio.step_native_over_windowed for ratio in ratios]
    look = Look(LIGHT["ink"], "D", "solid")
    intervals = [ratio.step_native_over_windowed_interquartile for ratio in ratios]
    plot.line(axes, contexts, ys, intervals, look)
    ends = [(contexts[-1], ys[-1], "here", look.colour)]
    for name, shown in paper.STEP_RATIO.items():
        mine = SOURCE_LOOKS[name]
        plot.line(axes, paper.SWEEP, shown, None, mine)
        ends.append((paper.SWEEP[-1], shown[-1], f"paper, {name}", mine.colour))
    axes.axhline(1, color=LIGHT["muted"], linewidth=0.8)
    plot.context_axis(axes, [*contexts, *paper.SWEEP] if contexts[-1] < 2**19 else contexts)
    ends_of = [end for interval in intervals for end in interval]
    axes.set_ylim(bottom=min(0.9, *ends_of) * 0.97, top=max(1.5, *ends_of) * 1.05)
    plot.label_ends(axes, ends)


def table(sweep: Sweep) -> Table:
    rows = []
    for context in sweep.contexts:
        for arm in ARMS:
            row = sweep.rows.get((arm, context))
            if row is None:
                continue
            rows.append(
                (
                    f"{context:,}",
                    arm,
                    words.number(row.step_ms),
                    words.interval(row.step_ms_interquartile),
                    words.number(row.draft_ms),
                    words.number(row.verify_ms),
                    words.number(row.bytes_moved / 1e6),
                    words.number(row.floor_ms),
                    words.percent(row.fraction_of_floor),
                    words.count(row.n_runs),
                )
            )
    return Table(
        caption=f"One step, {sweep.setting}",
        columns=columns(
            ("context", "arm"),
            (
                "step ms", "quartiles", "draft ms", "verify ms", "MB read", "floor ms",
                "floor / step", "steps",
            ),
        ),
        rows=tuple(rows),
        origin=origin(list(sweep.rows.values())),
        notes=(
            "Floor: the fewest bytes that the step has to read, over the read bandwidth measured "
            "in the same run. A small ring stays in a cache, which is faster than that.",
            *replaced(sweep.replaced),
        ),
    )  # fmt: skip
