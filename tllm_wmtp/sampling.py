"""How one request ends and how its tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tllm_wmtp.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request.

    Args:
        max_tokens: most output tokens.
        stop: strings that end the output; the text ends before the first one found.
        stop_token_ids: token ids that end the output, besides the model's end-of-sequence ids;
            the id found is the last of ``token_ids`` and adds nothing to the text.
        ignore_eos: go on after the model's end-of-sequence ids.
        temperature: only 0 (or None): the most likely token.
    """

    max_tokens: int = 32
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float | None = 0.0

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
        if self.temperature:
            raise RequestError(
                f"temperature {self.temperature}",
                "only greedy decoding is supported; sampling arrives with the sampling issue",
                "use temperature 0",
            )


def _several(given: Any) -> tuple[Any, ...]:
    """None, one value or a collection of values."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (tuple, list, set, frozenset)) else (given,)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
