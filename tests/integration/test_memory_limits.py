"""Pools that do not fit are refused before they are allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import engine
from tiny_model import tiny_checkpoint
from toolchain import REPOSITORY

import tllm_wmtp.executor.engine as engine_module
import tllm_wmtp.models.cache as cache_module
from tllm_wmtp import LLM
from tllm_wmtp.config import KvCacheConfig, MtpConfig
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.executor.engine import check_kernels
from tllm_wmtp.models.spec import CacheSpec, KeyValueShape
from tllm_wmtp.ops.checks import CUDA_MAX_HEAD_DIM

BYTES_PER_TOKEN = 2 * 2 * 32 * 4  # K and V, heads, dims, float32; one full-attention layer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 1000 tokens."""
    for module in (cache_module, engine_module):
        monkeypatch.setattr(module, "available_bytes", lambda device: 1000 * BYTES_PER_TOKEN)


def test_a_pool_beyond_memory_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="KV cache max_tokens 2000"):
        engine(checkpoint, kv_cache=KvCacheConfig(max_tokens=2000, tokens_per_page=16))


def test_the_default_pool_takes_what_there_is(checkpoint: Path) -> None:
    machine = engine(checkpoint, max_batch_size=8, max_seq_len=512)
    assert machine.kv.pages * 16 == 800


def test_the_default_pool_takes_no_more_than_all_requests_can_fill(checkpoint: Path) -> None:
    machine = engine(checkpoint, max_batch_size=1, max_seq_len=64)
    assert 64 < machine.kv.pages * 16 <= 64 + 3 * 16


def test_half_the_bytes_hold_twice_the_tokens(checkpoint: Path) -> None:
    kv = KvCacheConfig(dtype="bfloat16", tokens_per_page=16)
    machine = engine(checkpoint, kv_cache=kv)
    assert machine.kv.pages * 16 == 1600
    assert machine.kv.k_pages[0].dtype is torch.bfloat16


def test_rings_beyond_memory_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="draft rings of 1071 slots for 8 requests"):
        engine(checkpoint, MtpConfig(depth=7, window=1000, n_sink=64))
    with pytest.raises(ConfigError, match="lower max_batch_size"):
        engine(checkpoint, MtpConfig.native(depth=7))


def test_limits_of_the_model(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="n_sink 64 \\+ window 4096 = 4160.*4096 positions"):
        engine(checkpoint, MtpConfig(window=4096))
    with pytest.raises(ConfigError, match="max_seq_len 5000.*4096 positions"):
        engine(checkpoint, max_seq_len=5000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no usable CUDA device"):
        LLM(checkpoint, device="cuda")


def test_heads_wider_than_the_cuda_kernels_serve_are_refused_before_anything_is_made() -> None:
    def caches(head_dim: int) -> CacheSpec:
        shape = KeyValueShape(num_kv_heads=1, head_dim=head_dim, scale=1.0)
        return CacheSpec(attention_layers=(0,), attention=shape, draft=shape)

    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    check_kernels(caches(256), cuda)
    check_kernels(caches(576), cpu)
    source = (REPOSITORY / "cpp/src/cuda/check.cpp").read_text(encoding="utf-8")
    assert f"kMaxHeadDim = {CUDA_MAX_HEAD_DIM};" in source
    for head_dim in (576, 72):
        with pytest.raises(ConfigError, match=f"{head_dim} wide on cuda"):
            check_kernels(caches(head_dim), cuda)
