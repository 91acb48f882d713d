"""Full attention over a long cache on the CPU, against PyTorch's SDPA in both of its layouts.

What is timed: few query rows (one: a draft or plain decode step; seven: a verify) over many cached
keys. SDPA is given every advantage: its own cache, contiguous per head, and no mask. Seven verify
rows strictly need a causal mask among their last seven keys, and a mask would move SDPA to a slower
path. Its two layouts are ``gqa`` (``enable_gqa=True``) and ``fold`` (the query heads of a group
folded into rows).

Each time comes with its floor: the bytes of the cache over the read bandwidth measured in the same
run. Contestants are timed in turn within each repetition, so that a disturbance hits all of them;
ratios are medians of paired ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from tllm_wmtp import ops
from tllm_wmtp.machine import StreamingRead

CONTEXTS = (65536, 262144, 1048576)
HEAD_DIMS = (64, 128)
ROWS = (1, 7)
DTYPES = (torch.float32, torch.bfloat16)
N_KV_HEADS = 2
GROUP = 4

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _huge(tensor: torch.Tensor) -> torch.Tensor:
    ops.advise_huge_pages(tensor)
    return tensor


class _Case:
    """One shape: the tensors and the three contestants."""

    def __init__(self, context: int, head_dim: int, n_rows: int, dtype: torch.dtype) -> None:
        self.context, self.head_dim, self.n_rows, self.dtype = context, head_dim, n_rows, dtype
        n_heads = N_KV_HEADS * GROUP
        self.scale = head_dim**-0.5
        # Several caches in turn where one would stay in the last-level cache.
        n_copies = max(1, -(-(256 << 20) // self.bytes_moved))
        self.caches = [self._cache() for _ in range(n_copies)]
        self.head_caches = [
            tuple(
                _huge(torch.empty(self._head_shape, dtype=dtype)).copy_(x.transpose(1, 2))
                for x in kv
            )
            for kv in self.caches
        ]
        self.turn = 0
        self.q = torch.randn(n_rows, n_heads, head_dim).to(dtype)
        heads = self.q.reshape(n_rows, N_KV_HEADS, GROUP, head_dim)
        self.q_gqa = self.q.transpose(0, 1).unsqueeze(0).contiguous()
        self.q_fold = (
            heads.permute(1, 0, 2, 3).reshape(1, N_KV_HEADS, n_rows * GROUP, head_dim).contiguous()
        )
        self.table = torch.zeros(1, 1, dtype=torch.int32)
        self.offsets = torch.tensor([0, n_rows], dtype=torch.int32)
        self.positions = torch.arange(context - n_rows, context)

    @property
    def bytes_moved(self) -> int:
        return 2 * self.context * N_KV_HEADS * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        return 4 * self.context * self.n_rows * N_KV_HEADS * GROUP * self.head_dim

    @property
    def _head_shape(self) -> tuple[int, int, int, int]:
        return (1, N_KV_HEADS, self.context, self.head_dim)

    def _cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (1, self.context, N_KV_HEADS, self.head_dim)
        k, v = (_huge(torch.empty(shape, dtype=self.dtype)) for _ in range(2))
        return k.normal_(), v.normal_()

    def _next_turn(self) -> int:
        self.turn = (self.turn + 1) % len(self.caches)
        return self.turn

    def ours(self) -> torch.Tensor:
        k, v = self.caches[self._next_turn()]
        out: torch.Tensor = ops.full_attention(
            self.q, k, v, self.table, self.offsets, self.positions, self.scale
        )
        return out

    def gqa(self) -> torch.Tensor:
        k, v = self.head_caches[self._next_turn()]
        return scaled_dot_product_attention(self.q_gqa, k, v, scale=self.scale, enable_gqa=True)

    def fold(self) -> torch.Tensor:
        k, v = self.head_caches[self._next_turn()]
        return scaled_dot_product_attention(self.q_fold, k, v, scale=self.scale)


def _measure(case: _Case, read: StreamingRead, n_runs: int) -> dict[str, Any]:
    contestants: dict[str, Callable[[], object]] = {
        "ours": case.ours,
        "gqa": case.gqa,
        "fold": case.fold,
        "read": read,
    }
    for call in contestants.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(n_runs):
        for name, call in contestants.items():
            times[name].append(_seconds(call))
    low, seconds, high = _quartiles(times["ours"])
    best = min(("gqa", "fold"), key=lambda name: statistics.median(times[name]))
    ratios = [sdpa / ours for sdpa, ours in zip(times[best], times["ours"], strict=True)]
    bandwidth = read.bytes_per_second(statistics.median(times["read"]))
    fractions = [
        case.bytes_moved / ours / read.bytes_per_second(stream)
        for ours, stream in zip(times["ours"], times["read"], strict=True)
    ]
    return {
        "arm": "full_attention",
        "context": case.context,
        "n_rows": case.n_rows,
        "head_dim": case.head_dim,
        "n_kv_heads": N_KV_HEADS,
        "n_query_heads": N_KV_HEADS * GROUP,
        "kv_dtype": _NAMES[case.dtype],
        "batch": 1,
        "device": "cpu",
        "isa": ops.current_isa(),
        "n_threads": torch.get_num_threads(),
        "n_runs": n_runs,
        "seconds": seconds,
        "seconds_interquartile": [low, high],
        "sdpa_gqa_seconds": statistics.median(times["gqa"]),
        "sdpa_fold_seconds": statistics.median(times["fold"]),
        "best_sdpa": best,
        "speedup_over_best_sdpa": statistics.median(ratios),
        "bytes_moved": case.bytes_moved,
        "gb_per_second": case.bytes_moved / seconds / 1e9,
        "read_bandwidth_gb_per_second": bandwidth / 1e9,
        "fraction_of_read_bandwidth": statistics.median(fractions),
        "floor_seconds": case.bytes_moved / bandwidth,
        "gflop_per_second": case.flops / seconds / 1e9,
    }


def run_attention_bench(
    contexts: Sequence[int] = CONTEXTS,
    head_dims: Sequence[int] = HEAD_DIMS,
    rows: Sequence[int] = ROWS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    n_runs: int = 9,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Time every combination; one dictionary per combination, with its floor and its interval.

    ``on_row`` is called as soon as a combination is done. ``n_runs`` must be at least 2.
    """
    if n_runs < 2:
        raise ValueError(f"n_runs {n_runs} < 2: an interval needs two runs; raise n_runs")
    read = StreamingRead()
    results = []
    for dtype in dtypes:
        for head_dim in head_dims:
            for context in contexts:
                for n_rows in rows:
                    result = _measure(_Case(context, head_dim, n_rows, dtype), read, n_runs)
                    results.append(result)
                    if on_row is not None:
                        on_row(result)
    return results


