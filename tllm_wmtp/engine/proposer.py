"""A draft graph in the place of the embedded runtime's draft head: same loop, same requests.

:class:`DraftForward` is one forward of a draft graph, wherever it runs (TensorRT on a GPU,
onnxruntime on a CPU). :class:`CompiledProposer` drives it with the proposer that drives the
checkpoint's own head, so adaptive depth, sampling and batching are the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tllm_wmtp.config import MtpConfig
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.executor.draft import MtpProposer, ring_of
from tllm_wmtp.models.layers.attention import Attend
from tllm_wmtp.models.spec import DraftHead, Target
from tllm_wmtp.ring import RingSpec


@dataclass(frozen=True)
class Rows:
    """Inputs of one forward, as :mod:`tllm_wmtp.engine.draft` lists them, without the rings."""

    token_ids: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    row_offsets: torch.Tensor
    query_offsets: torch.Tensor
    start_positions: torch.Tensor
    lanes: torch.Tensor


@dataclass(frozen=True)
class Answers:
    """``next_hidden [b, H]`` and ``logits [b, vocab]``."""

    next_hidden: torch.Tensor
    logits: torch.Tensor


class DraftForward(Protocol):
    """A draft graph with rings of its own."""

    ring: RingSpec
    lanes: int
    max_rows: int

    @property
    def rings(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[lanes, R, Hkv, D]`` as they are now; they may be written."""
        ...

    def run(self, rows: Rows) -> Answers:
        """Appends the rows and answers the last one of each request."""
        ...


class _CompiledAttend:
    """What the graph must be told about the rows of the next call."""

    def __init__(self, forward: DraftForward, device: torch.device):
        self.forward, self.device = forward, device
        self.row_offsets = self.query_offsets = self.lanes = torch.empty(0, dtype=torch.int32)
        self.starts = torch.empty(0, dtype=torch.int64)

    @property
    def ring_k(self) -> torch.Tensor:
        return self.forward.rings[0]

    @property
    def ring_v(self) -> torch.Tensor:
        return self.forward.rings[1]

    def aim(
        self,
        row_offsets: torch.Tensor,
        query_offsets: torch.Tensor,
        starts: torch.Tensor,
        lanes: torch.Tensor,
    ) -> None:
        self.row_offsets, self.query_offsets = row_offsets, query_offsets
        self.starts, self.lanes = starts, lanes

    def append(self, ids: torch.Tensor, hidden: torch.Tensor, start: int, lane: int) -> None:
        """Stores rows from position ``start``, as many at a time as the graph takes; their
        answers are nobody's."""
        for begin in range(0, ids.shape[0], self.forward.max_rows):
            some = slice(begin, begin + self.forward.max_rows)
            count = ids[some].shape[0]
            first = torch.tensor([start + begin], dtype=torch.int64, device=self.device)
            self.aim(
                torch.tensor([0, count], dtype=torch.int32, device=self.device),
                torch.tensor([0, 1], dtype=torch.int32, device=self.device),
                first,
                torch.tensor([lane], dtype=torch.int32, device=self.device),
            )
            positions = first + torch.arange(count, device=self.device)
            self.run(ids[some], hidden[some], positions)

    def run(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Answers:
        return self.forward.run(
            Rows(
                ids,
                hidden,
                positions,
                self.row_offsets,
                self.query_offsets,
                self.starts,
                self.lanes,
            )
        )


class _CompiledHead(DraftHead):
    """The graph holds embedding and lm_head, so ids and logits pass through here untouched."""

    def __init__(self, attend: _CompiledAttend):
        super().__init__()
        self._attend = attend
        self._last: Answers | None = None

    def embed(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        return ids

    def forward(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._last = self._attend.run(embedding, hidden, positions)
        return self._last.next_hidden

    def store(
        self, embedding: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return embedding, hidden  # keys and values are the graph's affair

    def logits(self, target: Target, output: torch.Tensor) -> torch.Tensor:
        if self._last is None or output is not self._last.next_hidden:
            raise RuntimeError("logits are asked for of another output than the last one")
        return self._last.logits


class CompiledProposer(MtpProposer):
    """Drafts of ``forward`` for requests of the embedded runtime.

    Raises:
        ConfigError: the graph was made for another ring, for fewer lanes, or for chains only.
    """

    def __init__(
        self,
        target: Target,
        forward: DraftForward,
        speculation: MtpConfig,
        lanes: int,
        device: torch.device,
    ):
        ring = ring_of(speculation)
        for value, wanted, rule in (
            (speculation.tree_width, 1, "draft graphs hold chains: tree_width"),
            (ring, forward.ring, "the graph was made for"),
            (max(lanes, forward.lanes), forward.lanes, "the graph's rings allow"),
        ):
            if value != wanted:
                raise ConfigError(
                    f"{value}", f"{rule} {wanted}", "change it, or build an engine for it"
                )
        attend = _CompiledAttend(forward, device)
        # The parent's own rings are never written, so they cost nothing.
        super().__init__(target, _CompiledHead(attend), speculation, lanes, torch.bfloat16, device)
        self.attend = attend  # type: ignore[assignment]
