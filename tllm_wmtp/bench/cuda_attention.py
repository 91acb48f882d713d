"""Times of the CUDA draft attention: CUDA events around graph replays over buffers that no cache
holds. Imports torch and :mod:`tllm_wmtp.ops.cuda` only, so it runs where nothing else is installed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Setup:
    """What is measured. The defaults are the published ones; tests use smaller numbers."""

    n_sink: int = 4
    window: int = 4092
    spare: int = 8
    n_query_heads: int = 16
    n_kv_heads: int = 2
    head_dims: tuple[int, ...] = (256, 128)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    native_contexts: tuple[int, ...] = (1 << 16, 1 << 18, 1 << 20)
    position: int = 100_003
    rotate_bytes: int = 512 << 20  # more than any L2
    copy_bytes: int = 2 << 30
    runs: int = 20
    seconds: float = 150.0
    kv_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, E4M3)

    @property
    def keys(self) -> int:
        return self.n_sink + self.window

    def name(self) -> str:
        """A hash of everything here: part of the result's file name."""
        text = json.dumps(dataclasses.asdict(self), default=str, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median and the middle 95 % of ``runs`` replays."""

    us: float
    low_us: float
    high_us: float
    runs: int


def summary(times_us: Sequence[float]) -> Timing:
    ordered = sorted(times_us)
    cut = int(len(ordered) * 0.025)
    return Timing(
        statistics.median(ordered), ordered[cut], ordered[len(ordered) - 1 - cut], len(ordered)
    )


def time_calls(calls: Sequence[Call], device: str, runs: int) -> Timing:
    """Time of one of ``calls``, which are equal but for their buffers, all captured in one graph.

    On a host device, where there are no graphs, they are timed one after the other.
    """
    if device != "cuda":
        times = []
        for _ in range(runs):
            begin = time.perf_counter()
            for call in calls:
                call()
            times.append((time.perf_counter() - begin) * 1e6 / len(calls))
        return summary(times)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return summary([a.elapsed_time(b) * 1e3 / len(calls) for a, b in itertools.pairwise(events)])


def copies(total_bytes: int, rotate_bytes: int, device: str) -> list[Call]:
    """Device copies that move ``total_bytes`` each, half of them reads."""
    half = max(total_bytes // 2, 16)
    count = max(2, min(64, -(-rotate_bytes // (2 * half))))
    sources = [torch.zeros(half, dtype=torch.uint8, device=device) for _ in range(count)]
    targets = [torch.empty_like(source) for source in sources]

    def copy(i: int) -> Call:
        return lambda: targets[i].copy_(sources[i])

    return [copy(i) for i in range(count)]


class Attention:
    """Rings of one batch, as many as it takes to be larger than the L2 cache, and calls on them."""

    def __init__(
        self,
        ops: Any,
        setup: Setup,
        batch: int,
        head_dim: int,
        kv_dtype: torch.dtype,
        window: int | None = None,
    ):
        native = window is not None
        self.window = setup.window if window is None else window
        self.n_sink = 0 if native else setup.n_sink
        self.ops, self.setup, self.batch, self.head_dim = ops, setup, batch, head_dim
        self.kv_dtype, device = kv_dtype, ops.device_type
        heads = setup.n_kv_heads
        capacity = self.n_sink + self.window + setup.spare
        element = torch.empty(0, dtype=kv_dtype).element_size()
        self.keys = self.n_sink + self.window
        cache_bytes = 2 * batch * self.keys * heads * head_dim * element
        row_bytes = 2 * batch * (2 * setup.n_query_heads + 2 * heads) * head_dim
        self.bytes = cache_bytes + row_bytes
        self.count = max(2, min(64, -(-setup.rotate_bytes // cache_bytes)))
        shape = (self.count * batch, capacity, heads, head_dim)
        self.ring_k, self.ring_v = (self._random(shape, kv_dtype, device) for _ in range(2))
        rows = (batch, heads, head_dim)
        self.k, self.v = (self._random(rows, torch.bfloat16, device) for _ in range(2))
        self.q = self._random((batch, setup.n_query_heads, head_dim), torch.bfloat16, device)
        self.offsets = torch.arange(batch + 1, dtype=torch.int32, device=device)
        position = self.window if native else setup.position
        self.starts = torch.full((batch,), position, dtype=torch.int64, device=device)
        lanes = torch.arange(self.count * batch, dtype=torch.int32, device=device)
        self.lanes = lanes.view(self.count, batch)
        self.out = torch.empty_like(self.q)

    @staticmethod
    def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return tensor.uniform_(-1, 1).to(dtype)

    def ours(self) -> list[Call]:
        def call(i: int) -> Call:
            return lambda: self.ops.windowed_draft_attention(
                self.q,
                self.k,
                self.v,
                self.ring_k,
                self.ring_v,
                self.offsets,
                self.offsets,
                self.starts,
                self.lanes[i],
                self.n_sink,
                self.window,
                self.head_dim**-0.5,
                out=self.out,
            )

        return [call(i) for i in range(self.count)]

    def _gathered(self, ring: torch.Tensor) -> torch.Tensor:
        """``[count, batch, Hkv, keys, D]``: the gather itself is not timed."""
        rows = ring[:, : self.keys].transpose(1, 2).contiguous()
        return rows.view(self.count, self.batch, *rows.shape[1:])

    def sdpa(self) -> list[Call]:
        """torch's attention over the same number of keys, already gathered."""
        keys, values = self._gathered(self.ring_k), self._gathered(self.ring_v)
        query = self.q.unsqueeze(2)

        def call(i: int) -> Call:
            return lambda: torch.nn.functional.scaled_dot_product_attention(
                query, keys[i], values[i], enable_gqa=True
            )

        return [call(i) for i in range(self.count)]

    def flashinfer(self) -> list[Call]:
        """FlashInfer's paged decode over the same number of keys.

        Raises:
            ImportError: it is not installed.
        """
        flashinfer = importlib.import_module("flashinfer")

        page = 16
        pages = self.keys // page
        device = self.ops.device_type
        shape = (self.count, self.batch * pages, page, self.setup.n_kv_heads, self.head_dim)
        keys = self._random(shape, self.kv_dtype, device)
        values = self._random(shape, self.kv_dtype, device)
        space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD")
        wrapper.plan(
            torch.arange(self.batch + 1, dtype=torch.int32, device=device) * pages,
            torch.arange(self.batch * pages, dtype=torch.int32, device=device),
            torch.full((self.batch,), page, dtype=torch.int32, device=device),
            self.setup.n_query_heads,
            self.setup.n_kv_heads,
            self.head_dim,
            page,
            q_data_type=torch.bfloat16,
            kv_data_type=self.kv_dtype,
        )

        def call(i: int) -> Call:
            return lambda: wrapper.run(self.q, (keys[i], values[i]))

        return [call(i) for i in range(self.count)]


def measure(ops: Any, setup: Setup, log: Callable[[str], None] = print) -> dict[str, Any]:
    """All rows, and what could not be measured with the reason.

    Every row has bytes, microseconds with their interval, TB/s, the floor (the same bytes at the
    measured copy bandwidth) and the fraction of that bandwidth.
    """
    device = ops.device_type
    deadline = time.monotonic() + setup.seconds
    rows: list[dict[str, Any]] = []
    missing: list[dict[str, str]] = []
    large = time_calls(copies(setup.copy_bytes, 0, device), device, setup.runs)
    bandwidth = setup.copy_bytes / large.us / 1e6  # TB/s

    def add(what: str, labels: dict[str, Any], moved: int, calls: Callable[[], list[Call]]) -> None:
        if time.monotonic() > deadline:
            missing.append({"what": what, **labels, "reason": f"{setup.seconds} s were over"})
            return
        try:
            timing = time_calls(calls(), device, setup.runs)
        except (ImportError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            first_line = (str(error) or "?").splitlines()[0]
            missing.append(
                {"what": what, **labels, "reason": f"{type(error).__name__}: {first_line}"}
            )
            return
        speed = moved / timing.us / 1e6
        rows.append(
            {
                "what": what,
                **labels,
                "bytes": moved,
                "us": timing.us,
                "us_low": timing.low_us,
                "us_high": timing.high_us,
                "runs": timing.runs,
                "tb_per_s": speed,
                "floor_us": moved / bandwidth / 1e6,
                "of_copy_bandwidth": speed / bandwidth,
            }
        )
        log(f"{what:10} {labels} {timing.us:9.2f} us {speed:6.3f} TB/s {speed / bandwidth:6.1%}")

    for head_dim in setup.head_dims:
        for kv_dtype in setup.kv_dtypes:
            for batch in setup.batches:
                attention = Attention(ops, setup, batch, head_dim, kv_dtype)
                labels = {
                    "arm": "windowed",
                    "batch": batch,
                    "head_dim": head_dim,
                    "kv_heads": setup.n_kv_heads,
                    "query_heads": setup.n_query_heads,
                    "keys": attention.keys,
                    "kv_dtype": str(kv_dtype).removeprefix("torch."),
                }
                moved = attention.bytes
                add("ours", labels, moved, attention.ours)
                add("sdpa", labels, moved, attention.sdpa)
                add("flashinfer", labels, moved, attention.flashinfer)
                add("copy", labels, moved, lambda n=moved: copies(n, setup.rotate_bytes, device))  # type: ignore[misc]
                del attention
    for context in setup.native_contexts:
        for kv_dtype in setup.kv_dtypes:
            head_dim = setup.head_dims[0]
            attention = Attention(ops, setup, 1, head_dim, kv_dtype, window=context)
            labels = {
                "arm": "native",
                "batch": 1,
                "head_dim": head_dim,
                "kv_heads": setup.n_kv_heads,
                "query_heads": setup.n_query_heads,
                "keys": context,
                "kv_dtype": str(kv_dtype).removeprefix("torch."),
            }
            add("ours", labels, attention.bytes, attention.ours)
            del attention
    return {
        "setup": json.loads(json.dumps(dataclasses.asdict(setup), default=str)),
        "setup_hash": setup.name(),
        "copy_tb_per_s": bandwidth,
        "rows": rows,
        "missing": missing,
    }


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The three goals on one H200, each with what was measured (bfloat16, the first head size)."""
    out = []
    for batch, column, limit, at_most in (
        (1, "us", 10.0, True),
        (16, "of_copy_bandwidth", 0.75, False),
        (64, "of_copy_bandwidth", 0.85, False),
    ):
        for row in rows:
            if (row["what"], row["arm"], row["batch"]) != ("ours", "windowed", batch):
                continue
            value = row[column]
            out.append(
                {
                    "batch": batch,
                    "head_dim": row["head_dim"],
                    "kv_dtype": row["kv_dtype"],
                    "quantity": column,
                    "goal": limit,
                    "measured": value,
                    "met": value <= limit if at_most else value >= limit,
                }
            )
    return out
