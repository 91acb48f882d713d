"""Random checkpoints of the families that stack one kind of attention block.

Names and shapes of the target's weights are those of ``transformers``; those of the MTP heads are
written out here as their publishers call them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_model import Weights, split_experts, write_checkpoint

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": COMMON | {"num_key_value_heads": 2, "head_dim": 32, "attention_bias": True},
    "glm4_moe": COMMON
    | EXPERTS
    | {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
    "deepseek_v3": COMMON
    | EXPERTS
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 20,
    },
}
CONFIG_CLASSES = {
    "mimo": transformers.Qwen2Config,
    "glm4_moe": transformers.Glm4MoeConfig,
    "deepseek_v3": transformers.DeepseekV3Config,
}
MODEL_CLASSES = {
    "mimo": transformers.Qwen2ForCausalLM,
    "glm4_moe": transformers.Glm4MoeForCausalLM,
    "deepseek_v3": transformers.DeepseekV3ForCausalLM,
}
YARN: dict[str, Any] = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    }
}


def family_config(family: str, **changes: Any) -> dict[str, Any]:
    """What config.json holds."""
    return {"model_type": family} | CONFIGS[family] | changes


def reference_model(config: dict[str, Any]) -> transformers.PreTrainedModel:
    """The target in ``transformers``, with random weights; MiMo's is Qwen2's."""
    family = config["model_type"]
    fields = {key: value for key, value in config.items() if key != "model_type"}
    read = CONFIG_CLASSES[family](**fields)
    read._experts_implementation = "eager"  # the fused one computes no float64
    return MODEL_CLASSES[family](read).eval()


def _head_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published name to shape of every weight of the MTP head."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]]
    if config["model_type"] == "mimo":
        base = "model.mtp_layers.0."
        shapes = {
            "token_layernorm.weight": (hidden,),
            "hidden_layernorm.weight": (hidden,),
            "input_proj.weight": (hidden, 2 * hidden),
            "final_layernorm.weight": (hidden,),
        }
    else:
        base = f"model.layers.{config['num_hidden_layers']}."
        shapes = {
            "enorm.weight": (hidden,),
            "hnorm.weight": (hidden,),
            "eh_proj.weight": (hidden, 2 * hidden),
            "shared_head.norm.weight": (hidden,),
            "shared_head.head.weight": (config["vocab_size"], hidden),
            "embed_tokens.weight": (config["vocab_size"], hidden),
        }
    shapes |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if config["model_type"] == "deepseek_v3":
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        if config["q_lora_rank"] is None:
            shapes["self_attn.q_proj.weight"] = (heads * (nope + rope), hidden)
        else:
            shapes["self_attn.q_a_proj.weight"] = (config["q_lora_rank"], hidden)
            shapes["self_attn.q_a_layernorm.weight"] = (config["q_lora_rank"],)
            shapes["self_attn.q_b_proj.weight"] = (heads * (nope + rope), config["q_lora_rank"])
        shapes |= {
            "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
            "self_attn.kv_a_layernorm.weight": (rank,),
            "self_attn.kv_b_proj.weight": (heads * (nope + value), rank),
            "self_attn.o_proj.weight": (hidden, heads * value),
        }
    else:
        dim = config["head_dim"]
        for name, rows in (("q", heads), ("k", config["num_key_value_heads"])):
            shapes[f"self_attn.{name}_proj.weight"] = (rows * dim, hidden)
            if config["attention_bias"]:
                shapes[f"self_attn.{name}_proj.bias"] = (rows * dim,)
            if config.get("use_qk_norm"):
                shapes[f"self_attn.{name}_norm.weight"] = (dim,)
        for leaf in ("weight", "bias"):
            if f"self_attn.k_proj.{leaf}" in shapes:
                shapes[f"self_attn.v_proj.{leaf}"] = shapes[f"self_attn.k_proj.{leaf}"]
        shapes["self_attn.o_proj.weight"] = (hidden, heads * dim)
    if "n_routed_experts" not in config:
        mlps = {"mlp.": config["intermediate_size"]}
    else:
        size, experts = config["moe_intermediate_size"], config["n_routed_experts"]
        mlps = {f"mlp.experts.{expert}.": size for expert in range(experts)}
        mlps["mlp.shared_experts."] = size * config["n_shared_experts"]
        shapes["mlp.gate.weight"] = (experts, hidden)
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    for name, size in mlps.items():
        shapes[f"{name}gate_proj.weight"] = shapes[f"{name}up_proj.weight"] = (size, hidden)
        shapes[f"{name}down_proj.weight"] = (hidden, size)
    return {base + name: shape for name, shape in shapes.items()}


def is_head(config: dict[str, Any], name: str) -> bool:
    """Whether a published name belongs to the MTP head."""
    last = f"model.layers.{config['num_hidden_layers']}."
    return name.startswith((last, "model.mtp_layers."))


def random_weights(config: dict[str, Any], seed: int = 0, fused: bool = False) -> Weights:
    """All tensors under their published names; experts one by one unless ``fused``."""
    with torch.device("meta"):
        target = reference_model(config).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in target.items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in (shapes | _head_shapes(config)).items():
        tensor = torch.randn(shape, generator=generator) * (0.15 if len(shape) > 1 else 0.1)
        if name.endswith("norm.weight"):
            tensor = tensor + 1
        elif name.endswith(("embed_tokens.weight", "lm_head.weight", "head.head.weight")):
            tensor = tensor * 0.4  # logits near 1, so a tolerance means the same
        elif name.endswith("gate.weight"):
            tensor = tensor * 3  # scores far from each other and from one half
        weights[name] = tensor
    return weights if fused else split_experts(weights)


def load_reference(config: dict[str, Any], weights: Weights) -> transformers.PreTrainedModel:
    """``transformers``' target with the same weights; strict, so the names are checked too."""
    model = reference_model(config)
    state = {}
    for name, tensor in model.state_dict().items():
        if name in weights:
            state[name] = weights[name]
        elif name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            state[name] = torch.stack(
                [
                    torch.cat([weights[f"{base}{e}.{part}_proj.weight"] for part in ("gate", "up")])
                    for e in range(tensor.shape[0])
                ]
            )
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            each = [weights[f"{base}{e}.down_proj.weight"] for e in range(tensor.shape[0])]
            state[name] = torch.stack(each)
        else:
            assert name == "lm_head.weight", name
            assert config["tie_word_embeddings"], name
            state[name] = weights["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def tiny_checkpoint(path: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """A ready directory; ``changes`` go to :func:`family_config`."""
    config = family_config(family, **changes)
    return write_checkpoint(path, config, random_weights(config, seed))
