"""The two ways a forward of the target reaches its keys and recurrent states.

:class:`PrefillStates` runs one request's prompt in chunks and commits as it goes.
:class:`VerifyStates` runs the same few rows of several requests and commits afterwards, any number
of rows per request, without a second forward; the rows are a chain, or a tree of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tllm_wmtp.models.cache import BlockTables, PagedKvPool, RecurrentPool
from tllm_wmtp.models.layers.gated_delta import chunked_gated_delta_rule, tree_gated_delta_rows
from tllm_wmtp.models.layers.mamba2 import chunked_ssd, ssd_commit, ssd_rows
from tllm_wmtp.models.spec import DECAYED_SUM
from tllm_wmtp.ops.paged_move import paged_move
from tllm_wmtp.tree import (
    TreeShape,
    ancestor_words,
    ancestors,
    convolution_index,
    path_to,
    steps_up,
)

_paged_append = torch.ops.wmtp.paged_append.default
_full_attention = torch.ops.wmtp.full_attention.default
_gated_delta_rows = torch.ops.wmtp.gated_delta_rows.default
_gated_delta_commit = torch.ops.wmtp.gated_delta_commit.default


class _PagedAttend:
    """One layer's keys behind the rows of one forward."""

    def __init__(self, pool: PagedKvPool, index: int, owner: PrefillStates | VerifyStates):
        self.k_pages, self.v_pages = pool.k_pages[index], pool.v_pages[index]
        self.scale, self.owner = pool.scale, owner

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        owner = self.owner
        _paged_append(
            k.flatten(0, 1),
            v.flatten(0, 1),
            self.k_pages,
            self.v_pages,
            owner.block_table,
            owner.row_offsets,
            owner.starts,
        )
        if q.shape[1] == 0:
            return q
        everyone = q.shape[1] == k.shape[1]
        return _full_attention(
            q.flatten(0, 1),
            self.k_pages,
            self.v_pages,
            owner.block_table,
            owner.row_offsets if everyone else owner.query_offsets,
            owner.flat_positions if everyone else owner.query_positions,
            self.scale,
            *owner.tree_mask,
        ).view(q.shape)


class PrefillStates:
    """States of one request's prompt, chunk after chunk; every row is final.

    The recurrent layers use the chunked rule and leave their states after the chunk's last row.
    """

    tree_mask: tuple[torch.Tensor, ...] = ()  # a prompt is a chain

    def __init__(
        self, kv: PagedKvPool, recurrent: RecurrentPool, block_table: torch.Tensor, slot: int
    ):
        device = block_table.device
        self.block_table = block_table  # int32 [1, pages]
        self.row_offsets = torch.zeros(2, dtype=torch.int32, device=device)
        self.query_offsets = torch.zeros(2, dtype=torch.int32, device=device)
        self.starts = torch.zeros(1, dtype=torch.int64, device=device)
        self.flat_positions = torch.empty(0, dtype=torch.int64, device=device)
        self.query_positions = self.flat_positions
        self._attend = {layer: _PagedAttend(kv, i, self) for i, layer in enumerate(kv.layers)}
        self._delta = {
            layer: _SlotDelta(recurrent, i, slot) for i, layer in enumerate(recurrent.layers)
        }

    @property
    def positions(self) -> torch.Tensor:
        return self.flat_positions.unsqueeze(0)

    def begin(self, start: int, rows: int, queries: torch.Tensor | None) -> None:
        """The next forward has ``rows`` rows from position ``start``; ``queries`` indexes those
        that the last layer answers, all when None."""
        self.starts.fill_(start)
        self.row_offsets[1] = rows
        self.flat_positions = torch.arange(
            start, start + rows, dtype=torch.int64, device=self.starts.device
        )
        if queries is not None:
            self.query_offsets[1] = queries.numel()
            self.query_positions = self.flat_positions[queries]

    def attention(self, layer: int) -> _PagedAttend:
        return self._attend[layer]

    def recurrent(self, layer: int) -> _SlotDelta:
        return self._delta[layer]


