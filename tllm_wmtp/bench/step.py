"""The cost of one speculative step per arm and context, with synthetic keys and values.

No prompt is prefilled: the caches hold random numbers, which cost the same to read
(:mod:`tllm_wmtp.bench.content` measures that), and say nothing about acceptance. The arms take
turns within each repetition, so that a disturbance of the machine meets all of them, and the ratio
of two arms is the median of paired ratios.

Each time comes with its floor: the fewest bytes that the step has to read (keys and values that its
queries see, and each weight once per forward, of the experts only as many as one row uses) over the
read bandwidth measured in the same run. What stays in a cache is read faster than that, so a small
ring may beat its floor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from tllm_wmtp import machine
from tllm_wmtp.bench.common import config_hash
from tllm_wmtp.checkpoint.loader import LoadedModel, load_model, read_config
from tllm_wmtp.config import EngineConfig, KvCacheConfig, MtpConfig
from tllm_wmtp.demo import model_name
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Request
from tllm_wmtp.models.layers.moe import RoutedExperts
from tllm_wmtp.models.spec import ModelConfig

ARMS = ("dense", "native", "windowed")
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class StepBench:
    """What to measure. ``contexts`` in tokens; ``repeats`` steps per arm and context."""

    model: Path
    contexts: tuple[int, ...]
    depth: int = 7
    window: int = 4032
    n_sink: int = 64
    dtype: str = "float32"
    kv_dtype: str = "auto"
    repeats: int = 15

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ValueError(f"repeats {self.repeats} < 2: an interval needs two runs; raise it")

    def speculation(self, arm: str) -> MtpConfig | None:
        if arm == "dense":
            return None
        if arm == "native":
            return MtpConfig.native(self.depth)
        return MtpConfig(self.depth, self.window, self.n_sink)

    @property
    def output(self) -> int:
        """Every token that the steps may emit, and one more step."""
        return (self.repeats + WARM_UP_STEPS + 1) * self.depth

    def engine_config(self, arm: str, context: int, output: int | None = None) -> EngineConfig:
        """An engine for one request of ``context`` tokens that makes ``output`` more."""
        longest = context + (self.output if output is None else output)
        return EngineConfig(
            speculation=self.speculation(arm),
            kv_cache=KvCacheConfig(max_tokens=longest + self.depth + 64, dtype=self.kv_dtype),
            max_batch_size=1,
            max_seq_len=longest,
            dtype=self.dtype,
        )

    @property
    def digest(self) -> str:
        """Twelve hex digits that name the whole configuration."""
        return config_hash(self)


@dataclass(frozen=True)
class Spread:
    """Median and interquartile interval of ``runs`` measurements."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high, len(values))

    @property
    def interval(self) -> list[float]:
        return [self.low, self.high]


class Bench(Protocol):
    """What a contestant is told: its engine, and how many tokens its steps may emit."""

    @property
    def output(self) -> int: ...

    def engine_config(self, arm: str, context: int) -> EngineConfig: ...


class Contestant:
    """One arm's engine with one synthetic request at ``context`` tokens."""

    def __init__(self, arm: str, bench: Bench, loaded: LoadedModel, context: int):
        self.arm, self.context = arm, context
        self.engine = Engine(loaded, bench.engine_config(arm, context))
        self.request: Request = self.engine.admit_synthetic(context, max_tokens=bench.output)

    def step(self, depth: int | None = None) -> None:
        """One step of the bench's depth, or of a smaller one."""
        self.engine.depth_override = depth
        self.engine.step()
        if self.request.error is not None:
            raise self.request.error

    def seconds(self) -> dict[str, list[float]]:
        """``step``, ``draft`` and ``verify`` of the measured steps."""
        metrics = self.request.metrics
        return {
            "step": metrics.step_s[WARM_UP_STEPS:],
            "draft": metrics.draft_s[WARM_UP_STEPS:],
            "verify": metrics.verify_s[WARM_UP_STEPS:],
        }


def run_step_bench(
    bench: StepBench, on_progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Any]:
    """``{"rows": one per arm and context, "ratios": one per context, ...}``.

    Args:
        on_progress: called with a label, the repetitions done and all of them.

    Raises:
        WmtpError: a context does not fit the model or the memory.
    """
    positions = read_config(bench.model).max_position_embeddings
    for context in bench.contexts:  # refused at once, before weights are read
        for arm in ARMS:
            bench.engine_config(arm, context).resolved(positions)
    loaded = load_model(bench.model, getattr(torch, bench.dtype), "cpu", with_head=True)
    about = machine.describe()
    rows, ratios = [], []
    for context in bench.contexts:
        bandwidth = machine.read_bandwidth()
        contestants = [Contestant(arm, bench, loaded, context) for arm in ARMS]
        for repeat in range(WARM_UP_STEPS + bench.repeats):
            turn = repeat % len(ARMS)  # nobody always goes first
            for contestant in contestants[turn:] + contestants[:turn]:
                contestant.step()
            if on_progress is not None:
                on_progress(f"{context:,}", repeat + 1, WARM_UP_STEPS + bench.repeats)
        seconds = {contestant.arm: contestant.seconds() for contestant in contestants}
        rows += [
            {**row(bench, loaded, contestant, seconds[contestant.arm], bandwidth), **about}
            for contestant in contestants
        ]
        ratios.append(ratio(context, seconds))
        del contestants
    return {
        "benchmark": "step",
        "config_hash": bench.digest,
        "read_bandwidth_note": "bytes per second, measured before each context",
        "rows": rows,
        "ratios": ratios,
    }


