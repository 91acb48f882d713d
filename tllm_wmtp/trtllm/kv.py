"""The draft layer's private rings in a TensorRT-LLM worker: lanes, positions, static buffers.

Two halves. On the host, before every forward or graph replay, :meth:`DraftRings.publish` tells
which lane each row of the batch owns. On the device, inside the draft loop, :meth:`DraftRings.aim`
and :meth:`DraftRings.attend` work on tensors only: where the batch is all generation, which is what
CUDA graphs capture, every buffer is a static one and nothing is read back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

import tllm_wmtp.ops  # noqa: F401  (defines torch.ops.wmtp)
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.memory import LayerKv
from tllm_wmtp.ring import Lane, LanePool, RingSpec

log = logging.getLogger(__name__)

_Lengths = tuple[torch.Tensor, torch.Tensor] | None

_windowed_draft_attention = torch.ops.wmtp.windowed_draft_attention.default


def lane_count(max_requests: int) -> int:
    """Rings for batches of ``max_requests``.

    Twice as many: with the overlap scheduler finished requests keep theirs for another step, and
    padding rows of a CUDA graph borrow free ones.
    """
    return 2 * max_requests


def ring_bytes_per_rank(
    draft: LayerKv, spec: RingSpec, max_requests: int, element_bytes: float = 2.0, tp: int = 1
) -> float:
    """Bytes of the rings of one rank, whatever the context length: what the planner gives one
    request, for every lane.

    With attention data parallelism each rank has all heads, of its own requests: pass ``tp`` 1.
    """
    return lane_count(max_requests) * draft.ring_bytes(spec.capacity, element_bytes, tp)


class LaneTable:
    """Which request owns which lane; host only.

    A request gets its lane when it is first seen and keeps it until :meth:`release`. If none is
    left, the one that was longest out of the batch is taken away: its request goes on with an empty
    ring, so its drafts get worse and its output stays the same.
    """

    def __init__(self, n_lanes: int):
        self._pool = LanePool(n_lanes)
        self._lanes: dict[int, Lane] = {}  # least recently scheduled first
        self._fresh: list[int] = []
        self.taken_away = 0

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._lanes

    @property
    def n_owned(self) -> int:
        return len(self._lanes)

    def acquire(self, request_id: int, keep: Iterable[int] = ()) -> int:
        """Lane of a request, a new one if it has none; those of ``keep`` are not taken for it."""
        if request_id not in self._lanes:
            if not self._pool.can_acquire():
                self._take_away(frozenset(keep))
            self._lanes[request_id] = self._pool.acquire()
            self._fresh.append(self._lanes[request_id].index)
        return self._lanes[request_id].index

    def release(self, request_id: int) -> None:
        """A request that never had a lane has nothing to give back."""
        lane = self._lanes.pop(request_id, None)
        if lane is not None:
            self._pool.release(lane)

    def rows(self, request_ids: Sequence[int]) -> list[int]:
        """A lane for every row of a batch, no two the same.

        Rows that repeat an id pad the batch to the size of a CUDA graph. They borrow free lanes,
        which they may spoil: a lane is emptied before it has an owner again.
        """
        batch = frozenset(request_ids)
        lanes: list[int] = []
        padding: list[int] = []
        seen: set[int] = set()
        for row, request_id in enumerate(request_ids):
            if request_id in seen:
                padding.append(row)
                lanes.append(0)
                continue
            seen.add(request_id)
            lanes.append(self.acquire(request_id, batch))
            self._lanes[request_id] = self._lanes.pop(request_id)
        borrowed = []
        for row in padding:
            if not self._pool.can_acquire():
                self._take_away(batch)
            borrowed.append(self._pool.acquire())
            lanes[row] = borrowed[-1].index
        for lane in borrowed:
            self._pool.release(lane)
        return lanes

    def drain_fresh(self) -> list[int]:
        """Lanes that got an owner since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def _take_away(self, keep: frozenset[int]) -> None:
        owner = next((one for one in self._lanes if one not in keep), None)
        if owner is None:
            raise ConfigError(
                f"a batch of more than {self._pool.n_lanes} requests",
                "each needs a ring of its own",
                "lower max_batch_size, or report how the executor came to it",
            )
        self.taken_away += 1
        log.warning("request %s loses its draft ring: too many are alive", owner)
        self.release(owner)


