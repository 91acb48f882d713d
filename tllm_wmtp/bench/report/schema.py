"""What the report reads of each benchmark's JSON; the benchmarks write more than that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]


@dataclass(frozen=True, order=True)
class Machine:
    """What the numbers were measured on; of an endpoint, the client."""

    processor: str
    threads: int
    isa: str
    device: str

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.processor}, {threads}, {self.isa}, {self.device}"


@dataclass(frozen=True)
class Measured:
    """A row of a measurement, with its machine and day (UTC)."""

    date: str
    device: str
    processor: str
    threads: int
    isa: str

    @property
    def machine(self) -> Machine:
        return Machine(self.processor, self.threads, self.isa, self.device)


@dataclass(frozen=True)
class StepRow(Measured):
    """``wmtp bench step``: one arm at one context; times in ms with quartiles."""

    arm: str
    model: str
    context: int
    depth: int
    window: int
    n_sink: int
    dtype: str
    kv_dtype: str
    batch: int
    n_runs: int
    step_ms: float
    step_ms_interquartile: Interval
    draft_ms: float
    draft_ms_interquartile: Interval
    verify_ms: float
    verify_ms_interquartile: Interval
    bytes_moved: int
    floor_ms: float
    fraction_of_floor: float


@dataclass(frozen=True)
class StepRatio:
    """Medians of paired ratios, with quartiles."""

    context: int
    step_native_over_windowed: float
    step_native_over_windowed_interquartile: Interval
    draft_native_over_windowed: float
    draft_native_over_windowed_interquartile: Interval


@dataclass(frozen=True)
class StepResult:
    rows: tuple[StepRow, ...]
    ratios: tuple[StepRatio, ...]


@dataclass(frozen=True)
class PrefillRow(Measured):
    """``wmtp bench prefill``: one arm, pruned or not; seconds with quartiles."""

    arm: str
    pruned: bool
    model: str
    context: int
    prompt_tokens: int
    window: int
    n_sink: int
    n_runs: int
    ttft_s: float
    ttft_s_interquartile: Interval
    last_layer_rows: int
    draft_rows: int


@dataclass(frozen=True)
class PrefillRatio:
    context: int
    arm: str
    unpruned_over_pruned: float
    unpruned_over_pruned_interquartile: Interval


@dataclass(frozen=True)
class PrefillResult:
    rows: tuple[PrefillRow, ...]
    ratios: tuple[PrefillRatio, ...]


@dataclass(frozen=True)
class DepthRow(Measured):
    """``wmtp bench depth``: one arm (dense, ``depth N``, adaptive) on one kind of text."""

    workload: str
    arm: str
    al: float
    tpot_ms: float
    mean_depth: float


@dataclass(frozen=True)
class DepthRatio:
    """Time over the adaptive arm's, with a 95 % interval."""

    workload: str
    arm: str
    over_adaptive: float
    interval: Interval
    blocks: int


@dataclass(frozen=True)
class DepthResult(Measured):
    model: str
    context: int
    window: int
    n_sink: int
    lossless: bool
    rows: tuple[DepthRow, ...]
    ratios: tuple[DepthRatio, ...]


@dataclass(frozen=True)
class AttentionRow:
    """``wmtp bench attention``: one shape; seconds with quartiles."""

    context: int
    n_rows: int
    head_dim: int
    kv_dtype: str
    n_runs: int
    seconds: float
    seconds_interquartile: Interval
    sdpa_gqa_seconds: float
    sdpa_fold_seconds: float
    speedup_over_best_sdpa: float
    gb_per_second: float
    fraction_of_read_bandwidth: float


@dataclass(frozen=True)
class AttentionResult(Measured):
    rows: tuple[AttentionRow, ...]


@dataclass(frozen=True)
class DemoArm:
    """One arm of ``wmtp demo``: medians over steps, ``ttft_ms`` a mean over prompts."""

    tokens: int
    al: float
    tpot_ms: float
    step_ms: float
    draft_ms: float
    verify_ms: float
    ttft_ms: float
    draft_kv_bytes: int


@dataclass(frozen=True)
class NativeEstimate:
    prefill_s: float
    step_ms: float
    draft_kv_bytes: int


@dataclass(frozen=True)
class DemoResult(Measured):
    lossless: bool
    context: int
    depth: int
    window: int
    n_sink: int
    dtype: str
    arms: dict[str, DemoArm]
    native_estimate: NativeEstimate | None = None
    model: str = ""


@dataclass(frozen=True)
class PlanResult:
    """``wmtp plan``: bytes per rank, from a configuration alone."""

    context: int
    depth: int
    window: int
    n_sink: int
    kv_dtype: str
    tp: int
    family: str
    full_attention_layers: int
    draft_share: float
    ring_bytes: float
    native_draft_bytes: float
    recurrent_bytes: float
    request_bytes: dict[str, float]
    weight_bytes: float
    max_batch: dict[str, int] | None = None
    memory_bytes: float | None = None
    model: str = ""

    @property
    def name(self) -> str:
        return self.model or self.family


