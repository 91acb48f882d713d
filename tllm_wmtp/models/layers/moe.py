"""Gated MLP, gated experts, and their mixture under a softmax router with a shared expert."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tllm_wmtp.models.layers.derived import Derived


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RoutedExperts(nn.Module):
    """Experts of which each row uses ``top_k`` of ``num_experts``, stored fused, expert first:
    ``down(activate(rise(x)))`` with ``rise [E, A, H]`` and ``down [E, H, I]``.

    ``fused`` says which projections of one expert (``experts.<e>.<name>_proj``) lie one under the
    other in each fused parameter. Subclasses choose the experts, and add what every row passes
    through.
    """

    #: Below this many experts every expert is computed and the unchosen ones weigh zero: two plain
    #: GEMMs beat a gather, and the result stays differentiable in one expression.
    DENSE_EXPERTS = 16

    fused: ClassVar[dict[str, tuple[str, ...]]]
    down: nn.Parameter

    def __init__(self, num_experts: int, top_k: int):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self._down_flat = Derived(lambda down: down.transpose(0, 1).flatten(1).contiguous())

    @property
    @abstractmethod
    def rise(self) -> nn.Parameter:
        """The fused first projection ``[E, A, H]``."""

    @abstractmethod
    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., A]`` to ``[..., I]``."""

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weighted sum ``[N, H]`` of each row's experts; ``weights, experts [N, k]``."""
        if self.num_experts <= self.DENSE_EXPERTS:
            return self._all_experts(x, weights, experts)
        return self._chosen_experts(x, weights, experts)

    def _all_experts(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        dense = torch.zeros(x.shape[0], self.num_experts, dtype=x.dtype, device=x.device)
        dense = dense.scatter(1, experts, weights)
        risen = F.linear(x, self.rise.flatten(0, 1)).unflatten(-1, (self.num_experts, -1))
        mixed = self.activate(risen) * dense.unsqueeze(-1)
        return F.linear(mixed.flatten(1), self._down_flat(self.down))

    def _chosen_experts(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Rows sorted by expert, one GEMM pair per expert that has any."""
        if x.shape[0] == 0:
            return x
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts).tolist()
        source = order // self.top_k
        rows = x[source]
        parts, begin = [], 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            risen = F.linear(rows[begin : begin + count], self.rise[expert])
            parts.append(F.linear(self.activate(risen), self.down[expert]))
            begin += count
        scaled = torch.cat(parts) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add_(0, source, scaled)


class GatedExperts(RoutedExperts):
    """Routed experts that are gated MLPs: ``gate_up [E, 2I, H]``, gate first."""

    fused: ClassVar[dict[str, tuple[str, ...]]] = {"gate_up": ("gate", "up"), "down": ("down",)}

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, expert_size: int):
        super().__init__(num_experts, top_k)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * expert_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, expert_size))
        nn.init.normal_(self.gate_up, std=hidden_size**-0.5)
        nn.init.normal_(self.down, std=expert_size**-0.5)

    @property
    def rise(self) -> nn.Parameter:
        return self.gate_up

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class SparseMoe(GatedExperts):
    """Top-k of a softmax, weights renormalised over the chosen k, plus a gated shared expert."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        expert_size: int,
        shared_size: int,
    ):
        super().__init__(hidden_size, num_experts, top_k, expert_size)
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.shared_expert = GatedMLP(hidden_size, shared_size)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights ``[N, k]`` (sum 1) and experts ``[N, k]``."""
        probs = self.gate(x).float().softmax(-1)
        top, experts = probs.topk(self.top_k, dim=-1)
        return (top / top.sum(-1, keepdim=True)).to(x.dtype), experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        routed = self.mix(x, *self.route(x))
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return (routed + shared).view(shape)
