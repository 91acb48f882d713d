"""The draft head's attention, spelled out: all keys in float32, and a read that may be changed."""

from __future__ import annotations

from typing import Protocol

import torch

from tllm_wmtp.bench.probe.reads import NativeRead, Places, Read

#: Most scores computed at once (4 MiB of them, which a cache holds).
MOST_SCORES = 1 << 20
_LATER_THAN_ALL = 1 << 62


class Observer(Protocol):
    """Sees what was read, query by query and in their order."""

    def __call__(
        self,
        scores: torch.Tensor,
        weights: torch.Tensor,
        places: Places,
        value_norms: torch.Tensor,
    ) -> None:
        """``scores, weights [Hq, n, K]``, ``value_norms [Hkv, n, K]`` (L2)."""
        ...


class ProbeAttend:
    """Stands for a draft's ring (:class:`tllm_wmtp.models.layers.attention.Attend`): N draft phases
    at once, each over the rows before its start and over the rows that it has fed itself.

    A call answers one row of every draft phase and keeps nothing, so that it can be repeated with
    another ``read``; :meth:`advance` keeps the row.

    Args:
        keys, values: ``[S, Hkv, D]`` of the committed rows 0 .. S - 1.
        starts: ``[N]``, the position of each draft phase's first row; it sees rows before it.
        scale: multiplies the scores.
        value_dim: how many elements of a value the head reads; a latent head caches more.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: torch.Tensor,
        scale: float,
        value_dim: int,
    ):
        self.keys = keys.float().transpose(0, 1).contiguous()  # [Hkv, S, D]
        self.values = values.float().transpose(0, 1).contiguous()
        self.value_norms = self.values[..., :value_dim].norm(dim=-1)  # [Hkv, S]
        self.starts, self.scale, self.value_dim = starts, scale, value_dim
        self.read: Read = NativeRead()
        self.observer: Observer | None = None
        #: ``[N, Hq, value_dim]``, what the last call answered.
        self.answer = torch.empty(0)
        empty = self.keys.new_empty(starts.numel(), self.keys.shape[0], 0, self.keys.shape[2])
        self._own: tuple[torch.Tensor, torch.Tensor] = (empty, empty)  # [N, Hkv, rows, D]
        self._next = self._own

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        own_k, own_v = (
            torch.cat((own, row.float().unsqueeze(2)), dim=2)
            for own, row in zip(self._own, (k, v), strict=True)
        )
        self._next = own_k, own_v
        scores_of_row = q.shape[1] * (self.keys.shape[1] + own_k.shape[2])
        at_once = max(1, MOST_SCORES // scores_of_row)
        parts = [
            self._answer(q[rows].float(), own_k[rows], own_v[rows], self.starts[rows])
            for rows in (slice(i, i + at_once) for i in range(0, len(q), at_once))
        ]
        out = torch.cat(parts)
        self.answer = out[..., : self.value_dim]
        return out.to(q.dtype)

    def advance(self) -> None:
        """The row of the last call has been fed; the next call's rows come after it."""
        self._own = self._next

    def _answer(
        self, q: torch.Tensor, own_k: torch.Tensor, own_v: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """``[n, Hq, D]`` of queries ``q [n, Hq, D]``, own rows ``[n, Hkv, rows, D]``."""
        n, committed, rows = len(q), self.keys.shape[1], own_k.shape[2]
        grouped = q.unflatten(1, (len(self.keys), -1)).transpose(0, 1)  # [Hkv, n, group, D]
        shared = (grouped.flatten(1, 2) @ self.keys.transpose(1, 2)).unflatten(1, (n, -1))
        own = grouped @ own_k.permute(1, 0, 3, 2)
        scores = torch.cat((shared, own), -1).mul_(self.scale)  # [Hkv, n, group, K]
        scores = scores.transpose(1, 2).flatten(0, 1)  # [Hq, n, K]

        places = self._places(starts, rows)
        weights = self.read.weights(scores, places)
        if self.observer is not None:
            norms = torch.cat(
                (
                    self.value_norms[:, None].expand(-1, n, -1),
                    own_v[..., : self.value_dim].norm(dim=-1).transpose(0, 1),
                ),
                -1,
            )
            self.observer(scores, weights, places, norms)
        by_group = weights.unflatten(0, (len(self.keys), -1)).transpose(1, 2)
        of_shared, of_own = by_group.split((committed, rows), dim=-1)
        out = (of_shared.flatten(1, 2) @ self.values).unflatten(1, (n, -1))
        out = out + of_own @ own_v.transpose(0, 1)
        return out.transpose(0, 1).flatten(1, 2)

    def _places(self, starts: torch.Tensor, rows: int) -> Places:
        committed = torch.arange(self.keys.shape[1], device=starts.device)
        before = torch.where(committed < starts[:, None], committed, _LATER_THAN_ALL)
        own = starts[:, None] + torch.arange(rows, device=starts.device)
        return Places(torch.cat((before, own), 1), starts + rows - 1)
