"""Squared-ReLU MLP and the mixture of experts of it, routed by sigmoid scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tllm_wmtp.models.layers.derived import Derived


def relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


class Relu2MLP(nn.Module):
    """``down(relu(up(x))^2)``."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(relu2(self.up_proj(x)))


class SigmoidRouter(nn.Module):
    """Chooses ``top_k`` experts of the ``topk_group`` best of ``n_group`` groups.

    A choice goes by sigmoid score plus ``e_score_correction_bias``, a group's by the sum of its two
    best; the weights are the scores without the bias (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        n_group: int = 1,
        topk_group: int = 1,
        normalise: bool = True,
        scale: float = 1.0,
    ):
        super().__init__()
        self.top_k, self.n_group, self.topk_group = top_k, n_group, topk_group
        self.normalise, self.scale = normalise, scale
        self.weight = nn.Parameter(torch.randn(num_experts, hidden_size) * hidden_size**-0.5)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(num_experts), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits ``[N, experts]``, float32."""
        return F.linear(x.float(), self.weight.float())

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights ``[N, k]``, float32, and experts ``[N, k]``."""
        scores = logits.sigmoid()
        ranked = scores.detach() + self.e_score_correction_bias.float()
        if self.n_group > 1:
            grouped = ranked.unflatten(-1, (self.n_group, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
            open_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
            ranked = grouped.masked_fill(~open_groups.unsqueeze(-1), float("-inf")).flatten(-2)
        experts = ranked.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, experts


class SigmoidMoe(nn.Module):
    """Routed experts plus shared ones that see every row.

    Experts are stored fused: ``up [E, I, L]`` and ``down [E, L, I]``, where L is the latent width
    between ``fc1_latent_proj`` and ``fc2_latent_proj`` if ``latent_size`` is given, else H.
    """

    #: Below this many experts every expert is computed and the unchosen ones weigh zero: two plain
    #: GEMMs beat a gather, and the result stays differentiable in one expression.
    DENSE_EXPERTS = 16

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        expert_size: int,
        shared_size: int,
        router: SigmoidRouter,
        latent_size: int | None = None,
        bias: bool = False,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.gate = router
        width = latent_size or hidden_size
        self.up = nn.Parameter(torch.randn(num_experts, expert_size, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, expert_size) * expert_size**-0.5)
        self.shared_experts = Relu2MLP(hidden_size, shared_size, bias)
        if latent_size is not None:
            self.fc1_latent_proj = nn.Linear(hidden_size, latent_size, bias=bias)
            self.fc2_latent_proj = nn.Linear(latent_size, hidden_size, bias=bias)
        self.latent = latent_size is not None
        self._down_flat = Derived(lambda down: down.transpose(0, 1).flatten(1).contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        weights, experts = self.gate.choose(self.gate(x))
        rows = self.fc1_latent_proj(x) if self.latent else x
        if self.num_experts <= self.DENSE_EXPERTS:
            routed = self._all_experts(rows, weights, experts)
        else:
            routed = self._chosen_experts(rows, weights, experts)
        if self.latent:
            routed = self.fc2_latent_proj(routed)
        return (routed + self.shared_experts(x)).view(shape)

    def _all_experts(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        dense = torch.zeros(x.shape[0], self.num_experts, dtype=x.dtype, device=x.device)
        dense = dense.scatter(1, experts, weights.to(x.dtype))
        up = relu2(F.linear(x, self.up.flatten(0, 1))).unflatten(-1, (self.num_experts, -1))
        return F.linear((up * dense.unsqueeze(-1)).flatten(1), self._down_flat(self.down))

    def _chosen_experts(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Rows sorted by expert, one GEMM pair per expert that has any."""
        if x.shape[0] == 0:
            return x
        top_k = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts).tolist()
        source = order // top_k
        rows = x[source]
        parts, begin = [], 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            up = relu2(F.linear(rows[begin : begin + count], self.up[expert]))
            parts.append(F.linear(up, self.down[expert]))
            begin += count
        scaled = torch.cat(parts) * weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        return torch.zeros_like(x).index_add_(0, source, scaled)
