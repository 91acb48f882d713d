"""Gated DeltaNet: causal convolution, gated delta rule, gated norm.

Per value head, with state ``S [Dk, Dv]``, decay ``exp(g)``, rate ``beta``, unit keys and queries::

    S <- exp(g_t) S;  delta_t = beta_t (v_t - S^T k_t);  S <- S + k_t delta_t^T;  out_t = S^T q_t

(Gated Delta Networks, arXiv 2412.06464). Long runs of rows use the chunked form below; the few rows
of a verify step use the ``wmtp::gated_delta_rows`` op, or :func:`tree_gated_delta_rows` where they
form a tree. Either's ``delta`` lets any number of accepted rows be committed without a second
forward.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from tllm_wmtp.models.layers.convolution import causal_convolution
from tllm_wmtp.models.layers.norm import GatedRMSNorm


class DeltaStates(Protocol):
    """Owner of a layer's convolution and recurrent states for the requests of one forward."""

    def convolution_window(self, mixed: torch.Tensor) -> torch.Tensor:
        """``mixed [B, T, C]`` preceded by each request's last ``kernel - 1`` rows; where the rows
        form a tree, ``[B, T, kernel, C]``: see :func:`.convolution.causal_convolution`."""
        ...

    def delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """Output ``[B, T, Hv, Dv]`` of ``q, k [B, T, Hk, Dk]``, ``v [B, T, Hv, Dv]``,
        ``g, beta [B, T, Hv]``, from and into the owner's states."""
        ...


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def chunked_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule over T rows in chunks, in float32; differentiable.

    Within a chunk the deltas solve a unit lower triangular system: with
    ``A[i, j] = beta_i (k_i . k_j) exp(G_i - G_j)`` for ``j < i`` and ``G`` the running sum of g,
    ``(I + A) delta = beta (v - exp(G) S0^T k)``.

    Args:
        q, k: ``[B, T, Hk, Dk]``, not normalised.
        v: ``[B, T, Hv, Dv]``; value head h reads key head ``h // (Hv / Hk)``.
        g, beta: ``[B, T, Hv]``, log decay (<= 0) and rate.
        state: ``[B, Hv, Dk, Dv]`` before the first row.

    Returns:
        Output ``[B, T, Hv, Dv]`` and the state after row T - 1.
    """
    rows, heads = q.shape[1], v.shape[2]
    group = heads // q.shape[2]
    q, k = _unit(q.float()) * q.shape[-1] ** -0.5, _unit(k.float())
    q, k = (x.repeat_interleave(group, 2) if group > 1 else x for x in (q, k))
    pad = -rows % chunk

    def to_chunks(x: torch.Tensor) -> torch.Tensor:  # [B, T, H, ...] -> [chunks, B, H, chunk, ...]
        x = F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, pad)).unflatten(1, (-1, chunk))
        return x.transpose(2, 3).transpose(0, 1).contiguous()

    q, k, v, g, beta = (to_chunks(x) for x in (q, k, v, g, beta))
    log_decay = g.cumsum(-1)
    decay = log_decay.exp().unsqueeze(-1)
    below = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    pair = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).masked_fill(~below, float("-inf"))
    pair = pair.exp()
    scores = (q @ k.mT) * pair
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.mT) * pair  # the solver takes the diagonal as 1 and ignores the rest
    width = v.shape[-1]
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat((v * beta.unsqueeze(-1), k_beta * decay), -1),
        upper=False,
        unitriangular=True,
    )
    free, from_state = solved[..., :width], solved[..., width:]
    q_decayed = q * decay
    total = log_decay[..., -1:]
    k_to_end = (k * (total - log_decay).exp().unsqueeze(-1)).mT
    total = total.exp().unsqueeze(-1)
    state = state.float()
    outputs = []
    for i in range(q.shape[0]):
        delta = free[i] - from_state[i] @ state
        outputs.append(q_decayed[i] @ state + scores[i] @ delta)
        state = state * total[i] + k_to_end[i] @ delta
    out = torch.stack(outputs).transpose(0, 1).transpose(2, 3).flatten(1, 2)
    return out[:, :rows], state


def tree_gated_delta_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    ancestors: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule where every row follows its own ancestors, in float32; the states stay.

    One chunk of :func:`chunked_gated_delta_rule` with "is an ancestor" for "comes before": G_i is
    the sum of g along row i's path, and ``A[i, j] = beta_i (k_i . k_j) exp(G_i - G_j)`` where j is
    a proper ancestor of i. Ancestors come before their descendants, so the system stays unit
    lower triangular. A row gets what the chain of its ancestors would give it.

    Args:
        q, k, v, g, beta: as in :func:`chunked_gated_delta_rule`, not normalised.
        state: ``[B, Hv, Dk, Dv]`` before the rows.
        ancestors: bool ``[B, T, T]``: row i descends from row j or is row j.

    Returns:
        Output and delta, both ``[B, T, Hv, Dv]``. An accepted path is committed by
        ``wmtp::gated_delta_commit`` on its rows of ``k``, ``g`` and delta.
    """
    group = v.shape[2] // q.shape[2]
    q, k = _unit(q.float()) * q.shape[-1] ** -0.5, _unit(k.float())
    q, k = (x.repeat_interleave(group, 2) if group > 1 else x for x in (q, k))
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
    log_decay = (ancestors.float() @ g.float()).transpose(1, 2)  # [B, H, T]
    beta = beta.float().transpose(1, 2).unsqueeze(-1)
    pair = log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)
    pair = pair.masked_fill(~ancestors.unsqueeze(1), float("-inf")).exp()
    decay, state = log_decay.exp().unsqueeze(-1), state.float()
    delta = torch.linalg.solve_triangular(
        (k @ k.mT) * pair * beta,  # the solver takes the diagonal as 1 and ignores what is above
        (v - (k @ state) * decay) * beta,
        upper=False,
        unitriangular=True,
    )
    out = (q @ state) * decay + ((q @ k.mT) * pair) @ delta
    return out.transpose(1, 2).contiguous(), delta.transpose(1, 2).contiguous()


