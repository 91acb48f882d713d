"""The step ratio with narrower keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import paper, plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Table, columns, grouped, origin
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.runs import Case, arranged, label, operating_points
from tllm_wmtp.bench.report.schema import RunRow, StepRatio
from tllm_wmtp.bench.report.sections.step import Sweep, sweeps
from tllm_wmtp.bench.report.style import LIGHT, SOURCE_LOOKS, VARIANTS, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = (
    "wmtp bench step --contexts 16k,64k,256k,1m --out DIR\n"
    "wmtp bench step --contexts 16k,64k,256k,1m --kv-dtype bfloat16 --out DIR"
)
#: Wide ones first.
TYPES = ("float32", "bfloat16", "float16", "fp8")


@dataclass(frozen=True)
class Comparison:
    """Sweeps that differ in the type of keys and values only, the widest first."""

    sweeps: tuple[Sweep, ...]

    @property
    def types(self) -> list[str]:
        return [sweep.setting.kv_dtype for sweep in self.sweeps]

    @property
    def contexts(self) -> list[int]:
        """Those with a ratio in every type."""
        return sorted(set.intersection(*(set(sweep.ratios) for sweep in self.sweeps)))

    def ratios(self, context: int) -> list[StepRatio]:
        return [sweep.ratios[context] for sweep in self.sweeps]


def comparisons(results: Results) -> list[Comparison]:
    def rest(sweep: Sweep) -> tuple[object, ...]:
        s = sweep.setting
        return (s.machine, s.model, s.dtype, s.depth, s.window, s.n_sink, s.batch)

    found = []
    for members in grouped(sweeps(results.step), rest).values():
        ordered = sorted(members, key=lambda s: width(s.setting.kv_dtype))
        made = Comparison(tuple(ordered))
        if len(members) > 1 and made.contexts:
            found.append(made)
    return found


def width(kv_dtype: str) -> tuple[int, str]:
    return (TYPES.index(kv_dtype) if kv_dtype in TYPES else len(TYPES), kv_dtype)


def build(results: Results) -> Section:
    found = comparisons(results)
    blocks: list[Figure | Table] = []
    for each in found:
        blocks += [figure(each), table(each)]
    for members in grouped(measured(results), lambda pair: pair.case.machine).values():
        blocks.append(run_table(members))
    return Section(
        key="kv",
        title="Narrower keys and values",
        question=(
            "A narrower type halves the bytes that both drafts read. How much of the windowed "
            "step's advantage is left?"
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=sentence(found[0]) if found else "",
    )


@dataclass(frozen=True)
class Pair:
    """Native and windowed rows of one case of a suite that has several types."""

    case: Case
    native: RunRow
    windowed: RunRow


def measured(results: Results) -> list[Pair]:
    """Cases of suites that differ in the type of keys and values only, and know their steps."""
    points = operating_points(results.run)
    pairs = []
    for each in arranged(results.run):
        point = points.get(each.case.place)
        rows = each.at(point) if point else {}
        native, windowed = rows.get("native"), rows.get("windowed")
        if native and windowed and native.step_ms and windowed.step_ms:
            pairs.append(Pair(each.case, native, windowed))
    groups = grouped(pairs, lambda pair: pair.case.without(kv_dtype=""))
    return [
        pair
        for members in groups.values()
        for pair in sorted(members, key=lambda pair: width(pair.case.kv_dtype))
        if len(members) > 1
    ]


def sentence(each: Comparison) -> str:
    context = each.contexts[-1]
    shown = ", ".join(
        f"{words.signed_percent(ratio.step_native_over_windowed - 1)} with {name}"
        for name, ratio in zip(each.types, each.ratios(context), strict=True)
    )
    return (
        f"{each.sweeps[0].setting.model} at {words.tokens(context)} tokens: a native step costs, "
        f"over a windowed one, {shown} keys and values."
    )


def source_text() -> str:
    shown = "; ".join(
        f"{name} {words.signed_percent(wide - 1)} to {words.signed_percent(narrow - 1)}"
        if wide != narrow
        else f"{name} about {words.signed_percent(wide - 1)} in both"
        for name, (wide, narrow) in paper.KV_STEP_RATIO.items()
    )
    return f"native over windowed step at 1M tokens, bf16 to fp8 KV: {shown}."


def figure(each: Comparison) -> Figure:
    setting = each.sweeps[0].setting
    said = sentence(each)
    return Figure(
        title=(
            f"Native over windowed step by type of keys and values: {setting.model}, depth "
            f"{setting.depth}, window {setting.window:,}"
        ),
        alt=f"Line charts of the step ratio by type of keys and values. {said}",
        panels=(
            Panel(
                "Here, by context",
                "ratio of step times with quartiles; 1 is equal",
                partial(draw, each=each),
            ),
            Panel(
                "Paper, 1M tokens",
                "ratio of step times; 1 is equal",
                draw_paper,
            ),
        ),
        sentence=f"{said} Here the types are those of the CPU kernels; there is no fp8 among them.",
        origin=origin([row for sweep in each.sweeps for row in sweep.rows.values()]),
        source=source_text(),
    )


def draw(axes: Axes, each: Comparison) -> None:
    ends = []
    xs = list(range(len(each.types)))
    for index, context in enumerate(each.contexts):
        marker, dash = VARIANTS[index % len(VARIANTS)]
        look = Look(LIGHT["ink"], marker, dash)
        ratios = each.ratios(context)
        ys = [ratio.step_native_over_windowed for ratio in ratios]
        intervals = [ratio.step_native_over_windowed_interquartile for ratio in ratios]
        plot.line(axes, xs, ys, intervals, look)
        ends.append((xs[-1], ys[-1], words.tokens(context), look.colour))
    finish(axes, each.types)
    plot.label_ends(axes, ends)


def draw_paper(axes: Axes) -> None:
    ends = []
    for name, shown in paper.KV_STEP_RATIO.items():
        look = SOURCE_LOOKS[name]
        plot.line(axes, [0, 1], shown, None, look)
        ends.append((1.0, shown[-1], f"paper, {name}", look.colour))
    finish(axes, ["bf16", "fp8"])
    axes.set_ylim(0.95, 1.55)
    plot.label_ends(axes, ends)


def finish(axes: Axes, types: Sequence[str]) -> None:
    axes.axhline(1, color=LIGHT["muted"], linewidth=0.8)
    plot.plain_ticks(axes, range(len(types)), types)
    axes.set_xlim(-0.3, len(types) - 0.7)
    axes.margins(y=0.12)
    axes.set_xlabel("type of keys and values")


def table(each: Comparison) -> Table:
    rows = []
    for context in each.contexts:
        cells: list[str] = []
        for ratio in each.ratios(context):
            cells.append(
                words.with_interval(
                    ratio.step_native_over_windowed,
                    ratio.step_native_over_windowed_interquartile,
                    2,
                )
            )
            cells.append(words.signed_percent(ratio.step_native_over_windowed - 1))
        rows.append((f"{context:,}", *cells))
    heads = [head for name in each.types for head in (f"{name} KV", f"{name}: native adds")]
    return Table(
        caption="Native over windowed step, with quartiles of paired ratios",
        columns=columns(("context",), heads),
        rows=tuple(rows),
        origin=origin([row for sweep in each.sweeps for row in sweep.rows.values()]),
    )


def run_table(pairs: Sequence[Pair]) -> Table:
    cases = [pair.case for pair in pairs]
    rows = []
    for pair in pairs:
        native, windowed = pair.native.step_ms or 0.0, pair.windowed.step_ms or 0.0
        rows.append(
            (
                label(pair.case, cases),
                pair.case.kv_dtype,
                words.number(native),
                words.number(windowed),
                words.ratio(native / windowed),
                words.fixed(pair.native.al),
                words.fixed(pair.windowed.al),
            )
        )
    return Table(
        caption="Steps on real prompts, by type of keys and values",
        columns=columns(
            ("case", "KV"),
            ("native step ms", "windowed step ms", "native / windowed", "AL native", "AL windowed"),
        ),
        rows=tuple(rows),
        origin=origin([row for pair in pairs for row in (pair.native, pair.windowed)]),
        notes=("Medians over steps; their ratio is of the medians, not of paired steps.",),
    )
