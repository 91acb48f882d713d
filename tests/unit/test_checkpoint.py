"""Checkpoint directories: the layouts that exist, and every way to be incomplete or damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import (
    add_byte_tokenizer,
    hf_config,
    random_weights,
    split_experts,
    tiny_checkpoint,
    write_checkpoint,
)

from tllm_wmtp.checkpoint.loader import LoadedModel, load_model
from tllm_wmtp.errors import CheckpointError


def state(model: LoadedModel) -> dict[str, torch.Tensor]:
    assert model.head is not None
    modules = (("target", model.target), ("head", model.head))
    return {f"{n}.{k}": v for n, module in modules for k, v in module.state_dict().items()}


def prefixed(prefix: str) -> Callable[[str], str]:
    def rename(name: str) -> str:
        return name.replace("model.", prefix, 1) if name.startswith("model.") else name

    return rename


LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"shards": 3},
    "split experts": {"split": True},
    "split and sharded": {"split": True, "shards": 4},
    "language_model prefix": {"rename": prefixed("model.language_model.")},
    "thinker prefix": {"rename": lambda name: "thinker." + name},
    "no prefix": {"rename": prefixed("")},
    "mtp under model": {"rename": lambda n: "model." + n if n.startswith("mtp.") else n},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_layout_loads_the_same_weights(tmp_path: Path, layout: str, tied: bool) -> None:
    options = dict(LAYOUTS[layout])
    config = hf_config(tied=tied)
    weights = random_weights(config)
    plain = load_model(write_checkpoint(tmp_path / "plain", config, weights), with_head=True)
    stored = split_experts(weights) if options.pop("split", False) else weights
    other = load_model(write_checkpoint(tmp_path / "x", config, stored, **options), with_head=True)
    ours, expected = state(other), state(plain)
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name
    for name in ("embed_tokens.weight", "layers.3.mlp.gate_up", "layers.0.linear_attn.A_log"):
        hf_name = "model." + name.replace("mlp.gate_up", "mlp.experts.gate_up_proj")
        assert torch.equal(ours["target." + name], weights[hf_name]), name


def test_a_multimodal_checkpoint_gives_its_text_model(tmp_path: Path) -> None:
    text = hf_config()
    config = {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": True}
    weights = random_weights(text) | {"model.visual.patch_embed.weight": torch.zeros(3)}
    path = write_checkpoint(tmp_path, config, weights, prefixed("model.language_model."))
    (path / "model.safetensors").unlink()
    weights.pop("model.visual.patch_embed.weight")
    renamed = {prefixed("model.language_model.")(name): w for name, w in weights.items()}
    renamed["model.visual.patch_embed.weight"] = torch.zeros(3)
    write_checkpoint(tmp_path, config, renamed)
    model = load_model(tmp_path, with_head=True)
    assert torch.equal(model.target.norm.weight, weights["model.norm.weight"])


def test_a_tied_embedding_is_held_once(tmp_path: Path) -> None:
    config = hf_config()
    weights = random_weights(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1  # some files repeat it
    target = load_model(write_checkpoint(tmp_path, config, weights)).target
    assert target.lm_head.weight is target.embed_tokens.weight


def test_types_are_converted_once(tmp_path: Path) -> None:
    config = hf_config()
    weights = {name: w.bfloat16() for name, w in random_weights(config).items()}
    path = write_checkpoint(tmp_path, config, weights)
    assert {p.dtype for p in load_model(path).target.parameters()} == {torch.float32}
    low = load_model(path, dtype=torch.bfloat16).target
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert low.rope.inv_freq.dtype is torch.float32


def test_loading_inside_inference_mode_makes_ordinary_weights(tmp_path: Path) -> None:
    with torch.inference_mode():
        target = load_model(tiny_checkpoint(tmp_path)).target
    assert not any(p.is_inference() for p in target.parameters())


def test_rewriting_the_file_does_not_change_a_loaded_model(tmp_path: Path) -> None:
    target = load_model(tiny_checkpoint(tmp_path, seed=1)).target
    before = target.norm.weight.clone()
    tiny_checkpoint(tmp_path, seed=2)
    assert torch.equal(target.norm.weight, before)


def test_end_ids_come_from_both_configs(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, eos_token_id=[3, 4])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert load_model(path).eos_token_ids == (3, 4, 5)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 6}))
    assert load_model(path).eos_token_ids == (3, 4, 6)


def test_the_tokenizer_is_optional(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path)
    assert load_model(path).tokenizer is None
    loaded = load_model(add_byte_tokenizer(path)).tokenizer
    assert loaded is not None
    assert loaded.encode("ab").ids == [97, 98]


# --- what must be refused ---------------------------------------------------------------------


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def truncate(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


def without(path: Path, *lost: str, **extra: torch.Tensor) -> None:
    config = json.loads((path / "config.json").read_text())
    kept = {n: w for n, w in random_weights(config).items() if not n.startswith(lost)}
    write_checkpoint(path, config, kept | extra)


def fill(path: Path, name: str, value: float) -> None:
    config = json.loads((path / "config.json").read_text())
    weights = random_weights(config)
    weights[name].view(-1)[-1] = value
    write_checkpoint(path, config, weights)


def spoil_index(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    write_checkpoint(path, config, random_weights(config), shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.absent.weight"] = "model-00001-of-00002.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def lose_shard(path: Path) -> None:
    spoil_index(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def quantized_file(path: Path) -> None:
    quantization = {"quantization": {"quant_algo": "NVFP4"}}
    (path / "hf_quant_config.json").write_text(json.dumps(quantization))


def packed_tensor(path: Path) -> None:
    name = "model.layers.0.linear_attn.in_proj_z.weight"
    without(path, name, **{name: torch.zeros(64, 64, dtype=torch.uint8)})


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), r"config\.json is missing"),
    "config is not JSON": (lambda p: (p / "config.json").write_text("{"), "must be JSON"),
    "config is a list": (lambda p: (p / "config.json").write_text("[]"), "holds a list"),
    "unknown family": (lambda p: edit_config(p, model_type="llama"), "'llama'.*qwen3_5"),
    "no family": (lambda p: edit_config(p, model_type=None), "model_type None"),
    "config lacks a field": (lambda p: edit_config(p, hidden_size=None), "'hidden_size'"),
    "unknown layer": (lambda p: edit_config(p, layer_types=["mamba"] * 4), "mamba"),
    "unknown rotary": (
        lambda p: edit_config(p, rope_parameters={"rope_type": "llama3"}),
        "rope_type 'llama3'",
    ),
    "quantized": (
        lambda p: edit_config(p, quantization_config={"quant_method": "fp8"}),
        "quantization fp8",
    ),
    "mixed quantization": (
        lambda p: (edit_config(p, quantization_config={"quant_method": "fp8"}), quantized_file(p)),
        r"NVFP4 .* and fp8",
    ),
    "packed tensor": (packed_tensor, "in_proj_z.weight of type U8"),
    "NaN": (lambda p: fill(p, "model.norm.weight", float("nan")), r"norm\.weight.*NaN or inf"),
    "infinity": (lambda p: fill(p, "mtp.fc.weight", float("-inf")), r"fc\.weight.*NaN or inf"),
    "end id is text": (
        lambda p: (p / "generation_config.json").write_text('{"eos_token_id": "end"}'),
        "eos_token_id 'end' in generation_config.json",
    ),
    "index of numbers": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'),
        "no weight_map",
    ),
    "config is a folder": (
        lambda p: ((p / "config.json").unlink(), (p / "config.json").mkdir()),
        r"config\.json cannot be read",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no weights"),
    "header cut": (lambda p: truncate(p / "model.safetensors", 0.001), r"model\.safetensors is tr"),
    "data cut": (lambda p: truncate(p / "model.safetensors", 0.7), r"model\.safetensors is trunc"),
    "empty file": (lambda p: truncate(p / "model.safetensors", 0), r"model\.safetensors is trunc"),
    "not safetensors": (
        lambda p: (p / "model.safetensors").write_bytes(b"x" * 999),
        r"model\.safetensors is truncated or damaged",
    ),
    "index names an absent tensor": (spoil_index, r"model\.absent\.weight is not in"),
    "index names an absent file": (lose_shard, r"model-00002-of-00002\.safetensors is missing"),
    "weight missing": (lambda p: without(p, "model.norm"), r"lacks norm\.weight"),
    "expert missing": (lambda p: without(p, "model.layers.2.mlp.experts.d"), "mlp.down"),
    "head weight missing": (lambda p: without(p, "mtp.fc"), r"lacks fc\.weight"),
    "no head": (lambda p: without(p, "mtp."), r"no mtp\.\* tensors"),
    "unknown weight": (
        lambda p: without(p, **{"model.layers.0.adapter.weight": torch.zeros(2)}),
        r"unknown tensors model\.layers\.0\.adapter\.weight",
    ),
    "unknown head weight": (
        lambda p: without(p, **{"mtp.layers.1.extra.weight": torch.zeros(2)}),
        r"unknown tensors mtp\.layers\.1\.extra",
    ),
    "wrong shape": (lambda p: edit_config(p, hidden_size=32), r"shape \[97, 64\].*\[97, 32\]"),
    "twice the same": (
        lambda p: without(p, **{"model.language_model.norm.weight": torch.zeros(64)}),
        "same weight",
    ),
    "two MTP layers": (lambda p: edit_config(p, mtp_num_hidden_layers=2), "2 layers"),
    "own MTP embedding": (
        lambda p: edit_config(p, mtp_use_dedicated_embeddings=True),
        "dedicated embeddings True",
    ),
    "tokenizer is not one": (lambda p: (p / "tokenizer.json").write_text("{}"), "tokenizer.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    spoil, message = DAMAGES[damage]
    path = tiny_checkpoint(tmp_path)
    load_model(path, with_head=True)
    spoil(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(path, with_head=True)
    assert caught.value.remedy


def test_a_missing_head_matters_only_to_speculation(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path)
    without(path, "mtp.")
    assert load_model(path).head is None


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be a checkpoint directory"):
        load_model(tmp_path / "nowhere")


def test_an_untied_model_needs_its_own_output_matrix(tmp_path: Path) -> None:
    config = hf_config(tied=False)
    weights = random_weights(config)
    del weights["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load_model(write_checkpoint(tmp_path, config, weights))
