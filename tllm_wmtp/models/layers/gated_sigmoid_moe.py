"""Gated experts under a sigmoid router, plus experts that every row passes through."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tllm_wmtp.models.fields import Fields
from tllm_wmtp.models.layers.moe import GatedExperts, GatedMLP
from tllm_wmtp.models.layers.sigmoid_router import RouterConfig, SigmoidRouter


@dataclass(frozen=True)
class SigmoidMoeConfig:
    """Routed experts of ``expert_size``, and shared ones that make one MLP of ``shared_size``."""

    router: RouterConfig
    expert_size: int
    shared_size: int

    @classmethod
    def from_hf(cls, text: Fields) -> SigmoidMoeConfig:
        """Reads ``moe_intermediate_size``, ``n_shared_experts`` and the router's fields.

        Raises:
            CheckpointError: a field is missing, of the wrong kind, or does not fit the others.
        """
        if text.get("scoring_func", "sigmoid") != "sigmoid":
            text.refuse("scoring_func", "the router's scores must be 'sigmoid'")
        if text.get("topk_method", "noaux_tc") != "noaux_tc":
            text.refuse("topk_method", "experts must be chosen by 'noaux_tc'")
        size = text.whole("moe_intermediate_size")
        return cls(RouterConfig.from_hf(text), size, size * text.whole("n_shared_experts", 1))


class GatedSigmoidMoe(GatedExperts):
    """Routed and shared experts, added."""

    def __init__(self, hidden_size: int, config: SigmoidMoeConfig):
        router = config.router
        super().__init__(hidden_size, router.num_experts, router.top_k, config.expert_size)
        self.gate = SigmoidRouter(hidden_size, router)
        self.shared_experts = GatedMLP(hidden_size, config.shared_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        return (self.mix(x, *self.gate(x)) + self.shared_experts(x)).view(shape)
