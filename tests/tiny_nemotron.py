"""Random checkpoints of the Nemotron-H family, small enough to build in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_model import Weights, write_checkpoint

from tllm_wmtp.models.nemotron_h import NemotronHConfig, NemotronHMtpHead, NemotronHTarget


def hf_config(pattern: str = "MEM*E", **changes: Any) -> dict[str, Any]:
    """What config.json holds."""
    config: dict[str, Any] = {
        "model_type": "nemotron_h",
        "vocab_size": 97,
        "hidden_size": 64,
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": False,
        "intermediate_size": 96,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 24,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 64,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 48,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    }
    return config | changes


def random_weights(config: dict[str, Any], seed: int = 0, scale: float = 0.15) -> Weights:
    """All tensors under their published names, experts one by one: ``backbone.*``,
    ``lm_head.weight``, ``mtp.*``."""
    ours = NemotronHConfig.from_hf(config)
    with torch.device("meta"):
        parts = (("backbone.", NemotronHTarget(ours)), ("mtp.", NemotronHMtpHead(ours)))
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for prefix, module in parts:
        for name, parameter in module.named_parameters():
            spread = scale if parameter.dim() > 1 else 0.1
            tensor = torch.randn(parameter.shape, generator=generator) * spread
            if name.endswith("A_log"):
                tensor = tensor * 10 - 2  # some heads remember, some forget
            elif name.endswith("norm.weight"):
                tensor = tensor + 1
            elif name.endswith("conv1d.weight"):
                tensor = tensor / spread * 0.5
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                tensor = tensor / spread * 0.06  # logits near 1, so a tolerance means the same
            published = _published(prefix, name)
            if tensor.dim() == 3 and name.endswith((".up", ".down")):
                base, leaf = published.rsplit(".", 1)
                for expert, each in enumerate(tensor):
                    weights[f"{base}.experts.{expert}.{leaf}_proj.weight"] = each
            else:
                weights[published] = tensor
    return weights


def _published(prefix: str, name: str) -> str:
    if name == "lm_head.weight":
        return name
    if prefix == "backbone.":
        name = {"norm.weight": "norm_f.weight", "embed_tokens.weight": "embeddings.weight"}.get(
            name, name
        )
    return prefix + name


def fuse_experts(weights: Weights) -> Weights:
    """One tensor for all experts of a layer, as ``transformers`` holds them."""
    fused: Weights = {}
    groups: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        base, split, rest = name.partition(".experts.")
        if not split:
            fused[name] = tensor
            continue
        leaf = rest.split(".")[1]  # experts come in order
        groups.setdefault(f"{base}.experts.{leaf}", []).append(tensor)
    return fused | {name: torch.stack(each) for name, each in groups.items()}


def under_model(name: str) -> str:
    """The prefix that ``transformers`` saves."""
    return name.replace("backbone.", "model.", 1)


def tiny_checkpoint(path: Path, seed: int = 0, **changes: Any) -> Path:
    """A ready directory; ``changes`` go to :func:`hf_config`."""
    config = hf_config(**changes)
    return write_checkpoint(path, config, random_weights(config, seed))
