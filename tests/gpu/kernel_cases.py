"""Random cases of the CUDA kernels and their float64 reference.

The reference keeps every position's key and value in a dictionary and knows nothing of rings,
pages, splits or tiles. The cases run on whatever device the operators were built for: a GPU here,
the host emulator in ``tests/unit``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Weights are rounded to the rows' type before they meet the values, and so is the output; each
# rounding is half a unit in the last place of numbers around one.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One call: request b appends ``rows[b]`` rows from ``starts[b]``, and the last ``queries[b]``
    of them are answered. ``tree`` draws a random ancestor mask."""

    starts: tuple[int, ...]
    rows: tuple[int, ...]
    queries: tuple[int, ...]
    n_sink: int = 4
    window: int = 40
    spare: int = 8
    n_query_heads: int = 8
    n_kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    tree: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    seed: int = 0

    @property
    def capacity(self) -> int:
        return self.n_sink + self.window + self.spare

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.dtype if self.kv_dtype is None else self.kv_dtype


def offsets_of(counts: Sequence[int], device: str) -> torch.Tensor:
    sums = np.concatenate(([0], np.cumsum(counts)))
    return torch.tensor(sums.astype(np.int32), device=device)


def stored(rows: torch.Tensor, dtype: torch.dtype, scale: float) -> np.ndarray:
    """What a cache of ``dtype`` gives back for ``rows``, in float64."""
    scaled = rows.float() / scale
    if dtype == E4M3:
        scaled = scaled.clamp(-448, 448)
    return scaled.to(dtype).float().double().numpy() * scale


def random_tree(rows: int, generator: np.random.Generator) -> np.ndarray:
    """``[rows, rows]`` bool: row i descends from, or is, row j. Row 0 is the root."""
    ancestors = np.eye(rows, dtype=bool)
    for row in range(1, rows):
        ancestors[row] |= ancestors[generator.integers(0, row)]
    return ancestors


