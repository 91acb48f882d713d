"""Mamba2: causal convolution, decayed sum of outer products, gated group norm.

Per head, with state ``S [Dk, Dv]``, log decay ``g = A dt``, key ``k = B``, query ``q = C`` and
``delta = dt x``::

    S <- exp(g_t) S + k_t delta_t^T;  out_t = S^T q_t + D x_t

(Transformers are SSMs, arXiv 2405.21060, in the terms of :mod:`.gated_delta`, whose rule this is
without the correction.) Nothing in ``k, delta, g`` depends on S, so the rows of a verify step and
a commit of any number of them have closed forms, for a chain as for a tree of drafts.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from tllm_wmtp.models.layers.convolution import causal_convolution


class DecayStates(Protocol):
    """Owner of a layer's convolution and recurrent states for the requests of one forward."""

    def convolution_window(self, mixed: torch.Tensor) -> torch.Tensor:
        """As :meth:`.gated_delta.DeltaStates.convolution_window`."""
        ...

    def decayed_sum(
        self, q: torch.Tensor, k: torch.Tensor, delta: torch.Tensor, g: torch.Tensor
    ) -> torch.Tensor:
        """Output ``[B, T, H, Dv]`` of ``q, k [B, T, groups, Dk]``, ``delta [B, T, H, Dv]``,
        ``g [B, T, H]``, from and into the owner's states."""
        ...


def chunked_ssd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decayed sum over T rows in chunks, in float32; differentiable.

    Args:
        q, k: ``[B, T, groups, Dk]``.
        v: deltas ``[B, T, H, Dv]``; head h reads group ``h // (H / groups)``.
        g: ``[B, T, H]``, log decay (<= 0).
        state: ``[B, H, Dk, Dv]`` before the first row.

    Returns:
        Output ``[B, T, H, Dv]`` and the state after row T - 1.
    """
    rows, heads, groups = v.shape[1], v.shape[2], q.shape[2]
    each = heads // groups
    pad = -rows % chunk

    def to_chunks(x: torch.Tensor) -> torch.Tensor:  # [B, T, H, ...] -> [chunks, B, H, chunk, ...]
        x = F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, pad)).unflatten(1, (-1, chunk))
        return x.transpose(2, 3).transpose(0, 1)

    q, k, v, g = (to_chunks(x) for x in (q, k, v, g))
    log_decay = g.cumsum(-1)
    below = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    pair = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).masked_fill(~below, float("-inf"))
    weights = pair.exp().unflatten(2, (groups, each)) * (q @ k.mT).unsqueeze(3)
    within = weights.flatten(2, 3) @ v
    total = log_decay[..., -1:]
    to_end = (v * (total - log_decay).exp().unsqueeze(-1)).unflatten(2, (groups, each))
    added = (k.mT.unsqueeze(3) @ to_end).flatten(2, 3)
    total = total.exp().unsqueeze(-1)
    state, before = state.float(), []
    for i in range(q.shape[0]):
        before.append(state)
        state = state * total[i] + added[i]
    entering = torch.stack(before).unflatten(2, (groups, each))
    carried = (q.unsqueeze(3) @ entering).flatten(2, 3) * log_decay.exp().unsqueeze(-1)
    out = (within + carried).transpose(0, 1).transpose(2, 3).flatten(1, 2)
    return out[:, :rows], state


def ssd_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    delta: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output ``[B, T, H, Dv]`` of the few rows of a verify; the states stay as they are.

    Args:
        q, k, delta, g: as in :func:`chunked_ssd`.
        state: ``[B, H, Dk, Dv]`` before the rows.
        ancestors: bool ``[T, T]`` or ``[B, T, T]``: row i descends from row j or is row j.
            A chain when None.
    """
    rows, heads, groups = delta.shape[1], delta.shape[2], q.shape[2]
    each = heads // groups
    if ancestors is None:
        ancestors = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
    q, k, delta = (x.float().transpose(1, 2) for x in (q, k, delta))
    path = (ancestors.float() @ g.float()).transpose(1, 2)  # [B, H, T], log decay since the state
    seen = ancestors if ancestors.dim() == 2 else ancestors.unsqueeze(1)
    pair = (path.unsqueeze(-1) - path.unsqueeze(-2)).masked_fill(~seen, float("-inf")).exp()
    weights = pair.unflatten(1, (groups, each)) * (q @ k.mT).unsqueeze(2)
    carried = (q.unsqueeze(2) @ state.float().unflatten(1, (groups, each))).flatten(1, 2)
    out = weights.flatten(1, 2) @ delta + carried * path.exp().unsqueeze(-1)
    return out.transpose(1, 2)


