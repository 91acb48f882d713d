"""Why a window is enough: what the draft's attention reads, from ``wmtp probe``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import paper, plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Table, columns, origin
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.schema import ProbeResult, ProbeSummary
from tllm_wmtp.bench.report.style import FALLING, LIGHT, PLAIN, RISING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = "wmtp probe --model demo --context 16k --inputs logs,sentences --out DIR"
BANDS = (
    ("sink", "windowed", FALLING),
    ("window", "windowed-tint", PLAIN),
    ("tail", "dense", RISING),
)


def build(results: Results) -> Section:
    blocks: list[Figure | Table] = []
    probes = sorted(results.probe, key=lambda probe: (probe.model, probe.context, probe.window))
    for probe in probes:
        blocks += [figure(probe), read_table(probe), change_table(probe)]
    return Section(
        key="probe",
        title="What the draft reads",
        question=(
            "At the same hidden state, how much of the draft's attention lies outside sink and "
            "window, and does it decide anything?"
        ),
        measure=MEASURE,
        blocks=tuple(blocks),
        headline=sentence(probes[0]) if probes else "",
    )


def inside(summary: ProbeSummary) -> float | None:
    """Attention mass in sink and window; the sink may be empty."""
    window = summary.mass.get("window")
    return None if window is None else window + (summary.mass.get("sink") or 0.0)


def sentence(probe: ProbeResult) -> str:
    summary = probe.summary
    text = (
        f"{probe.model} at {probe.context:,} tokens: sink and window hold "
        f"{words.percent(inside(summary))} of the draft's attention, and "
        f"{words.percent_with_interval(summary.agreement, summary.agreement_interval)} of "
        f"{summary.drafts:,} drafts stay the same without the rest"
    )
    if summary.margin_at_flips is not None and summary.margin_elsewhere is not None:
        text += (
            f"; where they change, the native margin between the two best logits is "
            f"{words.number(summary.margin_at_flips)}, elsewhere "
            f"{words.number(summary.margin_elsewhere)}"
        )
    return text + "."


def source_text() -> str:
    low, high = paper.MASS_QWEN
    same, same_high = paper.AGREEMENT
    small, large = paper.MARGIN_MEAN
    return (
        f"{words.percent(low)} to {words.percent(high)} of the mass in sink and window (Qwen), "
        f"{words.percent(paper.MASS_NEMOTRON)} (Nemotron, no rotary positions); "
        f"{words.percent(same)} to {words.percent(same_high)} of drafts unchanged; margin "
        f"{paper.MARGIN_AT_FLIPS} where they change against {small:g} to {large:g} on average, "
        "except on q122."
    )


def titled(probe: ProbeResult) -> str:
    return (
        f"{probe.model}, {words.tokens(probe.context)} tokens, window {probe.window:,}, sink "
        f"{probe.n_sink}"
    )


def entries(probe: ProbeResult) -> list[tuple[str, ProbeSummary]]:
    """All prompts together, then each, numbered where an input has several."""
    counts: dict[str, int] = {}
    named: list[tuple[str, ProbeSummary]] = [("all", probe.summary)]
    several = {row.input for row in probe.rows if sum(r.input == row.input for r in probe.rows) > 1}
    for row in probe.rows:
        counts[row.input] = counts.get(row.input, 0) + 1
        number = f" {counts[row.input]}" if row.input in several else ""
        named.append((row.input + number, row))
    return named


def figure(probe: ProbeResult) -> Figure:
    shown = entries(probe)
    said = sentence(probe)
    return Figure(
        title=f"Attention mass of the draft: {titled(probe)}",
        alt=f"Stacked bars of the attention mass in sink, window and tail. {said}",
        panels=(
            Panel(
                "Share of the softmax over all keys",
                "mean over heads and drafts, per prompt",
                partial(draw, shown=shown),
                height=136 + 26 * len(shown),
                left=max(72, plot.room(name for name, _ in shown)),
                right=24,
                top=70,
            ),
        ),
        sentence=said,
        origin=origin([probe]),
        source=source_text(),
    )


def draw(axes: Axes, shown: list[tuple[str, ProbeSummary]]) -> None:
    for index, (_, summary) in enumerate(shown):
        left = 0.0
        for band, role, hatch in BANDS:
            value = summary.mass.get(band) or 0.0
            axes.barh(
                index, value, 0.62, left=left, facecolor=LIGHT[role], hatch=hatch,
                edgecolor=LIGHT["ground"], linewidth=0, zorder=3,
            )  # fmt: skip
            left += value
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    plot.legend(axes, [(band, LIGHT[role], hatch) for band, role, hatch in BANDS])


def read_table(probe: ProbeResult) -> Table:
    rows = []
    for name, each in entries(probe):
        rows.append(
            (
                name,
                words.count(each.drafts),
                words.percent_with_interval(each.agreement, each.agreement_interval),
                words.count(each.flips),
                f"{words.number(each.margin_at_flips)} / {words.number(each.margin_elsewhere)}",
                *(words.percent(each.mass.get(band), 1) for band, _, _ in BANDS),
                f"{words.number(each.tail_entropy)} ({words.percent(each.tail_entropy_share)})",
                words.number(each.tail_participation),
                " / ".join(words.number(each.value_norm.get(band)) for band, _, _ in BANDS),
                words.fixed(each.router_jaccard),
            )
        )
    missing = {reason for _, each in entries(probe) for reason in each.missing.values()}
    return Table(
        caption=f"The native read, and the windowed one at the same hidden state: {titled(probe)}",
        columns=columns(
            ("prompt",),
            (
                "drafts", "unchanged (95 %)", "flips", "margin at flips / elsewhere", "mass sink",
                "mass window", "mass tail", "tail entropy, nats", "tail keys in effect",
                "value norm sink / window / tail", "router overlap",
            ),
        ),
        rows=tuple(rows),
        origin=origin([probe]),
        notes=(
            "Tail entropy in brackets as a share of that of a uniform read; keys in effect: 1 over "
            "the sum of squares of the tail's softmax; router overlap: Jaccard of the experts "
            "chosen under both reads.",
            *(f"{words.ABSENT}: {reason}." for reason in sorted(missing)),
        ),
    )  # fmt: skip


def change_table(probe: ProbeResult) -> Table:
    changes = [("without the tail (windowed)", None), *probe.summary.perturbations.items()]
    rows = []
    for name, change in changes:
        if change is None:
            at = next((p for p in probe.curve if p.window == probe.window), None)
            if at is None:
                continue
            change = at
        rows.append(
            (
                name.replace("_", " "),
                words.percent_with_interval(change.agreement, change.interval),
                words.count(change.flips),
                words.count(change.drafts),
                words.number(change.kl),
            )
        )
    return Table(
        caption=f"Drafts that stay when values are changed: {titled(probe)}",
        columns=columns(
            ("change of the read",), ("unchanged (95 %)", "flips", "drafts", "KL, nats")
        ),
        rows=tuple(rows),
        origin=origin([probe]),
    )