def row(
    bench: StepBench,
    loaded: LoadedModel,
    contestant: Contestant,
    seconds: dict[str, list[float]],
    bandwidth: float,
) -> dict[str, Any]:
    """One result; every field is there, or an error says which measurement is missing."""
    step, draft, verify = (Spread.of(seconds[part]) for part in ("step", "draft", "verify"))
    if step.runs != bench.repeats:
        raise RuntimeError(f"{contestant.arm} made {step.runs} of {bench.repeats} steps")
    kv_dtype = contestant.engine.config.kv_cache.dtype
    read = bytes_read(bench, loaded, contestant, getattr(torch, kv_dtype))
    floor_ms = {part: count / bandwidth * 1e3 for part, count in read.items()}
    return {
        "arm": contestant.arm,
        "model": model_name(bench.model),
        "context": contestant.context,
        "depth": bench.depth,
        "window": bench.window,
        "n_sink": bench.n_sink,
        "dtype": bench.dtype,
        "kv_dtype": kv_dtype,
        "batch": 1,
        "n_runs": step.runs,
        "step_ms": step.median * 1e3,
        "step_ms_interquartile": [value * 1e3 for value in step.interval],
        "draft_ms": draft.median * 1e3,
        "draft_ms_interquartile": [value * 1e3 for value in draft.interval],
        "verify_ms": verify.median * 1e3,
        "verify_ms_interquartile": [value * 1e3 for value in verify.interval],
        "draft_bytes": read["draft"],
        "verify_bytes": read["verify"],
        "bytes_moved": read["draft"] + read["verify"],
        "read_bandwidth_gb_per_s": bandwidth / 1e9,
        "draft_floor_ms": floor_ms["draft"],
        "verify_floor_ms": floor_ms["verify"],
        "floor_ms": floor_ms["draft"] + floor_ms["verify"],
        "fraction_of_floor": (floor_ms["draft"] + floor_ms["verify"]) / (step.median * 1e3),
    }


def ratio(context: int, seconds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """How many windowed steps fit into a native one, and into its draft phase."""
    out: dict[str, Any] = {"context": context}
    for part in ("step", "draft"):
        pairs = zip(seconds["native"][part], seconds["windowed"][part], strict=True)
        spread = Spread.of([native / windowed for native, windowed in pairs])
        out[f"{part}_native_over_windowed"] = spread.median
        out[f"{part}_native_over_windowed_interquartile"] = spread.interval
    return out


def bytes_read(
    bench: StepBench, loaded: LoadedModel, contestant: Contestant, kv_dtype: torch.dtype
) -> dict[str, int]:
    """Fewest bytes that the draft phase and the verify of one step read."""
    speculation = bench.speculation(contestant.arm)
    return step_bytes(loaded, speculation, contestant.context, kv_dtype)


def step_bytes(
    loaded: LoadedModel,
    speculation: MtpConfig | None,
    context: int,
    kv_dtype: torch.dtype,
    batch: int = 1,
) -> dict[str, int]:
    """Fewest bytes that ``draft`` and ``verify`` of a step of ``batch`` requests, each ``context``
    tokens long, read: weights once per forward, keys and values of every request."""
    config = loaded.config
    caches = config.caches
    keys = batch * context * caches.kv_bytes_per_token(kv_dtype)
    verify = weight_bytes(loaded.target, config) + keys
    if speculation is None:
        return {"draft": 0, "verify": verify}
    visible = context
    if speculation.window is not None:
        visible = min(context, speculation.n_sink + speculation.window)
    if loaded.head is None:
        raise RuntimeError("an arm drafts without a head")
    lm_head = loaded.target.lm_head.weight
    forward = (
        weight_bytes(loaded.head, config)
        + lm_head.numel() * lm_head.element_size()
        + batch * visible * caches.draft.bytes_per_token(kv_dtype)
    )
    return {"draft": speculation.draft_len * forward, "verify": verify}


def weight_bytes(module: nn.Module, config: ModelConfig) -> int:
    """Bytes of the weights that one row's forward reads; tied ones once, idle experts not."""
    fused = {
        id(getattr(experts, name))
        for experts in module.modules()
        if isinstance(experts, RoutedExperts)
        for name in experts.fused
    }
    embedding = getattr(module, "embed_tokens", None)
    total = 0
    for weight in module.parameters():
        size = weight.numel() * weight.element_size()
        if id(weight) in fused:
            size = size * config.num_experts_per_tok // config.num_experts
        elif (
            embedding is not None and weight is embedding.weight and not config.tie_word_embeddings
        ):
            size = 0  # one row of it is read
        total += size
    return total
