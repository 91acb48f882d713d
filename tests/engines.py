"""Engines driven by hand, proposers that no checkpoint has, and what a head should propose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.config import EngineConfig, KvCacheConfig, MtpConfig
from tllm_wmtp.executor.draft import Drafts, MtpProposer, NullProposer, Proposer
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Request
from tllm_wmtp.executor.sampler import StepSampler
from tllm_wmtp.models.causal import CausalStates
from tllm_wmtp.sampling import SamplingParams


class ScriptedProposer(NullProposer):
    """Proposes whatever ``script(request, draft_len)`` says."""

    def __init__(self, depth: int, script: Callable[[Request, int], Sequence[int]]):
        super().__init__(torch.device("cpu"))
        self.depth, self.script = depth, script

    def propose(self, requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        drafts = [list(self.script(request, draft_len)) for request in requests]
        return Drafts(torch.tensor(drafts, dtype=torch.int64))


def engine(
    checkpoint: Path,
    speculation: MtpConfig | None = None,
    proposer: Proposer | None = None,
    **limits: Any,
) -> Engine:
    limits.setdefault("max_seq_len", 512)
    limits.setdefault("prefill_chunk", 32)
    limits.setdefault("kv_cache", KvCacheConfig(tokens_per_page=16, enable_block_reuse=False))
    model = load_model(checkpoint, with_head=speculation is not None)
    return Engine(model, EngineConfig(speculation=speculation, **limits), proposer)


def run(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Request]:
    """All prompts together, to the end."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = [engine.submit(p, s) for p, s in zip(prompts, each, strict=True)]
    while engine.step():
        pass
    for request in requests:
        assert request.error is None, request.error
    return requests


def record_proposals(engine: Engine) -> dict[int, list[list[int]]]:
    """Every draft of every later step, by request id."""
    made: dict[int, list[list[int]]] = {}
    propose = engine.proposer.propose

    def recording(requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        drafts = propose(requests, draft_len, sampler)
        for request, row in zip(requests, drafts.tokens.tolist(), strict=True):
            made.setdefault(request.request_id, []).append(row)
        return drafts

    engine.proposer.propose = recording  # type: ignore[method-assign]
    return made


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output_ids for request in requests]


@torch.inference_mode()
def whole_sequence_greedy(checkpoint: Path, prompt: list[int], n_tokens: int) -> list[int]:
    """The slowest way to the same tokens: no cache, no pool, no batch."""
    target = load_model(checkpoint).target
    tokens = list(prompt)
    for _ in range(n_tokens):
        ids = torch.tensor([tokens])
        positions = torch.arange(len(tokens)).unsqueeze(0)
        states = CausalStates(target.config.linear_conv_kernel_dim)
        tokens.append(int(target.logits(target(ids, positions, states)[0, -1]).argmax()))
    return tokens[len(prompt) :]


class HeadOracle:
    """The draft phase without a ring: all rows of the head from position 0 in one attention under
    a mask, with the exact hidden states of a whole-sequence forward for every committed row."""

    @torch.inference_mode()
    def __init__(
        self, proposer: MtpProposer, request: Request, visible_window: int, n_sink: int
    ) -> None:
        self.target, self.head = proposer.target, proposer.head
        self.window, self.n_sink = visible_window, n_sink
        self.tokens = request.prompt_ids + request.output_ids
        known = len(self.tokens) - 1  # rows whose hidden state the target has
        states = CausalStates(self.target.config.linear_conv_kernel_dim)
        ids = torch.tensor([self.tokens[:known]])
        self._hidden = self.target(ids, torch.arange(known).unsqueeze(0), states)[0]
        self._outputs: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, path: tuple[int, ...] = ()) -> torch.Tensor:
        """``[V]`` of the draft that follows the drafts ``path``."""
        return self.target.logits(self._output(path))

    def _output(self, path: tuple[int, ...]) -> torch.Tensor:
        if path not in self._outputs:
            before = [self._output(path[:count]) for count in range(len(path))]
            hidden = torch.cat((self._hidden, *(each.unsqueeze(0) for each in before)))
            following = torch.tensor([*self.tokens[1:], *path])
            rows = following.numel()
            query, key = torch.arange(rows)[:, None], torch.arange(rows)
            mask = (key <= query) & ((key < self.n_sink) | (key > query - self.window))

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                group = q.shape[1] // k.shape[1]
                keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
                scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
                weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
                return torch.einsum("hqk,khd->qhd", weights, values)

            embedding = self.target.embed_tokens(following)
            self._outputs[path] = self.head(embedding, hidden, torch.arange(rows), attend)[-1]
        return self._outputs[path]


def oracle_proposals(
    proposer: MtpProposer, request: Request, visible_window: int, n_sink: int
) -> list[int]:
    """The likeliest drafts, one after the other, by :class:`HeadOracle`."""
    oracle = HeadOracle(proposer, request, visible_window, n_sink)
    drafts: tuple[int, ...] = ()
    for _ in range(proposer.depth - 1):
        drafts = (*drafts, int(oracle.logits(drafts).argmax()))
    return list(drafts)
