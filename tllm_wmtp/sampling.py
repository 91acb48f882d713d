"""How one request ends and how its tokens are chosen."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from tllm_wmtp.errors import RequestError

#: Temperatures below it mean 0: the most likely token, and no division by almost nothing.
LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability, and how many tokens are more likely, plus 1."""

    logprob: float
    rank: int


#: One entry per output token, by token id.
Logprobs = list[dict[int, Logprob]]


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request; names and defaults are TensorRT-LLM's.

    Greedy by default. Unless the request is greedy, each token is drawn from the target's
    distribution after, in this order: repetition penalty, frequency and presence penalty,
    temperature, ``min_p``, ``top_k``, ``top_p``. A token as likely as the last one that ``top_k``
    or ``top_p`` keeps is kept as well, so more than ``top_k`` may remain. A greedy request takes
    the most likely token after the penalties. Speculation changes none of this: the draft's
    distribution passes through the same steps, and the verify is exact for any draft.

    Args:
        max_tokens: most output tokens.
        stop: strings that end the output; the text ends before the first one found.
        stop_token_ids: token ids that end the output, besides the model's end-of-sequence ids;
            the id found is the last of ``token_ids`` and adds nothing to the text.
        ignore_eos: go on after the model's end-of-sequence ids.
        temperature: divides the logits. 0 is greedy, and so is None, unless ``top_k``, ``top_p``
            or ``min_p`` is given: then None is 1.
        top_k: draw from the most likely ``top_k`` tokens. None or 0: from all; 1 is greedy.
        top_p: draw from the fewest most likely tokens whose probabilities add up to ``top_p``.
            None or 1: from all; 0 is greedy.
        min_p: draw from tokens at least ``min_p`` times as likely as the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of every token that
            the prompt or the output holds; above 1 discourages them.
        presence_penalty: subtracted from the logit of every token that the output holds.
        frequency_penalty: subtracted once for each time that the output holds the token.
        seed: of the request's own random numbers; None takes a new one. The same seed gives the
            same tokens whatever else is in the batch, with the same arm and a fixed depth. A tree
            gives those of the dense arm.
        logprobs: report for each output token its log-probability and those of the ``logprobs``
            most likely tokens, by the target's logits before any of the steps above; 0 reports
            the output token's alone, None nothing.
    """

    max_tokens: int = 32
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop, ids = _several(self.stop), _several(self.stop_token_ids)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)
        if any(not _is_int(i) or i < 0 for i in ids):
            raise RequestError(
                f"stop_token_ids {ids!r}", "a token id is an integer of 0 or more", "correct it"
            )
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise RequestError(
                f"max_tokens {self.max_tokens!r}",
                "a request makes at least one token",
                "use an integer of 1 or more",
            )
        if any(not isinstance(text, str) or not text for text in stop):
            raise RequestError(
                f"stop {stop!r}", "a stop string has at least one character", "leave it out"
            )
        self._check_filters()
        self._check_penalties()
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 1 << 64):
            raise RequestError(
                f"seed {self.seed!r}",
                "it is an integer from 0 to 2**64 - 1",
                "correct it, or leave it out for a new one",
            )
        if self.logprobs is not None and not (_is_int(self.logprobs) and self.logprobs >= 0):
            raise RequestError(
                f"logprobs {self.logprobs!r}",
                "it is how many of the most likely tokens to report, an integer of 0 or more",
                "use 0 for the output token's alone, or leave it out for none",
            )

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one (after the penalties)."""
        if self.temperature is None:
            unrestricted = self.top_k is None and self.top_p is None and self.min_p is None
        else:
            unrestricted = self.temperature < LOWEST_TEMPERATURE
        return unrestricted or self.top_k == 1 or self.top_p == 0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens that are already there."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def _check_filters(self) -> None:
        temperature = self.temperature
        if temperature is not None and not (_is_finite(temperature) and temperature >= 0):
            raise RequestError(
                f"temperature {temperature!r}",
                "it is a finite number of 0 or more",
                "use 0 for the most likely token, 1 for the model's own distribution",
            )
        if self.top_k is not None and not (_is_int(self.top_k) and self.top_k >= 0):
            raise RequestError(
                f"top_k {self.top_k!r}",
                "it is how many tokens to choose from, an integer of 1 or more",
                "use 0, or leave it out, to choose from all",
            )
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not (_is_finite(share) and 0 <= share <= 1):
                raise RequestError(
                    f"{name} {share!r}",
                    "it is a share of the probability, from 0 to 1",
                    "correct it, or leave it out to choose from all tokens",
                )

    def _check_penalties(self) -> None:
        repetition = self.repetition_penalty
        if not (_is_finite(repetition) and 0.01 <= repetition <= 100):
            raise RequestError(
                f"repetition_penalty {repetition!r}",
                "it is a factor from 0.01 to 100",
                "use 1 for no penalty",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            if not (_is_finite(penalty) and -2 <= penalty <= 2):
                raise RequestError(
                    f"{name} {penalty!r}", "it is from -2 to 2", "use 0 for no penalty"
                )


def _several(given: Any) -> tuple[Any, ...]:
    """None, one value or a collection of values."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (tuple, list, set, frozenset)) else (given,)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    """Whether it is a number, no boolean, and neither NaN nor infinite nor beyond any float."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