@dataclass(frozen=True)
class HeadShape:
    """The draft attention of this rank; ``scale`` multiplies the scores before the softmax."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True)
class _Aim:
    """Where the rows of the next call belong. ``queries`` are indices of the rows to answer, in
    order, or None for all of them."""

    rows: int
    row_offsets: torch.Tensor
    query_offsets: torch.Tensor
    starts: torch.Tensor
    lanes: torch.Tensor
    queries: torch.Tensor | None


class DraftRings:
    """Rings ``[lanes, capacity, Hkv, D]``, the table of their owners, and all buffers of a step.

    Args:
        spec: window, sinks, and ``draft_len + 1`` spare slots.
        heads: of this rank.
        max_requests: most rows of a batch that :meth:`publish` is told.
        dtype: of keys and values, and of what :meth:`attend` is given.
    """

    def __init__(
        self,
        spec: RingSpec,
        heads: HeadShape,
        max_requests: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.spec, self.heads, self.max_requests = spec, heads, max_requests
        self.table = LaneTable(lane_count(max_requests))
        shape = (lane_count(max_requests), spec.capacity, heads.num_kv_heads, heads.head_dim)
        self.ring_k = torch.zeros(shape, dtype=dtype, device=device)
        self.ring_v = torch.zeros(shape, dtype=dtype, device=device)
        self._lanes = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._starts = torch.zeros(max_requests, dtype=torch.int64, device=device)
        # A generation row of the first draft forward comes with draft_len others, or fewer where
        # the draft length follows the batch size; in the other forwards it is alone.
        counts = torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self._ladders = [counts * rows for rows in range(spec.spare + 1)]
        rows = max_requests * spec.spare
        self._q = torch.zeros(rows, heads.num_heads, heads.head_dim, dtype=dtype, device=device)
        self._k = torch.zeros(rows, *shape[2:], dtype=dtype, device=device)
        self._v = torch.zeros_like(self._k)
        self._published = 0
        self._aim: _Aim | None = None

    @property
    def device(self) -> torch.device:
        return self.ring_k.device

    @property
    def nbytes(self) -> int:
        return self.ring_k.nbytes + self.ring_v.nbytes

    # --- On the host, outside any graph ---

    def publish(self, request_ids: Sequence[int]) -> None:
        """Lanes of the coming batch, row by row, to the device, in stream order.

        Rings with a new owner are emptied: after a prefix-cache hit a request has positions that
        it never wrote, and what an earlier owner left there is not its to see.
        """
        if len(request_ids) > self.max_requests:
            raise ConfigError(
                f"a batch of {len(request_ids)} requests",
                f"rings and buffers were made for {self.max_requests}",
                "report how the executor came to it",
            )
        lanes = self.table.rows(request_ids)
        for lane in self.table.drain_fresh():
            self.ring_k[lane].zero_()
            self.ring_v[lane].zero_()
        # A new host tensor each time: the copy of the last one may not have run yet.
        source = torch.tensor(lanes, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._lanes[: len(lanes)].copy_(source, non_blocking=True)
        self._published = len(lanes)

    # --- On the device, inside the draft loop ---

    def aim(
        self,
        positions: torch.Tensor,
        n_requests: int,
        contexts: Sequence[int] | None = None,
        lengths: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Tells the next :meth:`attend` whose rows come.

        Args:
            positions: of every row, on the device: host lengths lag behind under the overlap
                scheduler.
            n_requests: of the batch; all have the same number of rows unless ``contexts`` is given.
            contexts: rows of each context request; they come first, and the rest share the
                remaining rows equally.
            lengths: where positions do not count tokens, what does: length of each request with
                its rows, and how many rows it has, both ``[n_requests]`` on the device.
        """
        if n_requests != self._published:
            raise RuntimeError(f"{n_requests} requests draft, {self._published} were published")
        positions = positions.reshape(-1)
        rows = positions.shape[0]
        if not contexts:
            self._aim = self._aim_generation(positions, rows, n_requests, lengths)
        else:
            self._aim = self._aim_mixed(positions, rows, n_requests, contexts, lengths)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Appends the rows, and answers them.

        Args:
            q, k, v: ``[rows, heads * head_dim]``, keys already rotated.

        Returns:
            ``[rows, num_heads * head_dim]``. Of a context request only the last row has an answer,
            which is the only one that anybody reads; the others are zero.
        """
        aim, heads = self._aim, self.heads
        if aim is None:
            raise RuntimeError("attend before aim: the draft layer was called past its hook")
        rows = aim.rows
        q = q[:rows].view(rows, heads.num_heads, heads.head_dim)
        k = k[:rows].view(rows, heads.num_kv_heads, heads.head_dim)
        v = v[:rows].view(rows, heads.num_kv_heads, heads.head_dim)
        if aim.queries is None:
            out = self._run(_dense(self._q, q), _dense(self._k, k), _dense(self._v, v), aim)
            return out.flatten(1)
        answers = self._run(q.index_select(0, aim.queries), k.contiguous(), v.contiguous(), aim)
        out = q.new_zeros(rows, heads.num_heads * heads.head_dim)
        return out.index_copy_(0, aim.queries, answers.flatten(1))

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, aim: _Aim) -> torch.Tensor:
        return _windowed_draft_attention(
            q,
            k,
            v,
            self.ring_k,
            self.ring_v,
            aim.row_offsets,
            aim.query_offsets,
            aim.starts,
            aim.lanes,
            self.spec.n_sink,
            self.spec.window,
            self.heads.scale,
        )

    def _aim_generation(
        self, positions: torch.Tensor, rows: int, n_requests: int, lengths: _Lengths
    ) -> _Aim:
        each, rest = divmod(rows, n_requests)
        if rest or each >= len(self._ladders):
            raise ConfigError(
                f"{rows} draft rows of {n_requests} requests",
                f"each has the same number, at most {self.spec.spare}",
                "dynamic trees are not covered; use a chain",
            )
        starts = self._starts[:n_requests]
        if lengths is None:
            starts.copy_(positions.view(n_requests, each)[:, 0])
        else:
            starts.copy_(lengths[0]).sub_(lengths[1])
        offsets = self._ladders[each][: n_requests + 1]
        return _Aim(rows, offsets, offsets, starts, self._lanes[:n_requests], None)

    def _aim_mixed(
        self,
        positions: torch.Tensor,
        rows: int,
        n_requests: int,
        contexts: Sequence[int],
        lengths: _Lengths,
    ) -> _Aim:
        # Never captured: a batch with context requests has shapes of its own.
        generations, left = n_requests - len(contexts), rows - sum(contexts)
        each, rest = divmod(left, generations) if generations else (0, left)
        if rest or each < bool(generations):
            raise ConfigError(
                f"{rows} draft rows of {n_requests} requests",
                f"contexts of {list(contexts)} rows leave {left} for the other {generations}, the "
                "same number each",
                "dynamic trees are not covered; use a chain",
            )
        counts = torch.tensor([*contexts, *[each] * generations])
        asked = torch.tensor([*[1] * len(contexts), *[each] * generations])
        ends = counts.cumsum(0)
        first_query = (ends - asked).repeat_interleave(asked)
        step = torch.arange(int(asked.sum())) - (asked.cumsum(0) - asked).repeat_interleave(asked)
        on = self.device
        if lengths is None:
            starts = positions.index_select(0, (ends - counts).to(on))
        else:
            starts = lengths[0] - lengths[1]
        return _Aim(
            rows,
            _offsets(counts).to(on),
            _offsets(asked).to(on),
            starts.to(torch.int64),
            self._lanes[:n_requests],
            (first_query + step).to(on),
        )


def first_axis(positions: torch.Tensor, rows: int) -> torch.Tensor:
    """``[rows]`` of positions ``[..., rows]``: the first of several axes, which for text are equal.

    Raises:
        ConfigError: there is not one position per row.
    """
    if positions.shape[-1] != rows:
        raise ConfigError(
            f"position_ids {tuple(positions.shape)} of {rows} draft rows",
            "there is one per row, on one axis or on several",
            "report how the executor came to it",
        )
    while positions.dim() > 1:
        positions = positions[0]
    return positions


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)


def _dense(buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows if they are contiguous, else their copy in a static buffer."""
    if rows.is_contiguous() and rows.dtype == buffer.dtype:
        return rows
    return buffer[: rows.shape[0]].copy_(rows)
