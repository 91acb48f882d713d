"""Partial rotary position embedding, with YaRN scaling for contexts beyond the trained length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.fields import Fields


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the first ``rotary_dim`` of a head's dimensions.

    ``scaling_factor`` 1.0 means none; otherwise YaRN (arXiv 2309.00071) on
    ``original_max_positions``. ``score_mscale`` is DeepSeek's share of the attention temperature
    that multiplies the scores instead of cos and sin (``mscale_all_dim``), 0 for none.
    """

    theta: float
    rotary_dim: int
    scaling_factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    score_mscale: float = 0.0

    @classmethod
    def from_hf(cls, text: Fields, head_dim: int, default_share: float = 0.25) -> RopeConfig:
        """Reads ``rope_parameters`` (current) or ``rope_theta`` and ``rope_scaling`` (older).

        ``default_share`` is the family's ``partial_rotary_factor`` where the file has none.
        """
        key = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
        rope = Fields(text.get(key, {}), key)
        kind = rope.get("rope_type", rope.get("type", "default"))
        theta = rope.number("rope_theta", text.number("rope_theta", 10000.0))
        share = rope.number(
            "partial_rotary_factor", text.number("partial_rotary_factor", default_share)
        )
        rotary_dim = int(head_dim * share)
        if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
            raise CheckpointError(
                f"partial_rotary_factor {share}",
                f"it makes {rotary_dim} of a head's {head_dim} dimensions rotate: an even number "
                f"from 2 to {head_dim} is needed",
                "use the config.json that belongs to the weights",
            )
        if kind in ("default", "mrope"):
            return cls(theta, rotary_dim)
        if kind != "yarn":
            raise CheckpointError(
                f"rope_type {kind!r}",
                "only 'default' and 'yarn' rotary embeddings are supported",
                "use a checkpoint with one of these",
            )
        factor = rope.number("factor")
        score_mscale = rope.number("mscale_all_dim") if rope.get("mscale_all_dim") else 0.0
        attention_factor = None
        if rope.get("attention_factor") is not None:
            attention_factor = rope.number("attention_factor")
        elif rope.get("mscale") and score_mscale:
            attention_factor = _temperature(factor, rope.number("mscale"))
            attention_factor /= _temperature(factor, score_mscale)
        return cls(
            theta,
            rotary_dim,
            factor,
            rope.whole("original_max_position_embeddings", text.whole("max_position_embeddings")),
            rope.number("beta_fast", 32.0),
            rope.number("beta_slow", 1.0),
            attention_factor,
            score_mscale,
        )

    def inverse_frequencies(self) -> torch.Tensor:
        """Angular frequency of each pair, float32 ``[rotary_dim / 2]``, radians per position."""
        exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        plain = 1.0 / (self.theta**exponent)
        if self.scaling_factor == 1.0:
            return plain

        def dim_of(rotations: float) -> float:
            length = self.original_max_positions / (rotations * 2 * math.pi)
            return self.rotary_dim * math.log(length) / (2 * math.log(self.theta))

        low = max(math.floor(dim_of(self.beta_fast)), 0)
        high = min(math.ceil(dim_of(self.beta_slow)), self.rotary_dim - 1)
        ramp = (torch.arange(self.rotary_dim // 2, dtype=torch.float32) - low) / max(
            high - low, 0.001
        )
        keep = 1.0 - ramp.clamp(0, 1)
        return plain / self.scaling_factor * (1 - keep) + plain * keep

    def magnitude(self) -> float:
        """Factor on cos and sin (YaRN's attention temperature)."""
        if self.scaling_factor == 1.0:
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return _temperature(self.scaling_factor)

    def score_factor(self) -> float:
        """Factor on the attention scores."""
        if self.scaling_factor == 1.0 or not self.score_mscale:
            return 1.0
        return _temperature(self.scaling_factor, self.score_mscale) ** 2


def _temperature(factor: float, mscale: float = 1.0) -> float:
    """YaRN's ``0.1 mscale ln(factor) + 1``, 1 where nothing is extended."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


class Rope(nn.Module):
    """Rotates ``x [..., heads, head_dim]`` by ``positions [...]``."""

    inv_freq: torch.Tensor

    def __init__(self, config: RopeConfig):
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", config.inverse_frequencies(), persistent=False)

    def table(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[..., 1, rotary_dim / 2]`` of integer ``positions [...]``."""
        angle = (positions.to(torch.float32).unsqueeze(-1) * self.inv_freq).unsqueeze(-2)
        scale = self.config.magnitude()
        return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)

    @staticmethod
    def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cos, sin = table
        half = cos.shape[-1]
        first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    @staticmethod
    def select(
        table: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The table of some ``rows``, indices into the last axis of the positions."""
        cos, sin = table
        return cos.index_select(-3, rows), sin.index_select(-3, rows)
