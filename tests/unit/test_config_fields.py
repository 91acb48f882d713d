"""Whatever stands in a field of config.json, the checkpoint is refused by name or serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import engine
from tiny_model import hf_config, tiny_checkpoint

from tllm_wmtp.checkpoint.loader import read_config
from tllm_wmtp.config import MtpConfig
from tllm_wmtp.errors import CheckpointError, WmtpError
from tllm_wmtp.sampling import SamplingParams

VALUES: tuple[Any, ...] = (None, "64", 0, -1, 1.5, [1], {"a": 1}, 7, 10**9)
SPECULATION = MtpConfig(depth=3, window=4, n_sink=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def serve_or_refuse(path: Path, config: dict[str, Any]) -> None:
    """Nothing but an error of ours, or an answer."""
    (path / "config.json").write_text(json.dumps(config))
    try:
        machine = engine(path, SPECULATION, max_seq_len=32, max_batch_size=1)
    except WmtpError:
        return
    request = machine.submit([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=4))
    while machine.step():
        pass
    # A number may be wrong without being impossible: then the logits show it.
    assert request.error is None or "NaN or infinity" in str(request.error)


@pytest.mark.parametrize("field", hf_config())
def test_any_value_of_a_field(checkpoint: Path, field: str) -> None:
    for value in VALUES:
        serve_or_refuse(checkpoint, {**hf_config(), field: value})


@pytest.mark.parametrize("field", [*hf_config()["rope_parameters"], "type"])
def test_any_value_of_a_rotary_field(checkpoint: Path, field: str) -> None:
    for value in VALUES:
        rope = {**hf_config()["rope_parameters"], field: value}
        serve_or_refuse(checkpoint, {**hf_config(), "rope_parameters": rope})


@pytest.mark.parametrize("field", ["factor", "beta_fast", "attention_factor"])
def test_any_value_of_a_yarn_field(checkpoint: Path, field: str) -> None:
    yarn = {**hf_config()["rope_parameters"], "rope_type": "yarn", "factor": 4.0}
    for value in VALUES:
        serve_or_refuse(checkpoint, {**hf_config(), "rope_parameters": {**yarn, field: value}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size '64' in config.json: it must be a whole number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps -1.0.*positive"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3.*divide num_attention_heads 4"),
        ({"head_dim": 10}, "head_dim 10.*multiple of 8"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads 3.*linear_num_value_heads 4"),
        ({"linear_value_head_dim": 24}, "linear_value_head_dim 24.*multiple of 16"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5.*4 experts"),
        ({"layer_types": "full_attention"}, "layer_types 'full_attention'.*4 layers"),
        ({"full_attention_interval": 0, "layer_types": None}, "full_attention_interval 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id '</s>'.*token id"),
        ({"text_config": "x"}, "text_config holds 'x'"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor 2.0.*64 of a"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters lacks 'factor'"),
        ({"quantization_config": "fp8"}, "quantization_config holds 'fp8'"),
    ],
)
def test_what_the_refusal_says(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    (checkpoint / "config.json").write_text(json.dumps(hf_config() | changes))
    with pytest.raises(CheckpointError, match=message):
        read_config(checkpoint)
