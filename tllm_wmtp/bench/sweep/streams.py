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

    ``pieces`` are those with tokens, in their order; their tokens are counted in the text where
    ``token_ids`` is None. What the server says itself, or None where it says nothing:
    ``output_tokens``, ``cached_tokens`` (of the prompt, that it had from before), ``histogram``.
    """

    sent: float
    pieces: Sequence[Piece]
    prompt_tokens: int
    text: str
    token_ids: tuple[int, ...] | None = None
    histogram: tuple[int, ...] | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def steps(self) -> Sequence[Piece]:
        """Pieces of whole steps: not the first, which the prefill makes, nor the last, of which the
        end may have cut tokens off, unless it is the only one."""
        later = self.pieces[1:]
        return later[:-1] if len(later) > 1 else later

    def answer(self) -> Answer:
        """With the server's own counts where it has better ones."""
        steps, tokens = len(self.steps), sum(piece.tokens for piece in self.steps)
        made = sum(piece.tokens for piece in self.pieces)
        if self.token_ids is None and self.output_tokens is not None:
            # A text's tokens need not be those that made it. The first came from the prefill.
            made, steps, tokens = self.output_tokens, len(self.pieces) - 1, self.output_tokens - 1
        if self.histogram is not None:
            steps = sum(self.histogram)
            tokens = sum(count * (drafts + 1) for drafts, count in enumerate(self.histogram))
        return Answer(
            prompt_tokens=self.prompt_tokens,
            output_tokens=made,
            steps=max(steps, 0),
            step_tokens=tokens if steps > 0 else 0,
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
