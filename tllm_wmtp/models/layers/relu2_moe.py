"""Squared-ReLU MLP, and experts of it under a sigmoid router with a shared one beside them."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tllm_wmtp.models.layers.moe import RoutedExperts
from tllm_wmtp.models.layers.sigmoid_router import RouterConfig, SigmoidRouter


class Relu2MLP(nn.Module):
    """``down(relu(up(x))^2)``."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


class Relu2Moe(RoutedExperts):
    """Routed experts ``up [E, I, L]``, ``down [E, L, I]``, and one that sees every row, added.

    L is the latent width between ``fc1_latent_proj`` and ``fc2_latent_proj`` if ``latent_size`` is
    given, else H; router and shared expert always read the row itself.
    """

    fused: ClassVar[dict[str, tuple[str, ...]]] = {"up": ("up",), "down": ("down",)}

    def __init__(
        self,
        hidden_size: int,
        router: RouterConfig,
        expert_size: int,
        shared_size: int,
        latent_size: int | None = None,
        bias: bool = False,
    ):
        super().__init__(router.num_experts, router.top_k)
        width = latent_size or hidden_size
        self.gate = SigmoidRouter(hidden_size, router)
        self.up = nn.Parameter(torch.empty(router.num_experts, expert_size, width))
        self.down = nn.Parameter(torch.empty(router.num_experts, width, expert_size))
        nn.init.normal_(self.up, std=width**-0.5)
        nn.init.normal_(self.down, std=expert_size**-0.5)
        self.shared_experts = Relu2MLP(hidden_size, shared_size, bias)
        self.fc1_latent_proj: nn.Module = nn.Identity()
        self.fc2_latent_proj: nn.Module = nn.Identity()
        if latent_size is not None:
            self.fc1_latent_proj = nn.Linear(hidden_size, latent_size, bias=bias)
            self.fc2_latent_proj = nn.Linear(latent_size, hidden_size, bias=bias)

    @property
    def rise(self) -> nn.Parameter:
        return self.up

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x).square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        routed = self.mix(self.fc1_latent_proj(x), *self.gate(x))
        return (self.fc2_latent_proj(routed) + self.shared_experts(x)).view(shape)