def attention_table(results: Sequence[dict[str, Any]]) -> Table:
    """The results as a table for the terminal."""
    table = Table(title="Attention over a long cache (CPU), against the best SDPA layout")
    columns = (
        "KV", "D", "keys", "rows", "ours ms", "interquartile", "gqa ms", "fold ms",
        "speed-up", "GB/s", "of read", "GFLOP/s",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for row in results:
        low, high = row["seconds_interquartile"]
        table.add_row(
            row["kv_dtype"],
            str(row["head_dim"]),
            f"{row['context'] // 1024}K",
            str(row["n_rows"]),
            f"{row['seconds'] * 1e3:.2f}",
            f"{low * 1e3:.2f}-{high * 1e3:.2f}",
            f"{row['sdpa_gqa_seconds'] * 1e3:.2f}",
            f"{row['sdpa_fold_seconds'] * 1e3:.2f}",
            f"{row['speedup_over_best_sdpa']:.2f}x",
            f"{row['gb_per_second']:.1f}",
            f"{row['fraction_of_read_bandwidth']:.0%}",
            f"{row['gflop_per_second']:.0f}",
        )
    return table


def print_attention_table(results: Sequence[dict[str, Any]]) -> None:
    """Print :func:`attention_table`."""
    Console(width=140).print(attention_table(results))