def mask_words(ancestors: np.ndarray, words: int) -> np.ndarray:
    """Bits of one query row as int32 words."""
    out = np.zeros(words, dtype=np.uint32)
    for index in np.flatnonzero(ancestors):
        out[index // 32] |= np.uint32(1) << np.uint32(index % 32)
    return out.view(np.int32)


def attend(
    q: np.ndarray, history: dict[int, tuple[np.ndarray, np.ndarray]], seen: list[int], scale: float
) -> np.ndarray:
    """``q [Hq, D]`` over the keys and values ``[Hkv, D]`` of the positions in ``seen``."""
    keys = np.stack([history[p][0] for p in seen])
    values = np.stack([history[p][1] for p in seen])
    group = q.shape[0] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("hd,phd->hp", q, keys) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("hp,phd->hd", weights, values)


def seen_positions(case: Case, start: int, query: int, ancestors: np.ndarray | None) -> list[int]:
    """By the definition: sinks and window; among a tree's own rows its ancestors only."""
    window = [p for p in range(max(0, query - case.window + 1), query + 1) if p >= case.n_sink]
    by_rule = list(range(min(case.n_sink, query + 1))) + window
    if ancestors is None:
        return by_rule
    own = [start + int(i) for i in np.flatnonzero(ancestors)]
    return [p for p in by_rule if p < start] + own


class WindowedRun:
    """A case with its tensors on the device and its reference."""

    def __init__(self, ops: Any, case: Case):
        self.ops, self.case = ops, case
        device, batch = ops.device_type, len(case.starts)
        torch.manual_seed(case.seed)
        generator = np.random.default_rng(case.seed)
        lanes = generator.permutation(batch + 2)[:batch].astype(np.int32)
        shape = (batch + 2, case.capacity, case.n_kv_heads, case.head_dim)
        # A cell that was never written must never be read: NaN would spread.
        self.ring_k = torch.full(shape, math.nan).to(case.cache_dtype).to(device)
        self.ring_v = self.ring_k.clone()
        self.lanes = torch.tensor(lanes, device=device)
        self.scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
        self.scale = case.head_dim**-0.5
        self.history: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{} for _ in case.starts]
        for b, start in enumerate(case.starts):
            self._fill(b, start)
        self._rows(device)
        self.masks: list[np.ndarray] | None = None
        self.ancestor_mask: torch.Tensor | None = None
        if case.tree:
            words = -(-max(case.rows) // 32)
            trees = [random_tree(n, generator) for n in case.rows]
            self.masks = [
                tree[n - m :] for tree, n, m in zip(trees, case.rows, case.queries, strict=True)
            ]
            rows = [mask_words(row, words) for mask in self.masks for row in mask]
            self.ancestor_mask = torch.tensor(np.stack(rows), device=device)

    def _random(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (n, self.case.n_kv_heads, self.case.head_dim)
        return (
            torch.randn(shape).to(self.case.dtype),
            torch.randn(shape).to(self.case.dtype),
        )

    def _remember(self, b: int, position: int, k: torch.Tensor, v: torch.Tensor) -> None:
        dtype = self.case.cache_dtype
        for i in range(k.shape[0]):
            self.history[b][position + i] = (
                stored(k[i], dtype, self.case.k_scale),
                stored(v[i], dtype, self.case.v_scale),
            )

    def _fill(self, b: int, start: int) -> None:
        """What earlier steps left in the ring: the sinks, and the last positions before start."""
        case, device = self.case, self.ops.device_type
        tail = max(0, start - case.window - 3)
        for begin, end in ((0, min(case.n_sink, start)), (tail, start)):
            if begin >= end:
                continue
            k, v = self._random(end - begin)
            self.ops.ring_append(
                k.to(device),
                v.to(device),
                self.ring_k,
                self.ring_v,
                offsets_of([end - begin], device),
                torch.tensor([begin], device=device),
                self.lanes[b : b + 1],
                case.n_sink,
                **self.scales,
            )
            self._remember(b, begin, k, v)

    def _rows(self, device: str) -> None:
        case = self.case
        k, v = self._random(sum(case.rows))
        first = 0
        for b, (start, n) in enumerate(zip(case.starts, case.rows, strict=True)):
            self._remember(b, start, k[first : first + n], v[first : first + n])
            first += n
        q = torch.randn(sum(case.queries), case.n_query_heads, case.head_dim).to(case.dtype)
        self.k, self.v, self.q = k.to(device), v.to(device), q.to(device)
        self.row_offsets = offsets_of(case.rows, device)
        self.query_offsets = offsets_of(case.queries, device)
        self.starts = torch.tensor(case.starts, dtype=torch.int64, device=device)

    def __call__(self, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.ops.windowed_draft_attention(
            self.q,
            self.k,
            self.v,
            self.ring_k,
            self.ring_v,
            self.row_offsets,
            self.query_offsets,
            self.starts,
            self.lanes,
            self.case.n_sink,
            self.case.window,
            self.scale,
            self.ancestor_mask,
            out=out,
            **self.scales,
        )

    def reference(self) -> np.ndarray:
        case = self.case
        q = self.q.cpu().float().double().numpy()
        rows = []
        for b, (start, n, m) in enumerate(zip(case.starts, case.rows, case.queries, strict=True)):
            for i in range(m):
                ancestors = None if self.masks is None else self.masks[b][i]
                position = start + n - m + i
                if ancestors is not None:
                    position = start + int(ancestors.sum()) - 1
                seen = seen_positions(case, start, position, ancestors)
                rows.append(attend(q[len(rows)], self.history[b], seen, self.scale))
        return np.stack(rows)


def check_windowed(ops: Any, case: Case) -> None:
    """The operator answers as the reference does, into an output that was NaN."""
    run = WindowedRun(ops, case)
    poisoned = torch.full_like(run.q, math.nan)
    out = run(poisoned).cpu().float().double().numpy()
    expected = run.reference()
    assert np.isfinite(out).all(), f"{case}: output was not written, or an unused cell was read"
    error = np.abs(out - expected).max()
    # Values reach a few units: the reference's own size sets what a rounding is worth.
    allowed = TOLERANCE[case.dtype] * max(1.0, float(np.abs(expected).max()))
    assert error <= allowed, f"{case}: error {error} > {allowed}"


def check_append_writes_only_survivors(ops: Any, case: Case) -> None:
    """After the call every cell holds what the newest row with that slot left, bit for bit, and the
    others are untouched."""
    run = WindowedRun(ops, case)
    before = run.ring_k.cpu().float()
    run()
    after = run.ring_k.cpu().float()
    owner: dict[tuple[int, int], tuple[int, int]] = {}
    ring = case.capacity - case.n_sink
    for b, (start, n) in enumerate(zip(case.starts, case.rows, strict=True)):
        lane = int(run.lanes[b])
        for position in range(start, start + n):
            slot = position
            while slot >= case.capacity:
                slot -= ring
            owner[lane, slot] = (b, position)
    for lane in range(after.shape[0]):
        for slot in range(case.capacity):
            if (lane, slot) not in owner:
                assert torch.equal(
                    after[lane, slot].nan_to_num(7), before[lane, slot].nan_to_num(7)
                )
                continue
            b, position = owner[lane, slot]
            expected = run.history[b][position][0] / case.k_scale
            assert np.array_equal(after[lane, slot].double().numpy(), expected), (lane, slot)


def check_full_attention(
    ops: Any,
    lengths: Sequence[int],
    rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 64,
    page_size: int = 16,
    tree: bool = False,
    seed: int = 0,
) -> None:
    """A verify: ``rows`` rows after ``lengths[b]`` cached ones, through shuffled pages. ``tree``
    draws a random ancestor mask."""
    device, batch = ops.device_type, len(lengths)
    cache = dtype if kv_dtype is None else kv_dtype
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    max_pages = -(-(max(lengths) + rows) // page_size)
    table = generator.permutation(batch * max_pages).reshape(batch, max_pages).astype(np.int32)
    block_table = torch.tensor(table, device=device)
    shape = (batch * max_pages, page_size, heads[1], head_dim)
    k_pages = torch.full(shape, math.nan).to(cache).to(device)
    v_pages = k_pages.clone()
    history: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{} for _ in lengths]

    def append(starts: Sequence[int], counts: Sequence[int]) -> None:
        total = sum(counts)
        k = torch.randn(total, heads[1], head_dim).to(dtype)
        v = torch.randn(total, heads[1], head_dim).to(dtype)
        ops.paged_append(
            k.to(device),
            v.to(device),
            k_pages,
            v_pages,
            block_table,
            offsets_of(counts, device),
            torch.tensor(list(starts), dtype=torch.int64, device=device),
        )
        first = 0
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for i in range(count):
                at = first + i
                history[b][start + i] = (stored(k[at], cache, 1.0), stored(v[at], cache, 1.0))
            first += count

    append([0] * batch, lengths)
    append(lengths, [rows] * batch)
    q = torch.randn(batch * rows, heads[0], head_dim).to(dtype)
    positions = [length + i for length in lengths for i in range(rows)]
    seen = [list(range(position + 1)) for position in positions]
    trees: dict[str, torch.Tensor] = {}
    if tree:
        masks = [random_tree(rows, generator) for _ in lengths]
        words = [mask_words(row, -(-rows // 32)) for mask in masks for row in mask]
        starts = torch.tensor(list(lengths), dtype=torch.int64, device=device)
        trees = {
            "ancestor_mask": torch.tensor(np.stack(words), device=device),
            "tree_starts": starts,
        }
        seen = [
            [*range(length), *(length + int(i) for i in np.flatnonzero(row))]
            for length, mask in zip(lengths, masks, strict=True)
            for row in mask
        ]
        positions = [0] * len(positions)  # not looked at
    out = ops.full_attention(
        q.to(device),
        k_pages,
        v_pages,
        block_table,
        offsets_of([rows] * batch, device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        head_dim**-0.5,
        **trees,
        out=torch.full_like(q, math.nan).to(device),
    )
    result = out.cpu().float().double().numpy()
    queries = q.float().double().numpy()
    expected = np.stack(
        [
            attend(queries[i], history[i // rows], visible, head_dim**-0.5)
            for i, visible in enumerate(seen)
        ]
    )
    allowed = TOLERANCE[dtype] * max(1.0, float(np.abs(expected).max()))
    assert np.isfinite(result).all()
    assert np.abs(result - expected).max() <= allowed


def check_gated_delta(
    ops: Any, batch: int, rows: int, heads: tuple[int, int], dims: tuple[int, int], seed: int = 0
) -> None:
    """Rows against the recurrence in float64; a commit of every count is the state of that row."""
    device, slots = ops.device_type, batch + 2
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    torch.manual_seed(seed)
    q, k = (torch.randn(batch, rows, key_heads, key_dim) for _ in range(2))
    v = torch.randn(batch, rows, value_heads, value_dim)
    g = -torch.rand(batch, rows, value_heads)
    beta = torch.rand(batch, rows, value_heads)
    state = torch.randn(slots, value_heads, key_dim, value_dim)
    owned = torch.randperm(slots)[:batch].to(torch.int32)
    moved = [tensor.to(device) for tensor in (q, k, v, g, beta, state, owned)]
    out, delta = ops.gated_delta_rows(*moved)
    assert torch.equal(moved[5].cpu(), state), "rows must leave the state as it was"

    def unit(rows_of_head: np.ndarray) -> np.ndarray:
        return rows_of_head / np.sqrt((rows_of_head**2).sum(-1, keepdims=True) + 1e-6)

    queries = unit(q.double().numpy()) / math.sqrt(key_dim)
    keys = unit(k.double().numpy())
    states = np.zeros((batch, rows + 1, value_heads, key_dim, value_dim))
    answers = np.zeros((batch, rows, value_heads, value_dim))
    for b in range(batch):
        states[b, 0] = state[int(owned[b])].double().numpy()
        for t in range(rows):
            for h in range(value_heads):
                key, query = (x[b, t, h * key_heads // value_heads] for x in (keys, queries))
                decayed = states[b, t, h] * math.exp(float(g[b, t, h]))
                change = float(beta[b, t, h]) * (v[b, t, h].double().numpy() - decayed.T @ key)
                states[b, t + 1, h] = decayed + np.outer(key, change)
                answers[b, t, h] = states[b, t + 1, h].T @ query
    assert np.abs(out.cpu().double().numpy() - answers).max() < 2e-4
    for count in range(rows + 1):
        committed = moved[5].clone()
        counts = torch.full((batch,), count, dtype=torch.int32, device=device)
        ops.gated_delta_commit(moved[1], moved[3], delta, committed, moved[6], counts)
        result = committed.cpu()
        for b in range(batch):
            slot = int(owned[b])
            assert np.abs(result[slot].double().numpy() - states[b, count]).max() < 2e-4
        others = [slot for slot in range(slots) if slot not in owned.tolist()]
        assert torch.equal(result[others], state[others])


def boundary_starts(n_sink: int, window: int, spare: int) -> list[int]:
    """Positions at, before and after everything that changes the shape of the visible set."""
    capacity, ring = n_sink + window + spare, window + spare
    edges = {n_sink, window, n_sink + window, capacity, capacity + ring, n_sink + 7 * ring, 100_003}
    return sorted({max(0, edge + change) for edge in edges for change in (-1, 0, 1)})