class _SlotDelta:
    """One linear layer's states of one request, advanced by every call."""

    def __init__(self, pool: RecurrentPool, index: int, slot: int):
        self.conv = pool.conv[index, slot : slot + 1]
        self.state = pool.state[index, slot : slot + 1]
        self.history = pool.shape.history

    def convolution_window(self, mixed: torch.Tensor) -> torch.Tensor:
        window = torch.cat((self.conv, mixed), dim=1)
        self.conv.copy_(window[:, window.shape[1] - self.history :])
        return window

    def delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        out, state = chunked_gated_delta_rule(q, k, v, g, beta, self.state)
        self.state.copy_(state)
        return out

    def decayed_sum(
        self, q: torch.Tensor, k: torch.Tensor, delta: torch.Tensor, g: torch.Tensor
    ) -> torch.Tensor:
        out, state = chunked_ssd(q, k, delta, g, self.state)
        self.state.copy_(state)
        return out


class VerifyStates:
    """States of B requests that verify the same number of rows, T.

    Made once per batch membership and T; ``begin`` before each forward, ``commit`` after it.
    Between the two, the recurrent pools still hold the states before the first row. The keys of
    refused rows stay in their pages and are overwritten: a length decides what is visible.

    Args:
        tables: the block tables of all slots; those of ``slots`` are copied when they changed.
        slots: the requests' slots in ``recurrent`` and ``tables``.
        rows: T, of a chain.
        tree: the rows are a tree of this shape instead; then ``begin`` takes the parents, and
            ``commit_paths`` stands for ``commit``.
    """

    def __init__(
        self,
        kv: PagedKvPool,
        recurrent: RecurrentPool,
        tables: BlockTables,
        slots: Sequence[int],
        rows: int,
        tree: TreeShape | None = None,
    ):
        device, batch = tables.table.device, len(slots)
        rows = rows if tree is None else tree.rows
        self.rows, self.kv, self.pool, self.tree = rows, kv, recurrent, tree
        self.tables, self._tables_version = tables, tables.version
        self.row_offsets = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device)
        self.query_offsets = self.row_offsets
        self.starts = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, rows, dtype=torch.int64, device=device)
        self.flat_positions = self.query_positions = self.positions.view(-1)
        #: What a row adds to its request's length to make its position.
        self.levels = (
            torch.arange(rows, dtype=torch.int64, device=device)
            if tree is None
            else tree.levels(device)
        )
        #: What full attention is told of a tree: ancestor words and each request's length.
        self.tree_mask: tuple[torch.Tensor, ...] = ()
        self._attend = {layer: _PagedAttend(kv, i, self) for i, layer in enumerate(kv.layers)}

        self.slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self.slot_index = self.slots.long()
        self.block_table = tables.table[self.slot_index]  # int32 [B, pages]
        layers, kept = len(recurrent.layers), recurrent.shape
        # Layers folded into the batch: one commit call serves them all.
        offsets = torch.arange(layers, dtype=torch.int32, device=device) * recurrent.slots
        self._all_slots = (offsets[:, None] + self.slots).flatten()
        shape = (layers, batch, rows, kept.value_heads)
        self.windows = torch.zeros(
            (layers, batch, kept.history + rows, kept.conv_channels),
            dtype=recurrent.dtype,
            device=device,
        )
        self.keys = torch.zeros((layers, batch, rows, kept.key_heads, kept.key_dim), device=device)
        self.decays = torch.zeros(shape, device=device)
        self.deltas = torch.zeros((*shape, kept.value_dim), device=device)
        self.batch_index = torch.arange(batch, device=device)[:, None]
        self._history_steps = torch.arange(kept.history, device=device)
        self._recorded = {layer: _Recorded(self, i) for i, layer in enumerate(recurrent.layers)}

    def begin(self, lengths: Sequence[int], parents: torch.Tensor | None = None) -> None:
        """The next forward continues requests that hold ``lengths`` committed rows.

        Args:
            parents: of a tree, int64 ``[B, T]`` as :mod:`tllm_wmtp.tree` has them.
        """
        if self._tables_version != self.tables.version:
            torch.index_select(self.tables.table, 0, self.slot_index, out=self.block_table)
            self._tables_version = self.tables.version
        self.starts.copy_(torch.tensor(lengths, dtype=torch.int64))
        torch.add(self.starts[:, None], self.levels, out=self.positions)
        if self.pool.layers:
            self.windows[:, :, : self.pool.shape.history] = self.pool.conv[:, self.slot_index]
        if (self.tree is None) != (parents is None):
            raise RuntimeError("a tree has parents, a chain has none")
        if self.tree is not None and parents is not None:
            self.steps = steps_up(self.tree, parents)
            self.related = ancestors(self.steps)
            self.tree_mask = (ancestor_words(self.related), self.starts)
            self.inputs = convolution_index(self.steps, self.levels, self.pool.shape.conv_kernel)

    def attention(self, layer: int) -> _PagedAttend:
        return self._attend[layer]

    def recurrent(self, layer: int) -> _Recorded:
        return self._recorded[layer]

    def commit(self, counts: torch.Tensor) -> None:
        """Keeps the first ``counts[b]`` (int64 ``[B]``, 0 .. T) rows of every request."""
        if not self.pool.layers:
            return
        history = counts[:, None] + self._history_steps
        self._commit_recurrent(history, self.keys, self.decays, self.deltas, counts)

    def commit_paths(self, leaves: torch.Tensor) -> torch.Tensor:
        """Keeps the rows from the root to ``leaves[b]`` (int64 ``[B]``), moved next to each other.

        Returns:
            the rows kept, int64 ``[B, depth]``; after a request's own they repeat its leaf.
        """
        rows, counts = path_to(self.steps, self.levels, leaves)
        paged_move(self.kv.k_pages, self.kv.v_pages, self.block_table, self.starts, rows, counts)
        if self.pool.layers:
            history = self.inputs[self.batch_index[:, 0], leaves, 1:]
            keys, decays, deltas = (
                recorded[:, self.batch_index, rows]
                for recorded in (self.keys, self.decays, self.deltas)
            )
            self._commit_recurrent(history, keys, decays, deltas, counts)
        return rows

    def _commit_recurrent(
        self,
        history: torch.Tensor,
        keys: torch.Tensor,
        decays: torch.Tensor,
        deltas: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """``history [B, kernel - 1]`` indexes the windows; of the rows the first counts count.

        All that may fail, for want of memory, comes before the first write to the pool.
        """
        pool = self.pool
        conv = self.windows[:, self.batch_index, history]
        layers = len(pool.layers)
        if pool.shape.rule == DECAYED_SUM:
            kept = torch.arange(keys.shape[2], device=counts.device) < counts[:, None]
            state = ssd_commit(
                keys.flatten(0, 1),
                deltas.flatten(0, 1),
                decays.flatten(0, 1),
                pool.state[:, self.slot_index].flatten(0, 1),
                kept.repeat(layers, 1),
            )
            pool.state[:, self.slot_index] = state.unflatten(0, (layers, -1))
        else:
            _gated_delta_commit(
                keys.flatten(0, 1),
                decays.flatten(0, 1),
                deltas.flatten(0, 1),
                pool.state.flatten(0, 1),
                self._all_slots,
                counts.to(torch.int32).repeat(layers),
            )
        pool.conv[:, self.slot_index] = conv


class _Recorded:
    """One recurrent layer of a verify forward: records what a commit needs, advances nothing."""

    def __init__(self, owner: VerifyStates, index: int):
        pool = owner.pool
        self.owner = owner
        self.state, self.slots = pool.state[index], owner.slots
        self.window = owner.windows[index]
        self.rows = self.window[:, pool.shape.history :]
        self.keys, self.decays = owner.keys[index], owner.decays[index]
        self.deltas = owner.deltas[index]

    def convolution_window(self, mixed: torch.Tensor) -> torch.Tensor:
        self.rows.copy_(mixed)
        if self.owner.tree is None:
            return self.window
        return self.window[self.owner.batch_index[:, :, None], self.owner.inputs]

    def delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        self.keys.copy_(k)
        self.decays.copy_(g)
        if self.owner.tree is not None:
            state = self.state[self.owner.slot_index]
            out, delta = tree_gated_delta_rows(q, k, v, g, beta, state, self.owner.related)
        else:
            out, delta = _gated_delta_rows(
                q.float().contiguous(),
                self.keys,
                v.float().contiguous(),
                self.decays,
                beta.float(),
                self.state,
                self.slots,
            )
        self.deltas.copy_(delta)
        return out

    def decayed_sum(
        self, q: torch.Tensor, k: torch.Tensor, delta: torch.Tensor, g: torch.Tensor
    ) -> torch.Tensor:
        self.keys.copy_(k)
        self.decays.copy_(g)
        self.deltas.copy_(delta)
        related = None if self.owner.tree is None else self.owner.related
        return ssd_rows(q, k, delta, g, self.state[self.owner.slot_index], related)
