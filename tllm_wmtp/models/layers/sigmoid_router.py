"""Expert choice by sigmoid scores with a correction bias, as DeepSeek-V3 introduced it.

The bias balances the load: it takes part in the choice, never in the weights (arXiv 2412.19437,
section 2.1.2). Experts may stand in groups, of which a token sees only the best few.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tllm_wmtp.models.fields import Fields


@dataclass(frozen=True)
class RouterConfig:
    """Which of ``num_experts`` a token visits, and how much each of them counts.

    A token keeps the ``topk_group`` of ``n_group`` equal groups with the largest sum of their two
    best choice scores, then the ``top_k`` best experts in them. ``norm_topk_prob`` makes their
    weights sum to ``routed_scaling_factor``; otherwise each is its score times that factor.
    """

    num_experts: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    @classmethod
    def from_hf(cls, text: Fields) -> RouterConfig:
        """Reads ``n_routed_experts``, ``num_experts_per_tok`` and the fields named as here.

        Raises:
            CheckpointError: a field is missing, of the wrong kind, or does not fit the others.
        """
        read = cls(
            num_experts=text.whole("n_routed_experts"),
            top_k=text.whole("num_experts_per_tok"),
            n_group=text.whole("n_group", 1),
            topk_group=text.whole("topk_group", 1),
            norm_topk_prob=bool(text.get("norm_topk_prob", True)),
            routed_scaling_factor=text.number("routed_scaling_factor", 1.0),
        )
        if read.num_experts % read.n_group:
            text.refuse("n_group", f"it must divide n_routed_experts {read.num_experts}")
        group_size = read.num_experts // read.n_group
        if read.n_group > 1 and group_size < 2:
            text.refuse("n_group", "a group's score needs two experts or more")
        if read.topk_group > read.n_group:
            text.refuse("topk_group", f"there are {read.n_group} groups to choose from")
        if read.top_k > read.topk_group * group_size:
            text.refuse(
                "num_experts_per_tok",
                f"there are {read.topk_group * group_size} experts to choose from",
            )
        return read


class SigmoidRouter(nn.Module):
    """``x [N, H]`` to weights ``[N, k]`` in the type of x and experts ``[N, k]`` (int64).

    Scores are computed in float32, whatever the type of x. ``weight [E, H]`` and
    ``e_score_correction_bias [E]`` have the names that checkpoints give them.
    """

    #: A bias rounded to 16 bits would choose other experts than the checkpoint was trained with.
    weights_dtype = torch.float32

    def __init__(self, hidden_size: int, config: RouterConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        experts = self._choose(scores + self.e_score_correction_bias.float())
        weights = scores.gather(1, experts)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * config.routed_scaling_factor).to(x.dtype), experts

    def _choose(self, choice: torch.Tensor) -> torch.Tensor:
        """Experts ``[N, k]`` of the choice scores ``[N, E]``."""
        config = self.config
        if config.topk_group < config.n_group:
            groups = choice.unflatten(1, (config.n_group, -1))
            best = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
            left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
            choice = groups.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1)
        return choice.topk(config.top_k, dim=-1).indices
