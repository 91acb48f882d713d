"""config.json of the paper's three models, as far as memory depends on it.

Layers, attention heads and head sizes are those of arXiv 2607.21535 and the models' published
configurations; what a plan does not read is left small.
"""

from __future__ import annotations

from typing import Any


def qwen(
    layers: int, hidden: int, value_heads: int, experts: int, expert_size: int
) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_size,
        "shared_expert_intermediate_size": expert_size,
        "max_position_embeddings": 1048576,
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }


QWEN_35B = qwen(layers=40, hidden=2048, value_heads=32, experts=256, expert_size=512)
QWEN_122B = qwen(layers=48, hidden=3072, value_heads=64, experts=256, expert_size=1024)
NEMOTRON_120B: dict[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "hybrid_override_pattern": "MEMEM*E" * 8 + "ME" * 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "n_shared_experts": 1,
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "tie_word_embeddings": False,
}
MODELS = {"q35": QWEN_35B, "q122": QWEN_122B, "nem": NEMOTRON_120B}
