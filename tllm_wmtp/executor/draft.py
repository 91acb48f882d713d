"""Who proposes the drafts of a step. The target verifies them, so no choice changes the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch

import tllm_wmtp.ops as ops
from tllm_wmtp.config import MtpConfig
from tllm_wmtp.executor.request import Request
from tllm_wmtp.executor.sampler import StepSampler
from tllm_wmtp.models.spec import DraftHead, KeyValueShape, Target
from tllm_wmtp.ring import LanePool, RingSpec
from tllm_wmtp.tree import TreeShape, ancestor_words, ancestors, steps_up

#: Accepted rows that may wait for a step that drafts; more of them are stored at once.
MOST_ROWS_WAITING = 16

_ring_append = torch.ops.wmtp.ring_append.default
_windowed_draft_attention = torch.ops.wmtp.windowed_draft_attention.default


def ring_of(speculation: MtpConfig) -> RingSpec:
    """The ring of a resolved config, whose window is a number."""
    if speculation.window is None:
        raise RuntimeError("the speculation config has not been resolved")
    return RingSpec.for_chain(
        speculation.n_sink, speculation.window, speculation.depth, speculation.tree_width
    )


@dataclass(frozen=True)
class Drafts:
    """``tokens [B, N]`` (int64) that may follow each request's pending token: a chain, or the rows
    1 .. N of a tree whose ``parents [B, 1 + N]`` are given (:mod:`tllm_wmtp.tree`).

    ``extend_s`` asks, once all of the phase has run, how long it took to the first drafts: the
    forward that feeds the accepted rows, and the choice. None where that was not measured.
    """

    tokens: torch.Tensor
    parents: torch.Tensor | None = None
    extend_s: Callable[[], float] | None = None


class ExtendTimer:
    """Seconds between :meth:`begin` and :meth:`end` on the device's own time line.

    Nothing waits: on CUDA two events are recorded, which :meth:`seconds` reads after the
    synchronisation that ends the draft phase anyway.
    """

    def __init__(self, device: torch.device):
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
        self._begin = self._end = 0.0

    def begin(self) -> None:
        if self._events is None:
            self._begin = perf_counter()
        else:
            self._events[0].record()

    def end(self) -> None:
        if self._events is None:
            self._end = perf_counter()
        else:
            self._events[1].record()

    def seconds(self) -> float:
        if self._events is None:
            return self._end - self._begin
        return self._events[0].elapsed_time(self._events[1]) * 1e-3


class Proposer(Protocol):
    """Drafts for the requests of a step, at most ``depth - 1`` levels of ``tree_width`` each.

    ``rows`` is how many rows the verify of a step then has at most.
    """

    depth: int
    tree_width: int

    @property
    def rows(self) -> int: ...

    @property
    def lanes_used(self) -> int:
        """Rings that have an owner."""
        ...

    @property
    def lane_bytes(self) -> int:
        """Memory that one request's draft keys and values take at most."""
        ...

    def can_acquire(self) -> bool:
        """Whether :meth:`acquire` finds what it needs."""
        ...

    def acquire(self, request: Request) -> None: ...

    def release(self, request: Request) -> None: ...

    def rows_read(self, prompt_length: int) -> tuple[int, int]:
        """``(sink_end, tail_begin)``: of a prompt's rows, hidden states are read at positions
        ``p < sink_end`` and ``p >= tail_begin``; always of the last one."""
        ...

    def store(self, request: Request, start: int, hidden: torch.Tensor) -> None:
        """Prefill: ``hidden [n, H]`` of consecutive prompt rows from position ``start``."""
        ...

    def copy_ring(self, request: Request, rows: int) -> tuple[torch.Tensor, ...]:
        """What of the first ``rows`` draft rows is still there, for :meth:`paste_ring`."""
        ...

    def paste_ring(self, request: Request, ring: tuple[torch.Tensor, ...], rows: int) -> None:
        """Gives a request that has no draft rows yet those of ``copy_ring(..., rows)``."""
        ...

    def settle(self, request: Request) -> torch.Tensor:
        """Stores the committed draft rows that still wait, all but the last, whose token is pending
        and whose hidden state ``[1, H]`` is returned."""
        ...

    def propose(self, requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        """``draft_len`` (0 .. depth - 1) levels of drafts per request.

        May be called again for the same step, if what followed it failed.
        """
        ...

    def keep(self, request: Request, tokens: list[int], hidden: torch.Tensor) -> None:
        """``tokens`` were chosen after the rows of ``hidden [len(tokens), H]``, now committed."""
        ...

    def kv_bytes(self, request: Request) -> int:
        """Bytes of draft keys and values that the request has filled."""
        ...

    def fill_random(self, request: Request, tokens: int, generator: torch.Generator) -> None:
        """Random draft keys and values of ``tokens`` rows, for measurements without a prefill."""
        ...


class NullProposer:
    """The dense arm: nothing is proposed, so a verify has one row."""

    depth = 1
    tree_width = 1
    lane_bytes = 0

    @property
    def rows(self) -> int:
        return 1 + self.tree_width * (self.depth - 1)

    @property
    def lanes_used(self) -> int:
        return 0

    def __init__(self, device: torch.device):
        self.device = device

    def can_acquire(self) -> bool:
        return True

    def acquire(self, request: Request) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def rows_read(self, prompt_length: int) -> tuple[int, int]:
        return 0, prompt_length - 1

    def store(self, request: Request, start: int, hidden: torch.Tensor) -> None:
        pass

    def copy_ring(self, request: Request, rows: int) -> tuple[torch.Tensor, ...]:
        return ()

    def paste_ring(self, request: Request, ring: tuple[torch.Tensor, ...], rows: int) -> None:
        pass

    def settle(self, request: Request) -> torch.Tensor:
        if request.draft_hidden is None:
            raise RuntimeError("a request decodes before its prefill is done")
        return request.draft_hidden[-1:]

    def propose(self, requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        return Drafts(torch.empty(len(requests), 0, dtype=torch.int64, device=self.device))

    def keep(self, request: Request, tokens: list[int], hidden: torch.Tensor) -> None:
        request.draft_tokens, request.draft_hidden = tokens, hidden

    def kv_bytes(self, request: Request) -> int:
        return 0

    def fill_random(self, request: Request, tokens: int, generator: torch.Generator) -> None:
        pass


class RingAttend:
    """The draft layer's keys: one ring per lane, behind the windowed attention op.

    ``aim`` names the rows of the next call; the call appends all of them and answers the last ones
    of each request. ``aim_level`` names a tree's level: its rows' ancestors are appended again with
    them, because only rows of one launch can be told apart by a mask.
    """

    def __init__(
        self,
        spec: RingSpec,
        lanes: int,
        kv: KeyValueShape,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.spec, self.scale = spec, kv.scale
        shape = (lanes, spec.capacity, kv.num_kv_heads, kv.head_dim)
        self.ring_k = torch.empty(shape, dtype=dtype, device=device)
        self.ring_v = torch.empty(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            ops.advise_huge_pages(self.ring_k)
            ops.advise_huge_pages(self.ring_v)
        self.row_offsets = self.query_offsets = self.lanes = torch.empty(0, dtype=torch.int32)
        self.starts = torch.empty(0, dtype=torch.int64)
        self._mask: torch.Tensor | None = None
        self._earlier: tuple[torch.Tensor, torch.Tensor] | None = None

    def aim(
        self,
        row_offsets: torch.Tensor,
        query_offsets: torch.Tensor,
        starts: torch.Tensor,
        lanes: torch.Tensor,
    ) -> None:
        self.row_offsets, self.query_offsets = row_offsets, query_offsets
        self.starts, self.lanes = starts, lanes
        self._mask = self._earlier = None

    def aim_level(self, related: torch.Tensor, starts: torch.Tensor, lanes: torch.Tensor) -> None:
        """The next call has the last rows of trees that so far have ``related [B, m, n]`` (bool:
        query row i descends from row j or is it); it is the first one when m = n."""
        batch, queries, rows = related.shape
        if queries == rows:
            self._earlier = None
        steps = torch.arange(batch + 1, dtype=torch.int32, device=related.device)
        self.row_offsets, self.query_offsets = steps * rows, steps * queries
        self.starts, self.lanes = starts, lanes
        self._mask = ancestor_words(related)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._mask is not None:
            k, v = self._with_earlier_levels(k, v)
        return _windowed_draft_attention(
            q,
            k,
            v,
            self.ring_k,
            self.ring_v,
            self.row_offsets,
            self.query_offsets,
            self.starts,
            self.lanes,
            self.spec.n_sink,
            self.spec.window,
            self.scale,
            self._mask,
        )

    def _with_earlier_levels(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.lanes.shape[0]
        k, v = k.unflatten(0, (batch, -1)), v.unflatten(0, (batch, -1))
        if self._earlier is not None:
            k, v = torch.cat((self._earlier[0], k), 1), torch.cat((self._earlier[1], v), 1)
        self._earlier = k, v
        return k.flatten(0, 1), v.flatten(0, 1)

    def append(self, k: torch.Tensor, v: torch.Tensor, start: int, lane: int) -> None:
        """Stores the surviving rows of ``k, v [n, Hkv, D]`` from position ``start``."""
        device = k.device
        _ring_append(
            k,
            v,
            self.ring_k,
            self.ring_v,
            torch.tensor((0, k.shape[0]), dtype=torch.int32, device=device),
            torch.tensor((start,), dtype=torch.int64, device=device),
            torch.tensor((lane,), dtype=torch.int32, device=device),
            self.spec.n_sink,
        )


class MtpProposer:
    """The checkpoint's MTP head: the native and the windowed arm.

    ``speculation`` must be resolved, so that its window is a number.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        speculation: MtpConfig,
        lanes: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.target, self.head, self.device = target, head, device
        self.depth, self.tree_width = speculation.depth, speculation.tree_width
        self.rows = speculation.rows
        kv = target.config.caches.draft
        self.spec = ring_of(speculation)
        self.pool = LanePool(lanes)
        self.attend = RingAttend(self.spec, lanes, kv, dtype, device)
        self.bytes_per_token = kv.bytes_per_token(dtype)
        self.lane_bytes = self.spec.capacity * self.bytes_per_token
        self._one_row_each = torch.arange(lanes + 1, dtype=torch.int32, device=device)
        self._extend_timer = ExtendTimer(device)

    def can_acquire(self) -> bool:
        return self.pool.can_acquire()

    @property
    def lanes_used(self) -> int:
        return self.pool.n_lanes - self.pool.n_free

    def acquire(self, request: Request) -> None:
        request.lane = self.pool.acquire()

    def release(self, request: Request) -> None:
        if request.lane is not None:
            self.pool.release(request.lane)
            request.lane = None

    def rows_read(self, prompt_length: int) -> tuple[int, int]:
        # Rows 0 .. length - 2 are stored in prefill, and only these survive in the ring; the last
        # row waits for the first output token.
        tail = prompt_length - 1 - (self.spec.capacity - self.spec.n_sink)
        return self.spec.n_sink, max(tail, 0)

    def store(self, request: Request, start: int, hidden: torch.Tensor) -> None:
        context = request.context_ids
        stop = min(start + hidden.shape[0], len(context) - 1)
        if stop <= start or request.lane is None:
            return
        self.pool.extend(request.lane, stop - self.pool.length(request.lane))
        following = torch.tensor(context[start + 1 : stop + 1], device=self.device)
        positions = torch.arange(start, stop, dtype=torch.int64, device=self.device)
        embedding = self.head.embed(self.target, following)
        k, v = self.head.store(embedding, hidden[: stop - start], positions)
        self.attend.append(k, v, start, request.lane.index)
        request.metrics.prefill_draft_rows += stop - start

    def copy_ring(self, request: Request, rows: int) -> tuple[torch.Tensor, ...]:
        if request.lane is None:
            return ()
        # Slots of rows yet to come are not copied; until the ring is full these are the last ones.
        lane, filled = request.lane.index, min(rows, self.spec.capacity)
        return tuple(
            ring[lane, :filled].clone() for ring in (self.attend.ring_k, self.attend.ring_v)
        )

    def paste_ring(self, request: Request, ring: tuple[torch.Tensor, ...], rows: int) -> None:
        if request.lane is None:
            return
        for whole, filled in zip((self.attend.ring_k, self.attend.ring_v), ring, strict=True):
            whole[request.lane.index, : len(filled)] = filled
        self.pool.extend(request.lane, rows)

    def settle(self, request: Request) -> torch.Tensor:
        if request.draft_hidden is None or request.lane is None:
            raise RuntimeError("a request decodes before its prefill is done")
        count = len(request.draft_tokens) - 1
        if count > 0:
            start = request.kv_length - count - 1
            positions = torch.arange(start, start + count, device=self.device)
            ids = torch.tensor(request.draft_tokens[:count], device=self.device)
            k, v = self.head.store(
                self.head.embed(self.target, ids), request.draft_hidden[:count], positions
            )
            self.attend.append(k, v, start, request.lane.index)
            self.pool.extend(request.lane, start + count - self.pool.length(request.lane))
            request.draft_tokens = request.draft_tokens[count:]
            request.draft_hidden = request.draft_hidden[count:].clone()
        return request.draft_hidden

    def propose(self, requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        if draft_len == 0:
            for request in requests:
                if len(request.draft_tokens) > MOST_ROWS_WAITING:
                    self.settle(request)
            return Drafts(torch.empty(len(requests), 0, dtype=torch.int64, device=self.device))
        self._extend_timer.begin()
        lanes = torch.tensor(
            [request.lane.index for request in requests if request.lane is not None],
            dtype=torch.int32,
            device=self.device,
        )
        hidden = self._extend(requests, lanes)
        positions = self._lengths(requests)
        if self.tree_width > 1:
            return self._tree(hidden, positions, lanes, draft_len, sampler)
        return self._chain(hidden, positions, lanes, draft_len, sampler)

    def keep(self, request: Request, tokens: list[int], hidden: torch.Tensor) -> None:
        if request.draft_fed or request.draft_hidden is None:
            request.draft_tokens, request.draft_hidden = tokens, hidden
        else:
            request.draft_tokens = request.draft_tokens + tokens
            request.draft_hidden = torch.cat((request.draft_hidden, hidden))
        request.draft_fed = False

    def _chain(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        lanes: torch.Tensor,
        draft_len: int,
        sampler: StepSampler,
    ) -> Drafts:
        each = self._one_row_each[: len(lanes) + 1]
        draft = sampler.draft(self.head.logits(self.target, hidden))
        self._extend_timer.end()
        drafts = [draft]
        for _ in range(draft_len - 1):
            self.attend.aim(each, each, positions, lanes)
            hidden = self.head(self.head.embed(self.target, draft), hidden, positions, self.attend)
            draft = sampler.draft(self.head.logits(self.target, hidden))
            drafts.append(draft)
            positions = positions + 1
        return Drafts(torch.stack(drafts, dim=1), None, self._extend_timer.seconds)

    def _tree(
        self,
        hidden: torch.Tensor,
        starts: torch.Tensor,
        lanes: torch.Tensor,
        draft_len: int,
        sampler: StepSampler,
    ) -> Drafts:
        """Level by level, the ``tree_width`` likeliest continuations of the level before.

        Likelihoods are those of whole paths, so a level may all descend from one row.
        """
        batch, width = hidden.shape[0], self.tree_width
        request = torch.arange(batch, device=self.device)[:, None]
        shape = TreeShape(width, draft_len + 1)
        parents = torch.zeros(batch, shape.rows, dtype=torch.int64, device=self.device)
        tokens = torch.zeros_like(parents)
        tokens[:, shape.level(1)], scores = sampler.candidates(
            self.head.logits(self.target, hidden), width
        )
        self._extend_timer.end()
        hidden = hidden.repeat_interleave(width, 0)
        for level in range(1, draft_len):
            rows = shape.level(level)
            # The drafts' own rows: the pending token's is not among them, so the root is left out.
            steps = steps_up(shape, parents)
            related = ancestors(steps)[:, rows, 1 : rows.stop]
            self.attend.aim_level(related, starts, lanes)
            hidden = self.head(
                self.head.embed(self.target, tokens[:, rows].flatten()),
                hidden,
                (starts + level - 1).repeat_interleave(width),
                self.attend,
            )
            path = steps[:, rows, :level].flip(-1).flatten(1)  # from level 1 down to each row
            ids, more = sampler.candidates(
                self.head.logits(self.target, hidden),
                width,
                tokens.gather(1, path).view(batch * width, level),
            )
            paths = scores.unsqueeze(-1) + more.view(batch, width, width)
            scores, best = paths.flatten(1).topk(width)
            chosen = best // width
            following = shape.level(level + 1)
            parents[:, following] = rows.start + chosen
            tokens[:, following] = ids.view(batch, -1).gather(1, best)
            hidden = hidden.view(batch, width, -1)[request, chosen].flatten(0, 1)
        return Drafts(tokens[:, 1:], parents, self._extend_timer.seconds)

    def kv_bytes(self, request: Request) -> int:
        if request.lane is None:
            return 0
        # The accepted rows and, after them, those of all drafts but the last level's, which no one
        # fed.
        rows = self.pool.length(request.lane) + self.tree_width * (self.depth - 2)
        return min(rows, self.spec.capacity) * self.bytes_per_token

    def fill_random(self, request: Request, tokens: int, generator: torch.Generator) -> None:
        if request.lane is None:
            return
        self.pool.extend(request.lane, tokens)
        filled = min(tokens, self.spec.capacity)
        for ring in (self.attend.ring_k, self.attend.ring_v):
            ring[request.lane.index, :filled].uniform_(-1, 1, generator=generator)

    def _lengths(self, requests: Sequence[Request]) -> torch.Tensor:
        lengths = [request.kv_length for request in requests]
        return torch.tensor(lengths, dtype=torch.int64, device=self.device)

    def _extend(self, requests: Sequence[Request], lanes: torch.Tensor) -> torch.Tensor:
        """Feeds every request's accepted rows, in one ragged call; output of each one's last.

        They end at the request's length whatever was fed before, so it may be done again.
        """
        tokens: list[int] = []
        positions: list[int] = []
        offsets, starts, hidden = [0], [], []
        for request in requests:
            if request.draft_hidden is None:
                raise RuntimeError("a request decodes before its prefill is done")
            count = len(request.draft_tokens)
            start = request.kv_length - count
            tokens += request.draft_tokens
            positions += range(start, start + count)
            starts.append(start)
            offsets.append(offsets[-1] + count)
            hidden.append(request.draft_hidden)
        device = self.device
        row_offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
        starts_tensor = torch.tensor(starts, dtype=torch.int64, device=device)
        each = self._one_row_each[: len(requests) + 1]
        self.attend.aim(row_offsets, each, starts_tensor, lanes)
        last_rows = None
        if len(tokens) > len(requests):
            last_rows = torch.tensor([offset - 1 for offset in offsets[1:]], device=device)
        output = self.head(
            self.head.embed(self.target, torch.tensor(tokens, device=device)),
            hidden[0] if len(hidden) == 1 else torch.cat(hidden),
            torch.tensor(positions, dtype=torch.int64, device=device),
            self.attend,
            last_rows,
        )
        for request in requests:
            request.draft_fed = True
            if request.lane is not None:
                # Only accepted rows count: the drafts' own rows after them will be overwritten.
                self.pool.extend(request.lane, request.kv_length - self.pool.length(request.lane))
        return output