def ssd_commit(
    k: torch.Tensor, delta: torch.Tensor, g: torch.Tensor, state: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """States ``[B, H, Dk, Dv]`` after the rows that ``kept`` (bool ``[B, T]``) names, in order.

    ``exp(G_c) S0 + sum_j exp(G_c - G_j) k_j delta_j^T`` with G the running sum of g over kept rows:
    a prefix for a chain, the accepted path for a tree. ``k, delta, g`` are those of the verify.
    """
    groups = k.shape[2]
    each = delta.shape[2] // groups
    log_decay = g.float().masked_fill(~kept.unsqueeze(-1), 0.0).cumsum(1)
    total = log_decay[:, -1]
    weight = (total.unsqueeze(1) - log_decay).exp() * kept.unsqueeze(-1)
    decayed = (delta.float() * weight.unsqueeze(-1)).unflatten(2, (groups, each))
    added = torch.einsum("btgk,btgev->bgekv", k.float(), decayed).flatten(1, 2)
    return state.float() * total.exp()[..., None, None] + added


class GatedGroupRMSNorm(nn.Module):
    """``weight * y / rms(y)`` of ``y = x * silu(gate)``; the rms is that of each group."""

    def __init__(self, size: int, groups: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups, self.eps = groups, eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        y = (x.float() * F.silu(gate.float())).unflatten(-1, (self.groups, -1))
        return F.rms_norm(y, y.shape[-1:], None, self.eps).flatten(-2).to(gate.dtype) * self.weight


class Mamba2(nn.Module):
    """One Mamba2 layer on ``x [B, T, H]``.

    ``time_step_limit`` bounds dt after softplus.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        groups: int,
        state_size: int,
        conv_kernel: int,
        eps: float,
        conv_bias: bool = True,
        bias: bool = False,
        time_step_limit: tuple[float, float] = (0.0, float("inf")),
    ):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.groups, self.state_size, self.conv_kernel = groups, state_size, conv_kernel
        self.time_step_limit = time_step_limit
        inner, keys = num_heads * head_dim, groups * state_size
        channels = inner + 2 * keys
        self.splits, self.conv_splits = (inner, channels, num_heads), (inner, keys, keys)
        self.in_proj = nn.Linear(hidden_size, inner + channels + num_heads, bias=bias)
        self.conv1d = nn.Conv1d(channels, channels, conv_kernel, groups=channels, bias=conv_bias)
        self.A_log = nn.Parameter(torch.arange(1.0, num_heads + 1).log())
        self.D = nn.Parameter(torch.ones(num_heads))
        self.dt_bias = nn.Parameter(torch.ones(num_heads))
        self.norm = GatedGroupRMSNorm(inner, groups, eps)
        self.out_proj = nn.Linear(inner, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor, states: DecayStates) -> torch.Tensor:
        gate, mixed, dt = self.in_proj(x).split(self.splits, dim=-1)
        window = states.convolution_window(mixed)
        mixed = causal_convolution(window, self.conv1d.weight[:, 0])
        if self.conv1d.bias is not None:
            mixed = mixed + self.conv1d.bias
        value, k, q = F.silu(mixed).split(self.conv_splits, dim=-1)
        value = value.unflatten(-1, (self.num_heads, self.head_dim)).float()
        dt = F.softplus(dt.float() + self.dt_bias.float()).clamp(*self.time_step_limit)
        out = states.decayed_sum(
            q.unflatten(-1, (self.groups, self.state_size)),
            k.unflatten(-1, (self.groups, self.state_size)),
            value * dt.unsqueeze(-1),
            -self.A_log.float().exp() * dt,
        )
        out = out + value * self.D.float().unsqueeze(-1)
        return self.out_proj(self.norm(out.flatten(-2), gate))
