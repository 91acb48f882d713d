"""Where a target's keys and recurrent states live: the pools that requests take from."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

import tllm_wmtp.ops as ops
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.models.spec import CacheSpec, RecurrentShape


def available_bytes(device: torch.device) -> int:
    """Memory that new pools may take, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _untouched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that costs nothing until written."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        ops.advise_huge_pages(tensor)
    return tensor


class PagedKvPool:
    """Keys and values of the target's full-attention layers, in pages of ``tokens_per_page``.

    ``k_pages[i], v_pages[i] [pages, tokens_per_page, Hkv, D]`` belong to the i-th full-attention
    layer; a page number means the same tokens in all of them.
    """

    def __init__(
        self,
        caches: CacheSpec,
        pages: int,
        tokens_per_page: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.pages, self.tokens_per_page = pages, tokens_per_page
        self.layers = caches.attention_layers
        kv = caches.attention
        shape = (pages, tokens_per_page, kv.num_kv_heads, kv.head_dim)
        self.k_pages = [_untouched(shape, dtype, device) for _ in self.layers]
        self.v_pages = [_untouched(shape, dtype, device) for _ in self.layers]
        self.scale = kv.scale
        self._free = list(range(pages - 1, -1, -1))  # taken from the end: low numbers first

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_page)

    def acquire(self, tokens: int) -> list[int]:
        """Pages for ``tokens`` tokens, in order of position."""
        count = self.pages_for(tokens)
        if count > len(self._free):
            raise RuntimeError("the scheduler admitted a request that does not fit the KV pool")
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        return taken

    def release(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))

    def fill_random(self, pages: Sequence[int], generator: torch.Generator) -> None:
        """Random keys and values, for measurements without a prefill."""
        begin = 0
        while begin < len(pages):
            end = begin + 1
            while end < len(pages) and pages[end] == pages[end - 1] + 1:
                end += 1
            for pool in (*self.k_pages, *self.v_pages):
                pool[pages[begin] : pages[end - 1] + 1].uniform_(-1, 1, generator=generator)
            begin = end


class RecurrentPool:
    """Convolution and recurrent states of the target's recurrent layers, one slot per request.

    ``conv [layers, slots, kernel - 1, C]`` in the compute type, ``state [layers, slots, Hv, Dk,
    Dv]`` in float32. All layers sit in one tensor, so a commit is one call for all of them. A model
    without such layers has slots that hold nothing.
    """

    def __init__(self, caches: CacheSpec, slots: int, dtype: torch.dtype, device: torch.device):
        self.layers = caches.recurrent_layers
        self.slots, self.dtype, self.device = slots, dtype, device
        self.shape = shape = caches.recurrent or RecurrentShape(1, 0, 1, 0, 1, 0)
        count = len(self.layers)
        self.conv = torch.zeros(
            count, slots, shape.history, shape.conv_channels, dtype=dtype, device=device
        )
        self.state = torch.zeros(
            count, slots, shape.value_heads, shape.key_dim, shape.value_dim, device=device
        )
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        """A slot whose states are those before position 0."""
        slot = self._free.pop()
        self.conv[:, slot].zero_()
        self.state[:, slot].zero_()
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)


def pool_pages(
    caches: CacheSpec,
    max_tokens: int | None,
    wanted_tokens: int,
    tokens_per_page: int,
    dtype: torch.dtype,
    device: torch.device,
    share: float = 0.8,
) -> int:
    """Pages of a KV pool: ``max_tokens`` if given, else ``wanted_tokens`` as memory allows.

    Raises:
        ConfigError: ``max_tokens`` needs more memory than there is.
    """
    page_bytes = caches.kv_bytes_per_token(dtype) * tokens_per_page
    room = int(available_bytes(device) * share) // max(page_bytes, 1)
    if max_tokens is None:
        return max(1, min(-(-wanted_tokens // tokens_per_page), room))
    pages = max_tokens // tokens_per_page
    if pages > room:
        raise ConfigError(
            f"KV cache max_tokens {max_tokens}",
            f"it needs {pages * page_bytes >> 20} MiB and {room * page_bytes >> 20} MiB are free",
            "lower max_tokens, or use KvCacheConfig(dtype='bfloat16')",
        )
    return pages
