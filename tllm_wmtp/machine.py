"""What the numbers were measured on: processor, threads, and how fast it reads memory."""

from __future__ import annotations

import platform
import statistics
from datetime import datetime, timezone
from time import perf_counter
from typing import Any

import torch

import tllm_wmtp.ops as ops
from tllm_wmtp import _core


def describe() -> dict[str, Any]:
    """Day (UTC), ``device``, processor name, threads and instruction set in use."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": "cpu",
        "processor": _processor_name(),
        "threads": torch.get_num_threads(),
        "isa": ops.current_isa(),
    }


class StreamingRead:
    """A call reads a buffer once with all threads. The buffer is far larger than any cache, so this
    is memory, not cache."""

    def __init__(self, megabytes: int = 512) -> None:
        self._buffer = torch.empty(megabytes << 18, dtype=torch.float32)
        ops.advise_huge_pages(self._buffer)
        self._buffer.fill_(1.0)

    def __call__(self) -> None:
        _core.stream_sum(self._buffer.data_ptr(), self._buffer.numel(), torch.get_num_threads())

    def bytes_per_second(self, seconds: float) -> float:
        """Bandwidth of one call that took ``seconds``."""
        return self._buffer.numel() * 4 / seconds


def read_bandwidth(megabytes: int = 512, repeats: int = 5) -> float:
    """Bytes per second that all threads read together: the median of ``repeats`` passes."""
    read = StreamingRead(megabytes)
    seconds = []
    for _ in range(repeats + 1):
        begin = perf_counter()
        read()
        seconds.append(perf_counter() - begin)
    return read.bytes_per_second(statistics.median(seconds[1:]))


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
