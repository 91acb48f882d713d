"""Who proposes the drafts of a step. The target verifies them, so no choice changes the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

import tllm_wmtp.ops as ops
from tllm_wmtp.config import MtpConfig
from tllm_wmtp.executor.request import Request
from tllm_wmtp.models.spec import DraftHead, KeyValueShape, Target
from tllm_wmtp.ring import LanePool, RingSpec

_ring_append = torch.ops.wmtp.ring_append.default
_windowed_draft_attention = torch.ops.wmtp.windowed_draft_attention.default


def ring_of(speculation: MtpConfig) -> RingSpec:
    """The ring of a resolved config, whose window is a number."""
    if speculation.window is None:
        raise RuntimeError("the speculation config has not been resolved")
    return RingSpec.for_chain(speculation.n_sink, speculation.window, speculation.depth)


class Proposer(Protocol):
    """Drafts for the requests of a step; ``depth`` rows are verified per request and step."""

    depth: int

    def acquire(self, request: Request) -> None: ...

    def release(self, request: Request) -> None: ...

    def rows_read(self, prompt_length: int) -> tuple[int, int]:
        """``(sink_end, tail_begin)``: of a prompt's rows, hidden states are read at positions
        ``p < sink_end`` and ``p >= tail_begin``; always of the last one."""
        ...

    def store(self, request: Request, start: int, hidden: torch.Tensor) -> None:
        """Prefill: ``hidden [n, H]`` of consecutive prompt rows from position ``start``."""
        ...

    def propose(self, requests: Sequence[Request]) -> torch.Tensor:
        """Drafts ``[B, depth - 1]`` (int64) that follow each request's pending token."""
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

    def __init__(self, device: torch.device):
        self.device = device

    def acquire(self, request: Request) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def rows_read(self, prompt_length: int) -> tuple[int, int]:
        return 0, prompt_length - 1

    def store(self, request: Request, start: int, hidden: torch.Tensor) -> None:
        pass

    def propose(self, requests: Sequence[Request]) -> torch.Tensor:
        return torch.empty(len(requests), 0, dtype=torch.int64, device=self.device)

    def kv_bytes(self, request: Request) -> int:
        return 0

    def fill_random(self, request: Request, tokens: int, generator: torch.Generator) -> None:
        pass


class RingAttend:
    """The draft layer's keys: one ring per lane, behind the windowed attention op.

    ``aim`` names the rows of the next call; the call appends all of them and answers the last one
    of each request.
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

    def aim(
        self,
        row_offsets: torch.Tensor,
        query_offsets: torch.Tensor,
        starts: torch.Tensor,
        lanes: torch.Tensor,
    ) -> None:
        self.row_offsets, self.query_offsets = row_offsets, query_offsets
        self.starts, self.lanes = starts, lanes

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
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
            None,
        )

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
        self.depth, self.draft_len = speculation.depth, speculation.draft_len
        kv = target.config.caches.draft
        self.spec = ring_of(speculation)
        self.pool = LanePool(lanes)
        self.attend = RingAttend(self.spec, lanes, kv, dtype, device)
        self.bytes_per_token = kv.bytes_per_token(dtype)
        self._one_row_each = torch.arange(lanes + 1, dtype=torch.int32, device=device)

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
        stop = min(start + hidden.shape[0], len(request.prompt_ids) - 1)
        if stop <= start or request.lane is None:
            return
        self.pool.extend(request.lane, stop - self.pool.length(request.lane))
        following = torch.tensor(request.prompt_ids[start + 1 : stop + 1], device=self.device)
        positions = torch.arange(start, stop, dtype=torch.int64, device=self.device)
        embedding = self.head.embed(self.target, following)
        k, v = self.head.store(embedding, hidden[: stop - start], positions)
        self.attend.append(k, v, start, request.lane.index)
        request.metrics.prefill_draft_rows += stop - start

    def propose(self, requests: Sequence[Request]) -> torch.Tensor:
        batch = len(requests)
        lanes = torch.tensor(
            [request.lane.index for request in requests if request.lane is not None],
            dtype=torch.int32,
            device=self.device,
        )
        each = self._one_row_each[: batch + 1]
        hidden = self._extend(requests, lanes, each)
        draft = self.head.logits(self.target, hidden).argmax(-1)
        drafts = [draft]
        positions = self._lengths(requests)
        for _ in range(self.draft_len - 1):
            self.attend.aim(each, each, positions, lanes)
            embedding = self.head.embed(self.target, draft)
            hidden = self.head(embedding, hidden, positions, self.attend)
            draft = self.head.logits(self.target, hidden).argmax(-1)
            drafts.append(draft)
            positions = positions + 1
        return torch.stack(drafts, dim=1)

    def kv_bytes(self, request: Request) -> int:
        if request.lane is None:
            return 0
        # The accepted rows and, after them, those of all drafts but the last, which no one fed.
        rows = self.pool.length(request.lane) + self.draft_len - 1
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

    def _extend(
        self, requests: Sequence[Request], lanes: torch.Tensor, each: torch.Tensor
    ) -> torch.Tensor:
        """Feeds every request's accepted rows, in one ragged call; output of each one's last."""
        tokens: list[int] = []
        positions: list[int] = []
        offsets, starts, hidden = [0], [], []
        for request in requests:
            if request.draft_hidden is None or request.lane is None:
                raise RuntimeError("a request decodes before its prefill is done")
            count = len(request.draft_tokens)
            start = self.pool.length(request.lane)
            # Only accepted rows count: the drafts' own rows after them are overwritten from here.
            self.pool.extend(request.lane, count)
            tokens += request.draft_tokens
            positions += range(start, start + count)
            starts.append(start)
            offsets.append(offsets[-1] + count)
            hidden.append(request.draft_hidden)
        device = self.device
        row_offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
        starts_tensor = torch.tensor(starts, dtype=torch.int64, device=device)
        self.attend.aim(row_offsets, each, starts_tensor, lanes)
        last_rows = None
        if len(tokens) > len(requests):
            last_rows = torch.tensor([offset - 1 for offset in offsets[1:]], device=device)
        return self.head(
            self.head.embed(self.target, torch.tensor(tokens, device=device)),
            hidden[0] if len(hidden) == 1 else torch.cat(hidden),
            torch.tensor(positions, dtype=torch.int64, device=device),
            self.attend,
            last_rows,
        )
