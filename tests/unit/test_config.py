"""Every rule of the configuration, each broken once: the error names value, rule and remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tllm_wmtp.config import EngineConfig, KvCacheConfig, MtpConfig, arm_of
from tllm_wmtp.errors import ConfigError, RequestError
from tllm_wmtp.sampling import SamplingParams

POSITIONS = 8192


@pytest.mark.parametrize(
    ("make", "value", "remedy"),
    [
        (lambda: MtpConfig(window=-1), "window -1", "4032"),
        (lambda: MtpConfig(window=0), "window 0", "None for the full context"),
        (lambda: MtpConfig(window=1.5), "window 1.5", "as an int"),  # type: ignore[arg-type]
        (lambda: MtpConfig(n_sink=-1), "n_sink -1", "0 or more"),
        (lambda: MtpConfig(depth=1), "depth 1", "depth 2 or more"),
        (lambda: MtpConfig(depth=True), "depth True", "as an int"),
        (
            lambda: MtpConfig(window=8192).resolved(1000, POSITIONS),
            "n_sink 64 + window 8192 = 8256",
            "lower window or n_sink",
        ),
        (lambda: KvCacheConfig(max_tokens=8), "max_tokens 8", "raise max_tokens"),
        (lambda: KvCacheConfig(tokens_per_page=0), "tokens_per_page 0", "1 or more"),
        (lambda: KvCacheConfig(dtype="int4"), "'int4'", "'auto'"),
        (lambda: EngineConfig(dtype="float8"), "'float8'", "'float32'"),
        (lambda: EngineConfig(device="tpu"), "'tpu'", "'cpu'"),
        (lambda: EngineConfig(max_batch_size=0), "max_batch_size 0", "raise max_batch_size"),
        (lambda: EngineConfig(prefill_chunk=0), "prefill_chunk 0", "raise prefill_chunk"),
        (lambda: EngineConfig(max_seq_len=1), "max_seq_len 1", "raise max_seq_len"),
        (lambda: EngineConfig(speculation=7), "speculation 7", "MtpConfig"),  # type: ignore[arg-type]
        (lambda: EngineConfig(kv_cache=7), "kv_cache_config 7", "KvCacheConfig"),  # type: ignore[arg-type]
        (
            lambda: EngineConfig(max_seq_len=9000).resolved(POSITIONS),
            "max_seq_len 9000",
            "at most 8192",
        ),
    ],
)
def test_a_broken_rule_is_an_error_with_value_and_remedy(
    make: Any, value: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert value in caught.value.value
    assert remedy in caught.value.remedy
    assert caught.value.rule


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"max_tokens": 2.5}, "max_tokens 2.5"),
        ({"max_tokens": True}, "max_tokens True"),
        ({"stop": ("",)}, "stop"),
        ({"stop": 5}, "stop \\(5,\\)"),
        ({"stop_token_ids": ("end",)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": 1.5}, "stop_token_ids"),
        ({"temperature": -0.7}, "temperature -0.7"),
    ],
)
def test_bad_sampling_parameters(changes: dict[str, Any], value: str) -> None:
    with pytest.raises(RequestError, match=value):
        SamplingParams(**changes)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=0).stop_token_ids == (0,)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]


def test_arms() -> None:
    assert arm_of(None) == "dense"
    assert arm_of(MtpConfig()) == "windowed"
    assert arm_of(MtpConfig.native()) == arm_of(MtpConfig(window=None)) == "native"
    assert MtpConfig(depth=7).draft_len == 6


def test_the_native_window_holds_every_position_a_draft_can_reach() -> None:
    resolved = MtpConfig.native(depth=7).resolved(1000, POSITIONS)
    last_query = 999 + 6
    assert resolved.window is not None
    assert last_query - resolved.window < 0


def test_a_window_larger_than_a_request_is_fine() -> None:
    speculation = MtpConfig(window=4032, n_sink=64)
    assert EngineConfig(speculation=speculation, max_seq_len=100).resolved(POSITIONS)


def test_resolving_makes_every_default_concrete() -> None:
    resolved = EngineConfig(dtype="bfloat16").resolved(POSITIONS)
    assert resolved.max_seq_len == POSITIONS
    assert resolved.kv_cache.dtype == "bfloat16"
    kept = EngineConfig(kv_cache=KvCacheConfig(dtype="float32"), dtype="bfloat16")
    assert kept.resolved(POSITIONS).kv_cache.dtype == "float32"


def test_configuration_is_frozen() -> None:
    for config, name in ((MtpConfig(), "depth"), (EngineConfig(), "dtype")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 3)
