"""What streams of a server's pieces say about its steps.

A piece is what one step of the server made: its tokens are that step's acceptance, and the time
since the piece before it is the step's time. Pieces that arrive at once look like one long step and
some of no time; those are outside of the band that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tllm_wmtp.bench.sweep.protocol import Answer, Iteration


@dataclass(frozen=True)
class Piece:
    """``tokens`` that arrived at ``at``, seconds of a monotonic clock."""

    at: float
    tokens: int


@dataclass(frozen=True)
class Stream:
    """One request's answer.

    ``pieces`` are those with tokens, in their order. ``cached_tokens`` are those of the prompt that
    the server says it had; None where it says nothing. ``histogram`` is the server's own.
    """

    sent: float
    pieces: Sequence[Piece]
    prompt_tokens: int
    text: str
    token_ids: tuple[int, ...] | None = None
    histogram: tuple[int, ...] | None = None
    cached_tokens: int | None = None

    @property
    def steps(self) -> Sequence[Piece]:
        """Pieces of whole steps: not the first, which the prefill makes, nor the last, of which the
        end may have cut tokens off, unless it is the only one."""
        later = self.pieces[1:]
        return later[:-1] if len(later) > 1 else later

    def answer(self) -> Answer:
        """With the server's own count of accepted drafts, if there is one."""
        steps, tokens = len(self.steps), sum(piece.tokens for piece in self.steps)
        if self.histogram is not None:
            steps = sum(self.histogram)
            tokens = sum(count * (drafts + 1) for drafts, count in enumerate(self.histogram))
        return Answer(
            prompt_tokens=self.prompt_tokens,
            output_tokens=sum(piece.tokens for piece in self.pieces),
            steps=steps,
            step_tokens=tokens,
            ttft_s=None if self.cached_tokens or not self.pieces else self.pieces[0].at - self.sent,
            token_ids=self.token_ids,
            text=self.text,
            histogram=self.histogram,
        )


def iterations(streams: Sequence[Stream]) -> list[Iteration]:
    """One per piece of each stream but its first; ``requests`` are the streams between their first
    and their last piece when it arrived."""
    spans = [(each.pieces[0].at, each.pieces[-1].at) for each in streams if each.pieces]
    found = []
    for stream in streams:
        for before, piece in zip(stream.pieces, stream.pieces[1:], strict=False):
            running = sum(begin <= piece.at <= end for begin, end in spans)
            found.append(Iteration(piece.at - before.at, running, running * piece.tokens))
    return found
