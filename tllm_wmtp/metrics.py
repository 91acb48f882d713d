"""Acceptance and time statistics, for one request and over many.

``H[n]`` counts the verify steps that accepted exactly n drafts. From it come the conditional
acceptance rates, ``alpha_j = sum_{n>=j} H[n] / sum_{n>=j-1} H[n]``, and the acceptance length,
``AL = 1 + sum_j prod_{k<=j} alpha_k`` tokens per step (arXiv 2607.21535).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

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


def conditional_acceptance(histogram: Sequence[int]) -> list[Proportion]:
    """``alpha_1 .. alpha_gamma``: share of the steps that reached draft j and accepted it."""
    reached = [sum(histogram[n:]) for n in range(len(histogram))]
    return [Proportion(reached[j], reached[j - 1]) for j in range(1, len(histogram))]


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
    last step counts in full even if a stop cuts its tokens off.
    """

    arm: str
    prompt_tokens: int
    accepted_histogram: list[int]
    output_tokens: int = 0
    ttft_s: float | None = None
    prefill_s: float = 0.0
    draft_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    #: Times that the request gave up its memory to an older one and was prefilled again.
    preemptions: int = 0
    #: Rows whose last target layer computed queries, output and feed-forward.
    prefill_last_layer_rows: int = 0
    #: Rows that the draft's prefill stored in its ring.
    prefill_draft_rows: int = 0
    #: Bytes of the draft's own keys and values that this request filled.
    draft_kv_bytes: int = 0

    def record_step(
        self, accepted_drafts: int, draft_s: float, verify_s: float, step_s: float
    ) -> None:
        self.accepted_histogram[accepted_drafts] += 1
        self.draft_s.append(draft_s)
        self.verify_s.append(verify_s)
        self.step_s.append(step_s)

    @property
    def steps(self) -> int:
        return len(self.step_s)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step, or None before the first step."""
        return acceptance_length(self.accepted_histogram) if self.steps else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, or None before the first step."""
        if not self.steps:
            return None
        return time_per_output_token(self.step_s, [acceptance_length(self.accepted_histogram)])
