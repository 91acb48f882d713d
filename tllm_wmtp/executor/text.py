"""Token ids to text, one token at a time, and the strings that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"


class OutputText:
    """Text of a growing run of tokens.

    A byte-level token may end inside a character, so text is only taken when it does not end in a
    replacement character; and tokens are decoded together with the piece before them, because a
    decoder may treat the first token of a run specially (a leading space).

    Args:
        decode: token ids to text, special tokens left out.
        stop: strings that end the text before the first one found.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()):
        self._decode, self._stop = decode, tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._ids: list[int] = []
        self._context_begin = self._taken_end = 0
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Adds a token; True when a stop string is now complete (and cut off)."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._context_begin : self._taken_end])
        both = self._decode(self._ids[self._context_begin :])
        if both.endswith(REPLACEMENT):
            return False
        return self._take(both[len(known) :])

    def finish(self) -> bool:
        """Takes what is left, an incomplete character included; True as :meth:`push`."""
        if self.stopped or self._taken_end == len(self._ids):
            return self.stopped
        known = self._decode(self._ids[self._context_begin : self._taken_end])
        return self._take(self._decode(self._ids[self._context_begin :])[len(known) :])

    def settled(self) -> str:
        """The text that no later token can take back: without a tail that may become a stop."""
        if self.stopped:
            return self.text
        for size in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(stop.startswith(tail) for stop in self._stop):
                return self.text[:-size]
        return self.text

    def _take(self, piece: str) -> bool:
        search_from = max(0, len(self.text) - self._longest_stop + 1)
        self.text += piece
        self._context_begin, self._taken_end = self._taken_end, len(self._ids)
        found = [at for stop in self._stop if (at := self.text.find(stop, search_from)) >= 0]
        if not found:
            return False
        self.text = self.text[: min(found)]
        self.stopped = True
        return True