class GatedDeltaNet(nn.Module):
    """One Gated DeltaNet layer on ``x [B, T, H]``."""

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_kernel: int,
        eps: float,
    ):
        super().__init__()
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_dim, self.value_dim, self.conv_kernel = key_dim, value_dim, conv_kernel
        keys, values = num_key_heads * key_dim, num_value_heads * value_dim
        self.splits = (keys, keys, values)
        self.in_proj_qkv = nn.Linear(hidden_size, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(hidden_size, num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden_size, num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(
            2 * keys + values, 2 * keys + values, conv_kernel, groups=2 * keys + values, bias=False
        )
        self.A_log = nn.Parameter(torch.empty(num_value_heads).uniform_(0.01, 16.0).log())
        self.dt_bias = nn.Parameter(torch.ones(num_value_heads))
        self.norm = GatedRMSNorm(value_dim, eps)
        self.out_proj = nn.Linear(values, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, states: DeltaStates) -> torch.Tensor:
        window = states.convolution_window(self.in_proj_qkv(x))
        mixed = causal_convolution(window, self.conv1d.weight[:, 0])
        q, k, v = F.silu(mixed).split(self.splits, dim=-1)
        beta = torch.sigmoid(self.in_proj_b(x))
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        out = states.delta_rule(
            q.unflatten(-1, (self.num_key_heads, self.key_dim)),
            k.unflatten(-1, (self.num_key_heads, self.key_dim)),
            v.unflatten(-1, (self.num_value_heads, self.value_dim)),
            g,
            beta,
        ).to(x.dtype)
        z = self.in_proj_z(x).unflatten(-1, (self.num_value_heads, self.value_dim))
        return self.out_proj(self.norm(out, z).flatten(-2))
