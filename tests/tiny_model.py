"""Random checkpoints of the Qwen3.5 family, small enough to build in a moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tllm_wmtp.models.qwen3_5 import Qwen3_5Config, Qwen3_5MtpHead, Qwen3_5Target

Weights = dict[str, torch.Tensor]


def hf_config(moe: bool = True, tied: bool = True, **changes: Any) -> dict[str, Any]:
    """What config.json holds."""
    config: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "mtp_num_hidden_layers": 1,
    }
    if moe:
        config |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        }
    else:
        config["intermediate_size"] = 96
    return config | changes


def random_weights(config: dict[str, Any], seed: int = 0, scale: float = 0.15) -> Weights:
    """All tensors under their Hugging Face names: ``model.*``, ``lm_head.weight``, ``mtp.*``."""
    ours = Qwen3_5Config.from_hf(config)
    with torch.device("meta"):
        target = Qwen3_5Target(ours)
        head = Qwen3_5MtpHead(ours, target.rope)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for prefix, module in (("model.", target), ("mtp.", head)):
        for name, parameter in module.named_parameters():
            spread = scale if parameter.dim() > 1 else 0.1
            tensor = torch.randn(parameter.shape, generator=generator) * spread
            if name.endswith("A_log"):
                tensor = tensor * 10 - 2  # some heads remember, some forget
            elif name.endswith("conv1d.weight"):
                tensor = tensor / spread * 0.5
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                tensor = tensor / spread * 0.06  # logits near 1, so a tolerance means the same
            fused = name.replace("mlp.gate_up", "mlp.experts.gate_up_proj")
            if fused.endswith("mlp.down"):
                fused = fused[: -len("down")] + "experts.down_proj"
            weights[("" if name == "lm_head.weight" else prefix) + fused] = tensor
    return weights


def split_experts(weights: Weights) -> Weights:
    """One tensor per expert and projection instead of the fused ones."""
    split = {}
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            base = name[: -len("gate_up_proj")]
            for expert, fused in enumerate(tensor):
                gate, up = fused.chunk(2)
                split[f"{base}{expert}.gate_proj.weight"] = gate
                split[f"{base}{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            base = name[: -len("down_proj")]
            for expert, down in enumerate(tensor):
                split[f"{base}{expert}.down_proj.weight"] = down
        else:
            split[name] = tensor
    return split


def write_checkpoint(
    path: Path,
    config: dict[str, Any],
    weights: Weights,
    rename: Callable[[str], str] = lambda name: name,
    shards: int = 1,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = {rename(name): tensor.clone().contiguous() for name, tensor in weights.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = names[shard::shards]
        save_file({name: tensors[name] for name in held}, path / file)
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def tiny_checkpoint(path: Path, seed: int = 0, **changes: Any) -> Path:
    """A ready directory; ``changes`` go to :func:`hf_config`."""
    config = hf_config(**changes)
    return write_checkpoint(path, config, random_weights(config, seed))


BYTE_END_ID = 256


def add_byte_tokenizer(path: Path, ascii_only: bool = False) -> Path:
    """A tokenizer of the 256 byte values and one special end token: ids 0 .. 256.

    ``ascii_only`` spells ids 128 .. 255 as three letters, so that any ids make readable text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelled = {value: chr(value) for value in printable}
    for value in range(256):
        spelled.setdefault(value, chr(0x100 + sum(v not in printable for v in range(value))))
    if ascii_only:
        for value in range(128, 256):
            spelled[value] = f"{chr(97 + value % 26)}{chr(97 + value % 7)}{chr(60 + value // 8)}"
    vocabulary = {spelled[value]: value for value in range(256)}
    vocabulary["<|end|>"] = BYTE_END_ID
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def random_prompts(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]
