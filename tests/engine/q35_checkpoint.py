"""The draft head of Qwen3.5-35B-A3B at its published sizes, with random weights.

Only what a draft engine reads: embedding, lm_head and ``mtp.*``; experts in NVFP4, 0.45 GB, beside
2 GB of bfloat16 embedding and lm_head.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tllm_wmtp.checkpoint.quantization.packing import global_scale_of, pack

VOCAB, HIDDEN, EXPERTS, EXPERT_SIZE, SHARED_SIZE = 248_320, 2048, 256, 512, 512
HEADS, KV_HEADS, HEAD_DIM = 16, 2, 256

CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": EXPERT_SIZE,
    "shared_expert_intermediate_size": SHARED_SIZE,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
}
ATTENTION = {
    "q_proj": (2 * HEADS * HEAD_DIM, HIDDEN),
    "k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "o_proj": (HIDDEN, HEADS * HEAD_DIM),
}
SHARED = {
    "gate_proj": (SHARED_SIZE, HIDDEN),
    "up_proj": (SHARED_SIZE, HIDDEN),
    "down_proj": (HIDDEN, SHARED_SIZE),
}


def write(folder: Path, vocab: int = VOCAB) -> Path:
    """A smaller ``vocab`` makes a smaller checkpoint, with the same layers."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}

    def plain(name: str, *shape: int) -> None:
        tensors[name] = (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)

    def nvfp4(module: str, *shape: int) -> None:
        weight = torch.randn(shape, generator=generator) * 0.02
        made = pack(weight, global_scale_of([weight]))
        tensors[f"{module}.weight"] = made.packed
        tensors[f"{module}.weight_scale"] = made.block_scale
        tensors[f"{module}.weight_scale_2"] = made.global_scale.reshape(())
        tensors[f"{module}.input_scale"] = torch.tensor(0.005)

    def experts(name: str, rows: int, columns: int) -> None:
        """One expert's numbers in all of them: quantizing 800 million takes minutes."""
        weight = torch.randn(rows, columns, generator=generator) * 0.02
        made = pack(weight, global_scale_of([weight]))
        base = f"mtp.layers.0.mlp.experts.{name}_proj"
        tensors[base] = made.packed.expand(EXPERTS, -1, -1).clone()
        tensors[f"{base}_weight_scale"] = made.block_scale.expand(EXPERTS, -1, -1).clone()
        tensors[f"{base}_weight_scale_2"] = made.global_scale.expand(EXPERTS).clone()
        tensors[f"{base}_input_scale"] = torch.full((EXPERTS,), 0.005)

    plain("model.embed_tokens.weight", vocab, HIDDEN)
    plain("lm_head.weight", vocab, HIDDEN)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        plain(f"mtp.{norm}.weight", HIDDEN)
    nvfp4("mtp.fc", HIDDEN, 2 * HIDDEN)
    layer = "mtp.layers.0"
    plain(f"{layer}.input_layernorm.weight", HIDDEN)
    plain(f"{layer}.post_attention_layernorm.weight", HIDDEN)
    for name, shape in ATTENTION.items():
        nvfp4(f"{layer}.self_attn.{name}", *shape)
    for name in ("q_norm", "k_norm"):
        plain(f"{layer}.self_attn.{name}.weight", HEAD_DIM)
    plain(f"{layer}.mlp.gate.weight", EXPERTS, HIDDEN)
    plain(f"{layer}.mlp.shared_expert_gate.weight", 1, HIDDEN)
    for name, shape in SHARED.items():
        nvfp4(f"{layer}.mlp.shared_expert.{name}", *shape)
    experts("gate_up", 2 * EXPERT_SIZE, HIDDEN)
    experts("down", HIDDEN, EXPERT_SIZE)
    save_file(tensors, folder / "model.safetensors")
    left_alone = ["lm_head", "*embed_tokens", "*norm*", "*mlp.gate", "*shared_expert_gate"]
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": left_alone}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab}))
    return folder
