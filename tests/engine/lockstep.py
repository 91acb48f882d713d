"""The embedded runtime's draft head and a draft graph side by side, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tllm_wmtp.checkpoint.loader import LoadedModel
from tllm_wmtp.config import EngineConfig, MtpConfig
from tllm_wmtp.engine.draft import DraftSpec, write_draft_graph
from tllm_wmtp.engine.proposer import CompiledProposer
from tllm_wmtp.engine.reference import OnnxDraft
from tllm_wmtp.engine.weights import open_model
from tllm_wmtp.executor.draft import Drafts, MtpProposer, ring_of
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Request
from tllm_wmtp.sampling import SamplingParams


class _MostLikely:
    """The sampler of the second opinion, which must not touch the step's own."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def draft(self, logits: torch.Tensor) -> torch.Tensor:
        self.logits.append(logits)
        return logits.argmax(-1)


@dataclass
class Record:
    """``steps`` counts requests: one step of four requests is four."""

    steps: int = 0
    differing: int = 0
    histogram: list[int] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    prefix_hit_tokens: int = 0


class Lockstep:
    """Proposes what the runtime's head does, and lets the graph propose on the same rows."""

    def __init__(self, own: MtpProposer, other: CompiledProposer):
        self.own, self.other, self.record = own, other, Record()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def acquire(self, request: Request) -> None:
        self.other.acquire(request)  # both pools hand out the same lanes in the same order
        self.own.acquire(request)

    def release(self, request: Request) -> None:
        if request.lane is not None:
            self.other.pool.release(request.lane)
        self.own.release(request)

    def store(self, request: Request, start: int, hidden: torch.Tensor) -> None:
        self.other.store(request, start, hidden)
        self.own.store(request, start, hidden)

    def copy_ring(self, request: Request, rows: int) -> tuple[torch.Tensor, ...]:
        return self.own.copy_ring(request, rows) + self.other.copy_ring(request, rows)

    def paste_ring(self, request: Request, ring: tuple[torch.Tensor, ...], rows: int) -> None:
        self.own.paste_ring(request, ring[:2], rows)
        self.other.paste_ring(request, ring[2:], rows)

    def propose(self, requests: Sequence[Request], draft_len: int, sampler: Any) -> Drafts:
        sampler_of_graph: Any = _MostLikely()
        theirs = self.other.propose(requests, draft_len, sampler_of_graph).tokens
        drafts = self.own.propose(requests, draft_len, sampler)
        self.record.steps += len(requests)
        self.record.differing += int((theirs != drafts.tokens).any(1).sum())
        return drafts


def graph_of(
    checkpoint: Path, folder: Path, speculation: MtpConfig, lanes: int, **choices: Any
) -> OnnxDraft:
    spec = DraftSpec(ring_of(speculation), lanes, max_rows=48, **choices)
    folder.mkdir(parents=True, exist_ok=True)
    return OnnxDraft(write_draft_graph(open_model(checkpoint), spec, folder).file, spec)


def run(
    model: LoadedModel,
    graph: OnnxDraft,
    speculation: MtpConfig,
    prompts: Sequence[list[int]],
    tokens: int,
    dtype: str = "float32",
    proposer: type[CompiledProposer] = CompiledProposer,
    lanes: int = 0,
) -> Record:
    """All prompts as one batch, or ``lanes`` at a time, to ``tokens`` tokens each."""
    lanes, device = lanes or len(prompts), torch.device("cpu")
    assert model.head is not None
    kind = getattr(torch, dtype)
    own = MtpProposer(model.target, model.head, speculation, lanes, kind, device)
    lockstep: Any = Lockstep(own, proposer(model.target, graph, speculation, lanes, device))
    limits = EngineConfig(
        speculation=speculation, max_batch_size=lanes, max_seq_len=4096, prefill_chunk=128,
        dtype=dtype,
    )  # fmt: skip
    engine = Engine(model, limits, lockstep)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while engine.step():
        pass
    record: Record = lockstep.record
    record.histogram = [0] * speculation.depth
    for request in requests:
        assert request.error is None, request.error
        record.outputs.append(request.output_ids)
        record.prefix_hit_tokens += request.metrics.prefix_hit_tokens
        for accepted, count in enumerate(request.metrics.accepted_histogram):
            record.histogram[accepted] += count
    return record
