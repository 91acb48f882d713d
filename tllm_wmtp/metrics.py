"""Acceptance and time statistics, for one request and over many.

``H[n]`` counts the verify steps that accepted exactly n drafts. From it come the conditional
acceptance rates, ``alpha_j = sum_{n>=j} H[n] / sum_{n>=j-1} H[n]``, and the acceptance length,
``AL = 1 + sum_j prod_{k<=j} alpha_k`` tokens per step (arXiv 2607.21535).

Where the depth varies, a step that accepted all of its few drafts says nothing about the next
position. ``alpha_j`` is then the share among the steps that drafted j tokens or more and accepted
j - 1 or more; AL is still the tokens per step, which the histogram alone gives.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tllm_wmtp.step_totals import StepTotals, pooled_median_step

Z_95 = 1.959963984540054


@dataclass(frozen=True)
class Proportion:
    """A share of trials with its 95 % Wilson interval."""

    successes: int
    trials: int

    @property
    def value(self) -> float:
        if self.trials == 0:
            raise ValueError("a share of zero trials has no value")
        return self.successes / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.successes, self.trials)


def wilson_interval(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a share; (0, 1) when nothing was tried."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def conditional_acceptance(
    histogram: Sequence[int], trials: Sequence[int] | None = None
) -> list[Proportion]:
    """``alpha_1 .. alpha_gamma``: share of the steps that reached draft j and accepted it.

    ``trials[j - 1]`` counts these steps; without it every step drafted ``len(histogram) - 1``.
    """
    reached = [sum(histogram[n:]) for n in range(len(histogram))]
    trials = reached[:-1] if trials is None else trials
    return [Proportion(*pair) for pair in zip(reached[1:], trials, strict=True)]


def acceptance_length(histogram: Sequence[int]) -> float:
    """Tokens per step, between 1 and ``len(histogram)``."""
    if sum(histogram) == 0:
        raise ValueError("the acceptance length of zero steps has no value")
    total, product = 1.0, 1.0
    for alpha in conditional_acceptance(histogram):
        if alpha.trials == 0:
            break
        product *= alpha.value
        total += product
    return total


def median_step(step_s: Sequence[float], drafted: Sequence[int]) -> float:
    """Seconds of a step: the median of the steps of one depth, the mean over the depths by their
    number of steps.

    One median over several depths would snap to one of them, as a median throughput does.
    """
    by_length: dict[int, list[float]] = {}
    for seconds, length in zip(step_s, drafted, strict=True):
        by_length.setdefault(length, []).append(seconds)
    steps = len(step_s)
    return sum(len(group) / steps * statistics.median(group) for group in by_length.values())


def time_per_output_token(
    iteration_seconds: Sequence[float],
    acceptance_lengths: Sequence[float],
    effective_batch: float = 1.0,
) -> float:
    """``median(T_i) * B_eff / mean(AL)`` in seconds.

    Never the inverse of a median throughput: the acceptance of a step is a small integer, so such a
    median snaps. ``iteration_seconds`` are wall times per step and request (``AL_i / X_i`` where
    only the throughput ``X_i`` of a batch of ``effective_batch`` requests is known; measured
    step times already are what a request waits for, and take ``effective_batch = 1``).
    """
    seconds = statistics.median(iteration_seconds)
    return seconds * effective_batch / statistics.fmean(acceptance_lengths)


@dataclass
class RequestMetrics:
    """Measured while one request runs; all times are wall seconds.

    ``accepted_histogram`` has one entry per possible count of accepted drafts, 0 .. depth - 1; the
    last step counts in full even if a stop cuts its tokens off. ``draft_trials[j - 1]`` counts the
    steps that drafted j tokens or more and accepted j - 1 or more. ``extend_s`` is the part of each
    ``draft_s`` in which the accepted rows were fed and the first draft chosen (``t_ctx + t_fwd``).
    """

    arm: str
    prompt_tokens: int
    accepted_histogram: list[int]
    output_tokens: int = 0
    ttft_s: float | None = None
    prefill_s: float = 0.0
    draft_s: list[float] = field(default_factory=list)
    extend_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    #: Drafts that each step proposed, and how many of them it accepted.
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_trials: list[int] = field(default_factory=list)
    #: The lists above, added up; :func:`summarise` reads only this.
    totals: StepTotals = field(default_factory=StepTotals, repr=False)
    #: Rows whose last target layer computed queries, output and feed-forward.
    prefill_last_layer_rows: int = 0
    #: Rows that the draft's prefill stored in its ring.
    prefill_draft_rows: int = 0
    #: Bytes of the draft's own keys and values that this request filled.
    draft_kv_bytes: int = 0
    #: Times that the request gave its memory back and was prefilled again.
    preemptions: int = 0
    #: Prompt tokens whose keys and values were there before, and were not computed again.
    prefix_hit_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.draft_trials:
            self.draft_trials = [0] * (len(self.accepted_histogram) - 1)

    def record_step(
        self,
        accepted_drafts: int,
        draft_s: float,
        verify_s: float,
        step_s: float,
        drafted: int | None = None,
        extend_s: float = 0.0,
    ) -> None:
        """One step that proposed ``drafted`` tokens, by default as many as the depth allows.

        ``extend_s`` is 0 where nothing was drafted or nobody measured it.

        Raises:
            ValueError: more accepted than drafted, or more drafted than the depth allows.
        """
        most = len(self.accepted_histogram) - 1
        drafted = most if drafted is None else drafted
        if not 0 <= accepted_drafts <= drafted <= most:
            raise ValueError(
                f"{accepted_drafts} of {drafted} drafts accepted, where a step drafts up to {most}"
            )
        self.accepted_histogram[accepted_drafts] += 1
        for position in range(min(drafted, accepted_drafts + 1)):
            self.draft_trials[position] += 1
        self.drafted.append(drafted)
        self.accepted.append(accepted_drafts)
        self.draft_s.append(draft_s)
        self.extend_s.append(extend_s)
        self.verify_s.append(verify_s)
        self.step_s.append(step_s)
        self.totals.add(drafted, draft_s, extend_s, verify_s, step_s)

    @property
    def steps(self) -> int:
        return len(self.step_s)

    @property
    def alpha(self) -> list[Proportion]:
        """``alpha_1 .. alpha_gamma`` with their intervals; without trials, (0, 1)."""
        return conditional_acceptance(self.accepted_histogram, self.draft_trials)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step, or None before the first step."""
        return acceptance_length(self.accepted_histogram) if self.steps else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, or None before the first step."""
        if not self.steps:
            return None
        seconds = median_step(self.step_s, self.drafted)
        return time_per_output_token([seconds], [acceptance_length(self.accepted_histogram)])


@dataclass(frozen=True)
class EngineMetrics:
    """Many requests together, as :func:`summarise` pools them.

    ``accepted_histogram`` and ``draft_trials`` are sums over steps and requests; ``draft_s``
    (its part ``extend_s`` included), ``verify_s``, ``step_s`` and ``prefill_s`` are seconds that
    requests waited, summed over requests, so a step of four requests counts four times. ``tpot_s``
    is the median step over the pooled AL, ``ttft_s`` the median of the requests that made a token;
    both are None before that.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    steps: int
    drafted_tokens: int
    accepted_histogram: list[int]
    draft_trials: list[int]
    prefill_s: float
    draft_s: float
    extend_s: float
    verify_s: float
    step_s: float
    tpot_s: float | None
    ttft_s: float | None
    preemptions: int
    prefix_hit_tokens: int

    @property
    def alpha(self) -> list[Proportion]:
        """``alpha_1 .. alpha_gamma`` with their intervals; without trials, (0, 1)."""
        return conditional_acceptance(self.accepted_histogram, self.draft_trials)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step and request, or None before the first step."""
        return acceptance_length(self.accepted_histogram) if self.steps else None


@dataclass(frozen=True)
class EngineUsage:
    """What an engine holds at one moment; ``lanes_used`` counts the draft rings with an owner."""

    waiting: int
    running: int
    max_batch_size: int
    kv_pages_used: int
    kv_pages: int
    tokens_per_page: int
    lanes_used: int


def summarise(metrics: Iterable[RequestMetrics]) -> EngineMetrics:
    """Pools requests, which may have been run at different depths.

    Works on each request's totals, so that a server's engine can do it between two steps however
    many steps they took.
    """
    members = list(metrics)
    totals = [m.totals for m in members]
    steps = sum(t.steps for t in totals)
    histogram = _column_sums([m.accepted_histogram for m in members]) or [0]
    first = [m.ttft_s for m in members if m.ttft_s is not None]
    tpot_s = None
    if steps:
        tpot_s = time_per_output_token([pooled_median_step(totals)], [acceptance_length(histogram)])
    return EngineMetrics(
        requests=len(members),
        prompt_tokens=sum(m.prompt_tokens for m in members),
        output_tokens=sum(m.output_tokens for m in members),
        steps=steps,
        drafted_tokens=sum(t.drafted for t in totals),
        accepted_histogram=histogram,
        draft_trials=_column_sums([m.draft_trials for m in members]),
        prefill_s=sum(m.prefill_s for m in members),
        draft_s=sum(t.draft_s for t in totals),
        extend_s=sum(t.extend_s for t in totals),
        verify_s=sum(t.verify_s for t in totals),
        step_s=sum(t.step_s for t in totals),
        tpot_s=tpot_s,
        ttft_s=statistics.median(first) if first else None,
        preemptions=sum(m.preemptions for m in members),
        prefix_hit_tokens=sum(m.prefix_hit_tokens for m in members),
    )


def _column_sums(rows: Sequence[Sequence[int]]) -> list[int]:
    """Sums of each position; shorter rows count as ending in zeros."""
    return [sum(column) for column in itertools.zip_longest(*rows, fillvalue=0)]
