"""The window as a rewritten block table, against the keys it must show."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.trtllm.pages import PageWindow, page_counts


@pytest.mark.parametrize(
    ("n_sink", "window", "page", "wanted"),
    [(64, 4032, 32, (2, 127)), (64, 4033, 32, (2, 127)), (0, 1, 32, (0, 1)), (1, 34, 32, (1, 3))],
)
def test_pages_worked_by_hand(n_sink: int, window: int, page: int, wanted: tuple[int, int]) -> None:
    assert page_counts(n_sink, window, page) == wanted


def metadata(lengths: list[int], page: int, pools: int = 2, width: int = 40) -> Any:
    table = torch.randperm(pools * 4 * 2 * width).int().view(pools, 4, 2, width)
    lens = torch.tensor([*lengths, *[1] * (4 - len(lengths))], dtype=torch.int32)
    return SimpleNamespace(kv_cache_block_offsets=table, kv_lens_cuda=lens)


def shown(given: Any, request: int, pool: int, kind: int, page: int) -> list[tuple[int, int]]:
    """(block, offset) of every key that an attention over ``given`` reads."""
    length = int(given.kv_lens_cuda[request])
    blocks = given.kv_cache_block_offsets[pool, request, kind]
    return [(int(blocks[at // page]), at % page) for at in range(length)]


def test_shown_keys_are_the_first_and_the_last_and_all_comes_back() -> None:
    luck = random.Random(4)
    for _ in range(40):
        page, n_sink, window = luck.choice([4, 8]), luck.randrange(0, 12), luck.randrange(1, 40)
        lengths = [luck.randrange(1, 40 * page) for _ in range(3)]
        given = metadata(lengths, page)
        table, lens = given.kv_cache_block_offsets.clone(), given.kv_lens_cuda.clone()
        address = given.kv_cache_block_offsets.data_ptr(), given.kv_lens_cuda.data_ptr()
        view = PageWindow(n_sink, window, page)
        before = [[shown(given, r, p, 1, page) for p in range(2)] for r in range(3)]
        view.apply(given, 3)
        for request, length in enumerate(lengths):
            for pool in range(2):
                keys, whole = shown(given, request, pool, 1, page), before[request][pool]
                assert keys[: min(n_sink, length)] == whole[: min(n_sink, length)]
                assert keys[-min(window, length) :] == whole[-min(window, length) :]
                assert set(keys) <= set(whole)
                assert len(keys) <= view.n_pages * page
        view.restore()
        assert torch.equal(given.kv_cache_block_offsets, table)
        assert torch.equal(given.kv_lens_cuda, lens)
        assert address == (
            given.kv_cache_block_offsets.data_ptr(),
            given.kv_lens_cuda.data_ptr(),
        )


def test_a_short_context_is_shown_as_it_is() -> None:
    given = metadata([9, 32], 8)
    table, lens = given.kv_cache_block_offsets.clone(), given.kv_lens_cuda.clone()
    PageWindow(4, 40, 8).apply(given, 2)
    assert torch.equal(given.kv_cache_block_offsets, table)
    assert torch.equal(given.kv_lens_cuda, lens)


def test_another_attention_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_block_offsets and kv_lens_cuda"):
        PageWindow(4, 40, 8).apply(SimpleNamespace(kv_lens_cuda=torch.ones(1)), 1)


def test_the_last_page_takes_the_new_rows_of_a_draft(vendor: Any, configure: Any) -> None:
    """On the stand-in's own paged attention: a window over everything changes nothing."""
    from tiny_model import random_prompts

    from tllm_wmtp.trtllm import register

    prompts = random_prompts([50, 9, 33], 97)
    results = []
    for window in (None, 400, 12):
        vendor.restart()
        if window is not None:
            configure(mode="pages", window=window, n_sink=8)
            register()
        executor = vendor.executor(vendor.model())
        executor.hits = lambda one: one.steps % 4
        results.append(vendor.generate(executor, prompts, 40).tokens)
    native, wide, narrow = results
    assert wide == native
    assert narrow != native  # it does hide something
