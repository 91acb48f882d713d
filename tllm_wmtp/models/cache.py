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

    A page has one owner or more. Only the request that acquired it writes to it, and never to a row
    that another owner counts on; whoever wants to go on from a shared page copies it first.
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
        self._owners = [0] * pages

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_page)

    def owners(self, page: int) -> int:
        return self._owners[page]

    def acquire(self, count: int) -> list[int]:
        """``count`` pages that nobody owned."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages were asked for and {len(self._free)} are free")
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One owner more for each of ``pages``, which must have one."""
        for page in pages:
            if self._owners[page] == 0:
                raise RuntimeError(f"page {page} is shared and nobody owns it")
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One owner less for each of ``pages``; the last one gives it back."""
        for page in reversed(pages):
            if self._owners[page] == 0:
                raise RuntimeError(f"page {page} is released and nobody owns it")
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def copy(self, source: int, destination: int) -> None:
        """What ``source`` holds, in all layers."""
        for pool in (*self.k_pages, *self.v_pages):
            pool[destination].copy_(pool[source])

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


class BlockTables:
    """Which page holds which tokens of a request: one row per slot of the engine.

    ``table`` int32 ``[slots, max_pages]``, -1 where there is no page. ``version`` grows with every
    change, so that a gathered copy knows when it is out of date.
    """

    def __init__(self, slots: int, max_pages: int, device: torch.device):
        self.table = torch.full((slots, max_pages), -1, dtype=torch.int32, device=device)
        self.version = 0

    def row(self, slot: int) -> torch.Tensor:
        """The slot's row ``[1, max_pages]``, always up to date."""
        return self.table[slot : slot + 1]

    def write(self, slot: int, begin: int, pages: Sequence[int]) -> None:
        """``pages`` follow the slot's first ``begin`` ones."""
        if not pages:
            return
        end = begin + len(pages)
        if end > self.table.shape[1]:
            raise RuntimeError(f"{end} pages for a block table of {self.table.shape[1]}")
        self.table[slot, begin:end] = torch.tensor(
            pages, dtype=torch.int32, device=self.table.device
        )
        self.version += 1

    def clear(self, slot: int) -> None:
        """The slot's request has left."""
        self.table[slot].fill_(-1)
        self.version += 1


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
