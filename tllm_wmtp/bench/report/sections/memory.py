"""Memory of one request per arm, from ``wmtp plan``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tllm_wmtp.bench.report import paper, plot, words
from tllm_wmtp.bench.report.blocks import Figure, Section, Table, columns, newest
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.schema import PlanResult
from tllm_wmtp.bench.report.style import ARMS, LIGHT, RISING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = "wmtp plan demo --context 1m --gpu-memory 24gib --out DIR"
ORIGIN = "Computed from the model's configuration by wmtp plan, not measured."


def build(results: Results) -> Section:
    plans = list(
        newest(
            results.plan,
            lambda p: (
                p.name,
                p.context,
                p.kv_dtype,
                p.tp,
                p.depth,
                p.window,
                p.n_sink,
                p.memory_bytes,
            ),
        ).values()
    )
    plans.sort(key=lambda plan: (plan.name, plan.context, plan.kv_dtype, plan.tp))
    return Section(
        key="memory",
        title="Memory of a request",
        question=(
            "What does one request keep, and what does its draft add? A native draft keeps keys "
            "and values of the whole context, a windowed one a ring."
        ),
        measure=MEASURE,
        blocks=(figure(plans), table(plans)) if plans else (),
        headline=sentence(plans[0]) if plans else "",
    )


def draft_bytes(plan: PlanResult) -> dict[str, float]:
    return {"dense": 0.0, "native": plan.native_draft_bytes, "windowed": plan.ring_bytes}


def sentence(plan: PlanResult) -> str:
    return (
        f"{plan.name} at {words.tokens(plan.context)} tokens: natively the draft keeps "
        f"{words.percent(plan.draft_share, 1)} of all keys and values "
        f"({words.size(plan.native_draft_bytes)}), the ring {words.size(plan.ring_bytes)}."
    )


def sentences(plans: Sequence[PlanResult]) -> str:
    if len(plans) == 1:
        return sentence(plans[0])
    shares = ", ".join(f"{plan.name} {words.percent(plan.draft_share, 1)}" for plan in plans)
    rings = [plan.ring_bytes for plan in plans]
    return (
        f"Natively the draft keeps, of all keys and values: {shares}. A ring takes "
        f"{words.size(min(rings))} to {words.size(max(rings))}, however long the context is."
    )


def source_text() -> str:
    shown = ", ".join(
        f"{words.percent(share, 1)} ({name}, {layers} layers)"
        for name, (layers, share) in paper.DRAFT_SHARE.items()
    )
    return (
        "the draft's share of all keys and values, 1 / (F + 1) for F full-attention layers: "
        f"{shown}."
    )


def title(plan: PlanResult) -> str:
    ranks = f", TP {plan.tp}, per rank" if plan.tp > 1 else ""
    return f"{plan.name}, {words.tokens(plan.context)} tokens, KV {plan.kv_dtype}{ranks}"


def figure(plans: Sequence[PlanResult]) -> Figure:
    said = sentences(plans)
    return Figure(
        title="Memory of one request",
        alt=f"Stacked bars of the bytes of one request per arm. {said}",
        panels=tuple(
            Panel(
                title(plan),
                f"{scale(plan)[1]} per request",
                partial(draw, plan=plan),
                height=240,
                left=76,
                right=68,
                top=70,
            )
            for plan in plans
        ),
        sentence=said,
        origin=ORIGIN,
        source=source_text(),
    )


def scale(plan: PlanResult) -> tuple[float, str]:
    most = max(plan.request_bytes.values())
    return (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")


def draw(axes: Axes, plan: PlanResult) -> None:
    divisor, _ = scale(plan)
    draft = draft_bytes(plan)
    for index, arm in enumerate(ARMS):
        whole = plan.request_bytes[arm] / divisor
        mine = draft[arm] / divisor
        axes.barh(index, whole - mine, 0.6, color=LIGHT[f"{arm}-tint"], zorder=3)
        axes.barh(
            index, mine, 0.6, left=whole - mine, facecolor=LIGHT[arm], edgecolor=LIGHT["ground"],
            hatch=RISING, linewidth=0, zorder=3,
        )  # fmt: skip
        axes.annotate(
            words.size(plan.request_bytes[arm]), (whole, index), (5, 0),
            textcoords="offset points", va="center", fontsize=9.5, annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(ARMS)), ARMS)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    axes.locator_params(axis="x", nbins=5)
    plot.legend(
        axes,
        [
            ("target and recurrent states", LIGHT["dense-tint"], ""),
            ("draft", LIGHT["dense"], RISING),
        ],
    )


def table(plans: Sequence[PlanResult]) -> Table:
    rows = []
    for plan in plans:
        batch = plan.max_batch or {}
        batches = tuple(words.count(batch.get(arm)) for arm in ARMS)
        rows.append(
            (
                plan.name,
                f"{plan.context:,}",
                plan.kv_dtype,
                str(plan.tp),
                str(plan.full_attention_layers),
                words.percent(plan.draft_share, 1),
                *(words.size(plan.request_bytes[arm]) for arm in ARMS),
                words.size(plan.ring_bytes),
                *batches,
            )
        )
    return Table(
        caption="Bytes of one request, and the largest batch",
        columns=columns(
            ("model",),
            (
                "context", "KV", "TP", "layers F", "draft share", "dense", "native", "windowed",
                "ring", "batch, dense", "batch, native", "batch, windowed",
            ),
        ),
        rows=tuple(rows),
        origin=ORIGIN,
        notes=(
            "Draft share: of all keys and values if the draft keeps the whole context. Batch: the "
            f"most requests that fit; {words.ABSENT} where no memory size was given.",
        ),
    )  # fmt: skip
