"""``wmtp demo``: the same prompts in every arm."""

from __future__ import annotations

from tllm_wmtp.bench.report import words
from tllm_wmtp.bench.report.blocks import Section, Table, columns, origin
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.schema import DemoResult

MEASURE = "wmtp demo --context 64k --json > DIR/demo.json"


def build(results: Results) -> Section:
    found = sorted(results.demo, key=lambda each: (each.model, each.context, each.window))
    return Section(
        key="demo",
        title="Demonstration",
        question="The same long prompts answered in every arm, token by token in turns.",
        measure=MEASURE,
        blocks=tuple(table(each) for each in found),
        headline=sentence(found[0]) if found else "",
    )


def sentence(result: DemoResult) -> str:
    shown = ", ".join(
        f"{arm} {words.number(numbers.tpot_ms)} ms per token"
        for arm, numbers in result.arms.items()
    )
    same = "identical" if result.lossless else "DIFFERENT"
    return f"{words.tokens(result.context)} tokens of prompt: {shown}; outputs are {same}."


def table(result: DemoResult) -> Table:
    notes = [sentence(result)]
    if (estimate := result.native_estimate) is not None:
        notes.append(
            f"Native was not run at this length; estimated: {estimate.prefill_s / 60:.0f} minutes "
            f"of prefill, {words.number(estimate.step_ms)} ms per step, "
            f"{words.size(estimate.draft_kv_bytes)} of draft keys and values."
        )
    name = f"{result.model}, " if result.model else ""
    return Table(
        caption=(
            f"{name}{words.tokens(result.context)} tokens, depth {result.depth}, window "
            f"{result.window:,}, sink {result.n_sink}, {result.dtype}"
        ),
        columns=columns(
            ("arm",),
            (
                "tokens", "AL", "TPOT ms", "step ms", "draft ms", "verify ms", "TTFT s",
                "draft KV",
            ),
        ),
        rows=tuple(
            (
                arm,
                words.count(n.tokens),
                words.fixed(n.al),
                words.number(n.tpot_ms),
                words.number(n.step_ms),
                words.number(n.draft_ms),
                words.number(n.verify_ms),
                words.number(n.ttft_ms / 1e3),
                words.size(n.draft_kv_bytes),
            )
            for arm, n in result.arms.items()
        ),
        origin=origin([result]),
        notes=tuple(notes),
    )  # fmt: skip
