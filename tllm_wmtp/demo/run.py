"""The demonstration: the same long prompts answered by all arms, and whether they agree.

The arms share one set of weights and take turns token by token: the arm that has made the fewest
tokens steps next. A disturbance of the machine therefore meets all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

import tllm_wmtp.ops as ops
from tllm_wmtp import machine
from tllm_wmtp.bench.common import config_hash
from tllm_wmtp.checkpoint.loader import LoadedModel, load_model
from tllm_wmtp.config import EngineConfig, KvCacheConfig, MtpConfig
from tllm_wmtp.demo import language, model_name
from tllm_wmtp.errors import RequestError
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Phase, Request
from tllm_wmtp.metrics import RequestMetrics, time_per_output_token
from tllm_wmtp.sampling import SamplingParams

#: Longer prompts are not prefilled for the native arm: its time grows with their square.
NATIVE_LIMIT = 160_000
#: Kinds of prompts and their seeds, never seen in training.
PROMPTS = (("logs", 20_001), ("sentences", 20_002))
WARM_UP_TOKENS = 300


@dataclass(frozen=True)
class Plan:
    """What to run; ``context`` and ``max_tokens`` in tokens."""

    model: Path
    context: int = 65536
    max_tokens: int = 256
    depth: int = 7
    window: int = 4032
    n_sink: int = 64
    prompts: tuple[tuple[str, int], ...] = PROMPTS

    @property
    def arms(self) -> dict[str, MtpConfig | None]:
        """The cheapest prefill first; native only where it can be waited for."""
        arms: dict[str, MtpConfig | None] = {
            "dense": None,
            "windowed": MtpConfig(self.depth, self.window, self.n_sink),
        }
        if self.context <= NATIVE_LIMIT:
            arms["native"] = MtpConfig.native(self.depth)
        return arms


class Watch(Protocol):
    """Told how far the demonstration is."""

    def prefill(self, kind: str, arm: str, done: int, total: int) -> None: ...

    def decode(self, kind: str, arm: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class ArmNumbers:
    """One arm over all prompts; times are medians over its steps, ``ttft_ms`` a mean over prompts,
    ``draft_kv_bytes`` of one request."""

    tokens: int
    al: float
    tpot_ms: float
    step_ms: float
    draft_ms: float
    verify_ms: float
    ttft_ms: float
    draft_kv_bytes: int
    steps: int

    @classmethod
    def of(cls, metrics: Sequence[RequestMetrics]) -> ArmNumbers:
        steps = [second for m in metrics for second in m.step_s]
        lengths = [m.acceptance_length for m in metrics if m.acceptance_length is not None]
        first = [m.ttft_s for m in metrics if m.ttft_s is not None]
        if len(lengths) != len(metrics) or len(first) != len(metrics):
            raise RuntimeError("an arm made no step")
        return cls(
            tokens=sum(m.output_tokens for m in metrics),
            al=statistics.fmean(lengths),
            tpot_ms=time_per_output_token(steps, lengths) * 1e3,
            step_ms=statistics.median(steps) * 1e3,
            draft_ms=statistics.median(s for m in metrics for s in m.draft_s) * 1e3,
            verify_ms=statistics.median(s for m in metrics for s in m.verify_s) * 1e3,
            ttft_ms=statistics.fmean(first) * 1e3,
            draft_kv_bytes=max(m.draft_kv_bytes for m in metrics),
            steps=len(steps),
        )


def run(plan: Plan, watch: Watch) -> dict[str, Any]:
    """Runs every prompt in every arm; the object that ``wmtp demo --json`` prints.

    Raises:
        WmtpError: the plan does not fit the model or the machine.
    """
    if plan.max_tokens < 2:
        raise RequestError(
            f"max_tokens {plan.max_tokens}",
            "the first token comes from the prefill, so a step needs a second one",
            "use 2 or more",
        )
    watch.note("loading the model")
    loaded = load_model(plan.model, torch.float32, "cpu", with_head=True)
    prompts = [(kind, make_prompt(kind, plan.context, seed)) for kind, seed in plan.prompts]
    engines = {arm: build_engine(loaded, plan, choice) for arm, choice in plan.arms.items()}
    watch.note("warming up")
    warm_up(engines, prompts[0][1][:WARM_UP_TOKENS])
    answers = [
        (kind, ids, answer(engines, kind, ids, plan.max_tokens, watch)) for kind, ids in prompts
    ]
    report = summarise(plan, loaded, answers)
    if "native" not in engines:
        watch.note("estimating the native arm")
        windowed = [requests["windowed"].metrics for _, _, requests in answers]
        dense = engines["dense"]
        engines.clear()
        report["native_estimate"] = estimate_native(plan, loaded, dense, windowed)
    return report


def make_prompt(kind: str, tokens: int, seed: int) -> list[int]:
    """Token ids of a document of about ``tokens`` tokens.

    Raises:
        RequestError: too few for one line.
    """
    try:
        return language.prompt(kind, tokens, seed).ids
    except ValueError as error:
        raise RequestError(
            f"context {tokens}", str(error), "use a context of 256 tokens or more"
        ) from error


def build_engine(loaded: LoadedModel, plan: Plan, speculation: MtpConfig | None) -> Engine:
    longest = plan.context + plan.max_tokens
    return Engine(
        loaded,
        EngineConfig(
            speculation=speculation,
            # Without reuse: every prompt's time to the first token is that of its whole prefill.
            kv_cache=KvCacheConfig(max_tokens=longest + plan.depth + 64, enable_block_reuse=False),
            max_batch_size=1,
            max_seq_len=longest,
        ),
    )


def warm_up(engines: dict[str, Engine], ids: list[int]) -> None:
    """A short prompt in every arm, so that the first measured one does not pay for first calls."""
    for engine in engines.values():
        request = engine.submit(ids, SamplingParams(max_tokens=8, ignore_eos=True))
        while not request.finished:
            engine.step()
        if request.error is not None:
            raise request.error


def answer(
    engines: dict[str, Engine], kind: str, ids: list[int], max_tokens: int, watch: Watch
) -> dict[str, Request]:
    """One prompt in every arm: prefills one after the other, then steps in turns.

    End-of-text tokens are ignored, so that every arm makes ``max_tokens`` tokens.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests = {}
    for arm, engine in engines.items():
        request = engine.submit(ids, params)
        while request.phase in (Phase.WAITING, Phase.PREFILL):
            engine.step()
            watch.prefill(kind, arm, request.prefilled, len(ids))
        requests[arm] = request
    while running := {arm: r for arm, r in requests.items() if not r.finished}:
        behind = min(running, key=lambda arm: len(running[arm].output_ids))
        engines[behind].step()
        watch.decode(kind, behind, len(running[behind].output_ids), max_tokens)
    for request in requests.values():
        if request.error is not None:
            raise request.error
    return requests


