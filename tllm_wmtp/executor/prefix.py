"""Prefix reuse: what a request's rows left behind, for a later one that begins as it did.

A snapshot after L rows has all that they leave: the target's pages, which it shares; copies of the
recurrent states and of the ring's filled slots, which later rows overwrite; and the hidden state of
row L - 1, which the draft needs as soon as the next token is known. So a request that goes on from
it computes, drafts and accepts what it would have computed, drafted and accepted after a prefill of
its own.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_wmtp.executor.draft import Proposer
from tllm_wmtp.executor.request import Request
from tllm_wmtp.models.cache import BlockTables, PagedKvPool, RecurrentPool


@dataclass(eq=False)
class Snapshot:
    """All that ``length`` rows leave.

    ``tokens`` are theirs, as int32 bytes; it owns a share of each of ``pages``, and ``conv, state``
    are those of :class:`RecurrentPool` without its slots. ``ring`` is what
    :meth:`Proposer.copy_ring` gave, rows 0 .. length - 2; ``hidden [1, H]`` is the last row's.
    """

    length: int
    tokens: bytes
    pages: list[int]
    conv: torch.Tensor
    state: torch.Tensor
    ring: tuple[torch.Tensor, ...]
    hidden: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Memory of its own, without the pages."""
        own = (self.conv, self.state, self.hidden, *self.ring)
        return len(self.tokens) + sum(tensor.nbytes for tensor in own)


class PrefixCache:
    """Snapshots of one engine, found by their tokens; the least recently used one goes first.

    Args:
        budget_bytes: most memory for copies and tokens; 0 keeps nothing. The shared pages lie in
            the KV pool, which gets them back by :meth:`make_room`.
    """

    def __init__(
        self,
        kv: PagedKvPool,
        tables: BlockTables,
        recurrent: RecurrentPool,
        proposer: Proposer,
        budget_bytes: int,
    ):
        self.kv, self.tables, self.recurrent, self.proposer = kv, tables, recurrent, proposer
        self.budget_bytes, self.used_bytes = budget_bytes, 0
        # By length and checksum of the tokens, which :meth:`find` compares in full; in the order of
        # their last use.
        self._kept: OrderedDict[tuple[int, int], Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def pages_held(self, spared: Snapshot | None = None) -> int:
        """Pages that would be free without the snapshots, or without all but ``spared``."""
        shares = Counter(
            p for kept in self._kept.values() if kept is not spared for p in kept.pages
        )
        return sum(self.kv.owners(page) == count for page, count in shares.items())

    def find(self, tokens: Sequence[int]) -> Snapshot | None:
        """The longest snapshot that ``tokens`` begin with, or are."""
        if not self._kept:
            return None
        data = _as_bytes(tokens)
        view, found, checksum, done = memoryview(data), None, 0, 0
        for length in sorted({length for length, _ in self._kept}):
            if length > len(tokens):
                break
            end = length * array("i").itemsize
            checksum, done = zlib.crc32(view[done:end], checksum), end
            snapshot = self._kept.get((length, checksum))
            if snapshot is not None and data.startswith(snapshot.tokens):
                found = snapshot
        return found

    def keep(self, request: Request, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Takes a snapshot, unless there is one or it does not fit the budget.

        Args:
            request: ``tokens`` are those of all its committed rows; the ring has all but the last.
            hidden: ``[1, H]`` of the last row.
        """
        if self.budget_bytes == 0 or request.slot is None:
            return
        data, length = _as_bytes(tokens), len(tokens)
        key = length, zlib.crc32(data)
        known = self._kept.get(key)
        if known is not None and known.tokens == data:
            self._kept.move_to_end(key)
            return
        snapshot = Snapshot(
            length,
            data,
            request.pages[: self.kv.pages_for(length)],
            self.recurrent.conv[:, request.slot].clone(),
            self.recurrent.state[:, request.slot].clone(),
            self.proposer.copy_ring(request, length - 1),
            hidden.clone(),
        )
        if snapshot.nbytes > self.budget_bytes:
            return
        if known is not None:
            self._drop(key)  # other tokens of the same checksum
        while self.used_bytes + snapshot.nbytes > self.budget_bytes:
            self._drop(next(iter(self._kept)))
        self.kv.share(snapshot.pages)
        self.used_bytes += snapshot.nbytes
        self._kept[key] = snapshot

    def restore(self, request: Request, snapshot: Snapshot) -> None:
        """Makes a request that has just been given its slot and lane hold the snapshot's rows.

        Whole pages are shared. The rows of a last, partial page are copied, because this request
        will write after them, and so may others.
        """
        if request.slot is None:
            raise RuntimeError("a request is restored before it was given a slot")
        self._kept.move_to_end((snapshot.length, zlib.crc32(snapshot.tokens)))
        whole = snapshot.length // self.kv.tokens_per_page
        self.kv.share(snapshot.pages[:whole])
        request.pages = snapshot.pages[:whole]
        for page in snapshot.pages[whole:]:
            (own,) = self.kv.acquire(1)
            self.kv.copy(page, own)
            request.pages.append(own)
        self.tables.write(request.slot, 0, request.pages)
        self.recurrent.conv[:, request.slot] = snapshot.conv
        self.recurrent.state[:, request.slot] = snapshot.state
        self.proposer.paste_ring(request, snapshot.ring, snapshot.length - 1)
        # Row L - 1 of the draft holds the token after it, which the snapshot did not know.
        self.proposer.store(request, snapshot.length - 1, snapshot.hidden)
        request.prefilled = request.kv_length = snapshot.length
        request.restored_hidden = snapshot.hidden
        request.metrics.prefix_hit_tokens += snapshot.length

    def make_room(self, pages: int, spared: Snapshot | None = None) -> bool:
        """Whether ``pages`` pages are free, now that all snapshots but ``spared`` gave way if that
        was what it took. Nothing is dropped in vain."""
        if pages <= self.kv.free_pages:
            return True
        if pages > self.kv.free_pages + self.pages_held(spared):
            return False
        for key, snapshot in list(self._kept.items()):
            if snapshot is not spared:
                self._drop(key)
            if pages <= self.kv.free_pages:
                break
        return True

    def clear(self) -> None:
        """Forgets everything."""
        for key in list(self._kept):
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        snapshot = self._kept.pop(key)
        self.kv.release(snapshot.pages)
        self.used_bytes -= snapshot.nbytes


def _as_bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()
