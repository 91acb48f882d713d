"""What differs between the demonstration checkpoints: configuration, start values, tensor names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tllm_wmtp.demo.tokenizer import END_OF_TEXT_ID, VOCAB_SIZE
from tllm_wmtp.models.layers.gated_delta import GatedDeltaNet
from tllm_wmtp.models.layers.mamba2 import Mamba2
from tllm_wmtp.models.nemotron_h import NemotronHConfig, NemotronHMtpHead, NemotronHTarget
from tllm_wmtp.models.qwen3_5 import Qwen3_5Config, Qwen3_5MtpHead, Qwen3_5Target

Target = Qwen3_5Target | NemotronHTarget
Head = Qwen3_5MtpHead | NemotronHMtpHead


@dataclass(frozen=True)
class Recipe:
    """One family's model of about two million parameters.

    Args:
        hf_config: what ``config.json`` holds.
        build: target and head with their start values.
        warm_start_head: gives the head the trained target's layers.
        published_name: ``(part, our name)`` to the checkpoint's tensor name, part ``target`` or
            ``head``; None for what is not stored.
        store: splits a tensor into those that are stored, ``[(name, tensor), ...]``.
        gate: how the routers' names end.
        router_logits: of a router, its input and its output.
        router_probs: a router's logits to probabilities, for the load-balancing loss.
        top_k: experts per token.
        conv_kernel: taps of the causal convolutions.
        float32: tensors, by the end of their name, that are not rounded to bfloat16.
    """

    hf_config: dict[str, Any]
    build: Callable[[], tuple[Target, Head]]
    warm_start_head: Callable[[Any, Any], None]
    published_name: Callable[[str, str], str | None]
    store: Callable[[str, torch.Tensor], list[tuple[str, torch.Tensor]]]
    gate: str
    router_logits: Callable[[nn.Module, torch.Tensor, Any], torch.Tensor]
    router_probs: Callable[[torch.Tensor], torch.Tensor]
    top_k: int
    conv_kernel: int
    float32: tuple[str, ...]


#: rope_theta is small so that every rotary phase is met in training: the longest wave is shorter
#: than a training document, and nothing about a position is new at 64K or 1M tokens.
QWEN3_5_CONFIG = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "hidden_act": "silu",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": True,
    "eos_token_id": END_OF_TEXT_ID,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "dtype": "bfloat16",
}

#: No position embedding: order comes from the Mamba layers. time_step_min is what transformers
#: takes as the lower bound of dt; the published models have none.
NEMOTRON_H_CONFIG = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 7,
    "hybrid_override_pattern": "MEMEM*E",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 64,
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "time_step_min": 1e-6,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": END_OF_TEXT_ID,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "dtype": "bfloat16",
}


def decay_start(layer: GatedDeltaNet | Mamba2, heads: int) -> None:
    """Decays from 1 to 1,000 tokens (Mamba's log-uniform time steps)."""
    layer.A_log.data.uniform_(0.0, math.log(8.0))
    step = torch.exp(torch.linspace(math.log(1e-3), math.log(0.2), heads))
    layer.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))


def fan_in_normal(weight: torch.Tensor, name: str) -> None:
    std = weight.shape[-1] ** -0.5 if "conv1d" not in name else 0.3
    if "embed" in name:
        std = 0.1
    nn.init.normal_(weight, std=std)


def sum_of_inputs(weight: torch.Tensor) -> None:
    """A fusion ``[H, 2H]`` that adds its two inputs, halved, and a little noise."""
    size = weight.shape[0]
    weight.normal_(std=0.02)
    weight[:, :size] += 0.5 * torch.eye(size)
    weight[:, size:] += 0.5 * torch.eye(size)


def build_qwen3_5() -> tuple[Target, Head]:
    """Query and key norms start above one: sharper attention finds the first copies sooner."""
    config = Qwen3_5Config.from_hf(QWEN3_5_CONFIG)
    target = Qwen3_5Target(config)
    head = Qwen3_5MtpHead(config, target.rope)
    for module in (target, head):
        for name, weight in module.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                nn.init.constant_(weight, 0.4)
            if weight.dim() >= 2:
                fan_in_normal(weight, name)
    for layer in target.modules():
        if isinstance(layer, GatedDeltaNet):
            decay_start(layer, layer.num_value_heads)
    return target, head