def summarise(
    plan: Plan,
    loaded: LoadedModel,
    answers: Sequence[tuple[str, list[int], dict[str, Request]]],
) -> dict[str, Any]:
    arms = [arm for arm in ("dense", "native", "windowed") if arm in answers[0][2]]
    per_arm = {
        arm: ArmNumbers.of([requests[arm].metrics for _, _, requests in answers]) for arm in arms
    }
    prompts = []
    for (kind, seed), (_, ids, requests) in zip(plan.prompts, answers, strict=True):
        outputs = [requests[arm].output_ids for arm in arms]
        prompts.append(
            {
                "kind": kind,
                "seed": seed,
                "prompt_tokens": len(ids),
                "identical": all(output == outputs[0] for output in outputs),
                "text": language.text_of(outputs[0])
                if loaded.tokenizer is None
                else loaded.tokenizer.decode(outputs[0]),
                "al": {arm: requests[arm].metrics.acceptance_length for arm in arms},
            }
        )
    return {
        "benchmark": "demo",
        "config_hash": config_hash(plan),
        "lossless": all(prompt["identical"] for prompt in prompts),
        "context": plan.context,
        "depth": plan.depth,
        "window": plan.window,
        "n_sink": plan.n_sink,
        "max_tokens": plan.max_tokens,
        "model": model_name(plan.model),
        "dtype": "float32",
        "kv_dtype": "float32",
        "batch": 1,
        **machine.describe(),
        "windowed_is_fastest": min(per_arm, key=lambda arm: per_arm[arm].tpot_ms) == "windowed",
        "arms": {arm: asdict(numbers) for arm, numbers in per_arm.items()},
        "prompts": prompts,
    }


def estimate_native(
    plan: Plan, loaded: LoadedModel, dense: Engine, windowed: Sequence[RequestMetrics]
) -> dict[str, Any]:
    """What the native arm would need for one such prompt, had anyone the patience.

    Its draft reads the hidden state of every prompt row, so the last layer's attention answers all
    of them: ``S (S + 1) / 2`` query-key pairs, of which the windowed prefill has done its share.
    The rate is measured here on the dense arm's pool at full length; the rows' other work is left
    out, so the estimate is on the low side. The step is measured, with random keys and values.
    """
    rows_done = windowed[0].prefill_last_layer_rows
    pairs_left = plan.context * (plan.context + 1) / 2 - rows_done * plan.context
    rate = attention_pairs_per_second(dense, plan.context)
    prefill_s = statistics.fmean(m.prefill_s for m in windowed)
    dense.kv.k_pages.clear()
    dense.kv.v_pages.clear()
    engine = build_engine(loaded, plan, MtpConfig.native(plan.depth))
    request = engine.admit_synthetic(plan.context, max_tokens=plan.max_tokens)
    while request.metrics.steps < 9 and not request.finished:
        engine.step()
    if request.error is not None:
        raise request.error
    measured = request.metrics
    first = min(2, measured.steps - 1)  # steps that warm up
    return {
        "estimate": True,
        "method": "prefill: attention pairs left over by the windowed prefill at the measured "
        "rate, added to its time; step: measured with random keys and values",
        "draft_kv_bytes": measured.draft_kv_bytes,
        "attention_pairs_per_s": rate,
        "prefill_s": prefill_s + max(0.0, pairs_left) / rate,
        "step_ms": statistics.median(measured.step_s[first:]) * 1e3,
        "draft_ms": statistics.median(measured.draft_s[first:]) * 1e3,
        "verify_ms": statistics.median(measured.verify_s[first:]) * 1e3,
    }


def attention_pairs_per_second(engine: Engine, context: int, rows: int = 512) -> float:
    """Query-key pairs of one layer per second, prefill-like: ``rows`` queries at the end."""
    config, pool = engine.model.config, engine.kv
    rows = min(rows, context)
    pages = pool.pages_for(context)
    q = torch.randn(rows, config.num_attention_heads, config.caches.attention.head_dim)
    arguments = (
        q,
        pool.k_pages[-1],
        pool.v_pages[-1],
        torch.arange(pages, dtype=torch.int32)[None],
        torch.tensor([0, rows], dtype=torch.int32),
        torch.arange(context - rows, context),
        pool.scale,
    )
    seconds = []
    for _ in range(3):
        begin = perf_counter()
        ops.full_attention(*arguments)
        seconds.append(perf_counter() - begin)
    return rows * (context - rows / 2) / statistics.median(seconds)