@dataclass(frozen=True)
class FitRow:
    """``wmtp bench fit``: one arm, context and depth; medians in ms. ``ctx_ms`` is the first draft
    forward (t_ctx + t_fwd), ``fwd_ms`` each later one; null where they were not timed."""

    arm: str
    context: int
    depth: int
    gamma: int
    step_ms: float
    draft_ms: float | None
    verify_ms: float | None
    ctx_ms: float | None
    fwd_ms: float | None
    step_ms_interval: Interval | None = None


@dataclass(frozen=True)
class FitBreak:
    """A jump of the step before the drafts number ``gamma``."""

    gamma: int
    jump_ms: float
    jump_ms_interval: Interval | None = None


@dataclass(frozen=True)
class FitTimers:
    """The same quantities as the runtime times them, with 95 % intervals."""

    t_fwd_ms: float
    t_fwd_ms_interval: Interval
    t_ctx_ms: float
    t_ctx_ms_interval: Interval


@dataclass(frozen=True)
class FitLine:
    """Step against gamma: ``intercept + slope * gamma``, with 95 % intervals."""

    arm: str
    context: int
    gammas: tuple[int, ...]
    slope_ms: float
    slope_ms_interval: Interval | None
    intercept_ms: float
    intercept_ms_interval: Interval | None
    r_squared: float | None
    #: ``break`` in the JSON, which is no name in Python.
    jump: FitBreak | None = None
    timers: FitTimers | None = None


@dataclass(frozen=True)
class FitPrediction:
    """A windowed step from the native one and the phases' differences, of other repetitions."""

    context: int
    depth: int
    delta_ms: float
    delta_ms_interval: Interval | None
    native_step_ms: float
    windowed_step_ms: float
    predicted_windowed_step_ms: float
    relative_error: float
    relative_error_interval: Interval | None = None


@dataclass(frozen=True)
class FitResult(Measured):
    model: str
    rows: tuple[FitRow, ...]
    fits: tuple[FitLine, ...]
    predictions: tuple[FitPrediction, ...]


@dataclass(frozen=True)
class ProbeChange:
    """Drafts under another read, compared with the native read at the same hidden state: the share
    that stays, with its 95 % Wilson interval; KL from the native distribution, in nats."""

    agreement: float
    interval: Interval
    drafts: int
    flips: int
    kl: float | None = None


@dataclass(frozen=True)
class ProbePoint(ProbeChange):
    """One window of the curve."""

    window: int = 0


@dataclass(frozen=True)
class ProbeSummary:
    """One prompt of ``wmtp probe``, or all of them pooled. Bands are sink, window and tail."""

    drafts: int
    agreement: float
    agreement_interval: Interval
    flips: int
    margin_at_flips: float | None
    margin_elsewhere: float | None
    mass: dict[str, float | None]
    mass_interval: dict[str, Interval | None]
    value_norm: dict[str, float | None]
    tail_keys: float | None
    tail_entropy: float | None
    tail_entropy_share: float | None
    tail_participation: float | None
    router_jaccard: float | None
    perturbations: dict[str, ProbeChange]
    missing: dict[str, str]


@dataclass(frozen=True)
class ProbeRow(ProbeSummary):
    input: str
    curve: tuple[ProbePoint, ...] = ()


@dataclass(frozen=True)
class ProbeResult(Measured):
    model: str
    context: int
    window: int
    n_sink: int
    depth: int
    rows: tuple[ProbeRow, ...]
    summary: ProbeSummary
    curve: tuple[ProbePoint, ...]


@dataclass(frozen=True)
class Alpha:
    """Share of the steps that reached a draft position and accepted it; 95 % Wilson."""

    value: float | None
    interval: Interval
    trials: int


@dataclass(frozen=True)
class RunRow(Measured):
    """``wmtp bench run``: one cell of a suite; null where the target cannot see it."""

    config_hash: str
    config: dict[str, Any]
    arm: str
    model: str
    target: str
    input: str
    difficulty: str
    context: int
    depth: int
    window: int | None
    n_sink: int
    dtype: str
    kv_dtype: str
    batch: int
    max_tokens: int
    temperature: float
    seed: int
    n_runs: int
    output_tokens: int
    steps: int
    screened: int
    alpha: tuple[Alpha, ...] | None
    al: float | None
    al_interval: Interval | None
    tpot_ms: float | None
    tpot_ms_interval: Interval | None
    tokens_per_s: float | None
    ttft_s: float | None
    step_ms: float | None
    draft_ms: float | None
    verify_ms: float | None
    score: float | None
    output_digest: str | None
    missing: dict[str, str]