def build_nemotron_h() -> tuple[Target, Head]:
    """Queries and keys start above fan-in: sharper attention finds the first copies sooner."""
    config = NemotronHConfig.from_hf(NEMOTRON_H_CONFIG)
    target = NemotronHTarget(config)
    # One table is trained for both ends and stored twice: transformers never ties this family.
    target.lm_head.weight = target.embed_tokens.weight
    head = NemotronHMtpHead(config)
    for module in (target, head):
        for name, weight in module.named_parameters():
            if weight.dim() >= 2:
                fan_in_normal(weight, name)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.data.mul_(1.4)
            if name.endswith("conv1d.bias"):
                nn.init.zeros_(weight)
    for layer in target.modules():
        if isinstance(layer, Mamba2):
            decay_start(layer, layer.num_heads)
    return target, head


@torch.no_grad()
def warm_start_qwen3_5(target: Qwen3_5Target, head: Qwen3_5MtpHead) -> None:
    """The head's block starts as the target's last attention block, its fusion as a sum."""
    head.layers[0].load_state_dict(target.layers[-1].state_dict())
    sum_of_inputs(head.fc.weight)
    head.norm.weight.copy_(target.norm.weight)


@torch.no_grad()
def warm_start_nemotron_h(target: NemotronHTarget, head: NemotronHMtpHead) -> None:
    """The head's layers start as the target's last attention and MoE, its fusion as a sum."""
    for layer, trained in zip(head.layers, target.layers[-len(head.layers) :], strict=True):
        layer.load_state_dict(trained.state_dict(), strict=False)
    first: Any = head.layers[0]
    last: Any = head.layers[-1]
    sum_of_inputs(first.eh_proj.weight)
    last.final_layernorm.weight.copy_(target.norm.weight)


def published_qwen3_5(part: str, name: str) -> str | None:
    if name == "lm_head.weight":  # tied
        return None
    name = name.replace("mlp.gate_up", "mlp.experts.gate_up_proj")
    name = name.replace("mlp.down", "mlp.experts.down_proj")
    return ("model." if part == "target" else "mtp.") + name


def published_nemotron_h(part: str, name: str) -> str | None:
    if part == "head":
        return "mtp." + name
    if name == "lm_head.weight":
        return name
    name = name.replace("embed_tokens.", "embeddings.")
    return "backbone." + ("norm_f.weight" if name == "norm.weight" else name)


def store_whole(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor)]


def store_expert_by_expert(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    for leaf in ("up", "down"):
        if name.endswith(f"mixer.{leaf}"):
            base = name[: -len(leaf)]
            return [(f"{base}experts.{e}.{leaf}_proj.weight", w) for e, w in enumerate(tensor)]
    return [(name, tensor)]


def sigmoid_router_logits(gate: Any, x: torch.Tensor, _chosen: object) -> torch.Tensor:
    return F.linear(x.float(), gate.weight)


def normalised_sigmoid(logits: torch.Tensor) -> torch.Tensor:
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


RECIPES = {
    "qwen3_5": Recipe(
        hf_config=QWEN3_5_CONFIG,
        build=build_qwen3_5,
        warm_start_head=warm_start_qwen3_5,
        published_name=published_qwen3_5,
        store=store_whole,
        gate="mlp.gate",
        router_logits=lambda gate, x, logits: logits,
        router_probs=lambda logits: logits.softmax(-1),
        top_k=2,
        conv_kernel=4,
        float32=("A_log", "dt_bias"),
    ),
    "nemotron_h": Recipe(
        hf_config=NEMOTRON_H_CONFIG,
        build=build_nemotron_h,
        warm_start_head=warm_start_nemotron_h,
        published_name=published_nemotron_h,
        store=store_expert_by_expert,
        gate="mixer.gate",
        router_logits=sigmoid_router_logits,
        router_probs=normalised_sigmoid,
        top_k=2,
        conv_kernel=4,
        float32=("A_log", "dt_bias", ".D", "e_score_correction_bias"),
    ),
}
