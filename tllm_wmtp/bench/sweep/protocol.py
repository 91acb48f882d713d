"""Statistics of a cell: from iterations and answers to the numbers of its row.

The time of an iteration is ``T_i = AL_i / X_i``, where ``X_i`` is the batch's tokens per second in
that iteration and ``AL_i`` its tokens per request, so that AL cancels; then ``TPOT = median(T_i) *
B_eff / mean(AL)`` (arXiv 2607.21535). Never ``B_eff / median(X_i)``: AL snaps to integers, and so
does that median.

What is left out, in this order: the ramp, iterations of another number of requests than most had;
the clipped, outside :data:`BAND` of the median of the others; and, of the acceptance only, answers
that end in degenerate repetition.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tllm_wmtp.bench.common import interval_of, median_draws, ratio_draws
from tllm_wmtp.metrics import (
    Proportion,
    acceptance_length,
    conditional_acceptance,
    time_per_output_token,
)

#: An iteration counts if it takes from half to twice the median of its batch size: a pause of the
#: machine is no property of the arm.
BAND = (0.5, 2.0)
#: Degenerate repetition: the output ends in one cycle of at most so many tokens ...
LONGEST_CYCLE = 16
#: ... which comes so many times or more, and covers so many tokens or more.
CYCLES, CYCLE_TOKENS = 4, 32


@dataclass(frozen=True)
class Iteration:
    """One step of ``requests`` requests that together made ``tokens`` tokens in ``seconds``.

    Of a stream, one chunk: ``seconds`` since the one before, ``requests`` the streams that were
    under way, and ``tokens`` as if each had made as many. The phases are None where they cannot be
    seen; ``ctx_s`` is the first draft forward, ``fwd_s`` each later one.
    """

    seconds: float
    requests: int
    tokens: int
    draft_s: float | None = None
    verify_s: float | None = None
    ctx_s: float | None = None
    fwd_s: float | None = None

    @property
    def t_iter_s(self) -> float:
        """``AL_i / X_i = (tokens / requests) / (tokens / seconds)``."""
        return self.seconds / self.requests


@dataclass(frozen=True)
class Answer:
    """One request that has been answered.

    ``steps`` and ``step_tokens`` count what followed the first token, which the prefill makes.
    None is what the target does not show.
    """

    prompt_tokens: int
    output_tokens: int
    steps: int
    step_tokens: int
    ttft_s: float | None = None
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    histogram: tuple[int, ...] | None = None
    draft_trials: tuple[int, ...] | None = None
    draft_kv_bytes: int | None = None


@dataclass(frozen=True)
class Selection:
    """The iterations that count, and how many do not."""

    kept: list[Iteration]
    ramp: int
    clipped: int

    @property
    def effective_batch(self) -> int | None:
        """Requests of each iteration that counts."""
        return self.kept[0].requests if self.kept else None


def select(iterations: Sequence[Iteration]) -> Selection:
    """Drops the ramp and clips to the band."""
    if not iterations:
        return Selection([], 0, 0)
    batch = plateau([each.requests for each in iterations])
    level = [each for each in iterations if each.requests == batch]
    middle = statistics.median(each.t_iter_s for each in level)
    low, high = (middle * share for share in BAND)
    kept = [each for each in level if low <= each.t_iter_s <= high]
    return Selection(kept, len(iterations) - len(level), len(level) - len(kept))


def plateau(batches: Sequence[int]) -> int:
    """The number of requests that most iterations had; of several, the largest."""
    return max(Counter(batches).items(), key=lambda item: (item[1], item[0]))[0]


def is_degenerate(ids: Sequence[int | str]) -> bool:
    """Whether the output ends in a short cycle, repeated."""
    for period in range(1, LONGEST_CYCLE + 1):
        covered = period
        while covered < len(ids) and ids[-1 - covered] == ids[-1 - covered + period]:
            covered += 1
        if covered >= max(CYCLES * period, CYCLE_TOKENS):
            return True
    return False


@dataclass(frozen=True)
class Acceptance:
    """Of the answers that count. ``al`` is None without a step, ``histogram`` and ``alpha`` where
    the target does not show them, and ``al_interval`` with one answer only."""

    al: float | None
    al_interval: list[float] | None
    histogram: list[int] | None
    alpha: list[Proportion] | None


def acceptance(answers: Sequence[Answer]) -> Acceptance:
    """Pools the answers of one depth. AL is tokens per step, with a 95 % bootstrap interval over
    requests; each alpha has Wilson's."""
    answers = [each for each in answers if each.steps]
    tokens, steps = _columns(answers)
    interval = interval_of(ratio_draws(tokens, steps)) if len(answers) > 1 else None
    shown = [each.histogram for each in answers if each.histogram is not None]
    if not answers or len(shown) < len(answers):
        al = sum(tokens) / sum(steps) if answers else None
        return Acceptance(al, interval, None, None)
    histogram = [sum(column) for column in zip(*shown, strict=True)]
    trials = [each.draft_trials for each in answers if each.draft_trials is not None]
    counted = [sum(column) for column in zip(*trials, strict=True)]
    alpha = conditional_acceptance(histogram, counted if len(trials) == len(answers) else None)
    return Acceptance(acceptance_length(histogram), interval, histogram, alpha)


@dataclass(frozen=True)
class Timing:
    """Seconds; None where nothing was measured, and an interval where one value stands alone."""

    t_iter_s: float | None
    t_iter_interval: list[float] | None
    tpot_s: float | None
    tpot_interval: list[float] | None


def timing(selection: Selection, answers: Sequence[Answer], al: float | None) -> Timing:
    """``median(T_i)`` and TPOT with 95 % bootstrap intervals: times are drawn over iterations, AL
    over requests, independently of each other.

    Args:
        answers: those whose acceptance counts.
        al: theirs.
    """
    shares = [each.t_iter_s for each in selection.kept]
    batch = selection.effective_batch
    if batch is None:
        return Timing(None, None, None, None)
    middle = statistics.median(shares)
    draws = median_draws(shares)
    interval = interval_of(draws) if len(shares) > 1 else None
    if al is None:
        return Timing(middle, interval, None, None)
    tpot = time_per_output_token(shares, [al], batch)
    tokens, steps = _columns([each for each in answers if each.steps])
    if len(tokens) < 2 or interval is None:
        return Timing(middle, interval, tpot, None)
    lengths = ratio_draws(tokens, steps)
    drawn = [seconds * batch / length for seconds, length in zip(draws, lengths, strict=True)]
    return Timing(middle, interval, tpot, interval_of(drawn))


def _columns(answers: Sequence[Answer]) -> tuple[list[int], list[int]]:
    return [each.step_tokens for each in answers], [each.steps for each in answers]
