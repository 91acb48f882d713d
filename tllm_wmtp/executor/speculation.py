"""The speculation loop's body: draft, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from tllm_wmtp.executor.draft import Drafts, Proposer
from tllm_wmtp.executor.request import Request
from tllm_wmtp.executor.sampler import StepSampler, Verdict
from tllm_wmtp.models.spec import Target
from tllm_wmtp.models.states import VerifyStates
from tllm_wmtp.tree import children


@dataclass(frozen=True)
class Step:
    """``verdict`` is what every request gained; ``draft_len`` the levels that were drafted.

    ``extend_s`` is the part of ``draft_s`` that feeds the accepted rows and chooses the first
    drafts; 0 where nothing was drafted, or by a proposer that does not measure it.
    """

    verdict: Verdict
    draft_len: int
    draft_s: float
    verify_s: float
    extend_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.draft_s + self.verify_s


def speculative_step(
    target: Target,
    proposer: Proposer,
    requests: Sequence[Request],
    states: VerifyStates,
    draft_len: int,
) -> Step:
    """One step of all ``requests``, with ``draft_len`` drafts (or levels of a tree) each.

    Row t of the verify sees the drafts before it, so it chooses as the target alone would if they
    are accepted, and its choice takes the place of the first one refused. The output is therefore
    the target's, whatever was proposed.
    """
    begin = _now(states)
    sampler = StepSampler([request.sampling for request in requests])
    drafts = proposer.propose(requests, draft_len, sampler)
    drafted = _now(states)
    extend_s = 0.0 if drafts.extend_s is None else drafts.extend_s()

    pending = torch.tensor([[request.pending] for request in requests], device=states.starts.device)
    rows = torch.cat((pending, drafts.tokens), dim=1)
    states.begin([request.kv_length for request in requests], drafts.parents)
    hidden = target(rows, states.positions, states)
    verdict, kept = _accept(requests, sampler, target.logits(hidden), rows, drafts, hidden, states)

    for request, chosen, request_hidden in zip(requests, verdict.tokens, kept, strict=True):
        tokens = chosen[: len(request_hidden)]
        request.advance(tokens)
        proposer.keep(request, tokens, request_hidden)
    return Step(verdict, draft_len, drafted - begin, _now(states) - drafted, extend_s)


def _accept(
    requests: Sequence[Request],
    sampler: StepSampler,
    logits: torch.Tensor,
    rows: torch.Tensor,
    drafts: Drafts,
    hidden: torch.Tensor,
    states: VerifyStates,
) -> tuple[Verdict, list[torch.Tensor]]:
    """The verdict, committed, and the hidden states ``[c, H]`` of each request's accepted rows.

    Rows after a token that ends their request are not committed: what follows in a conversation is
    not what was drafted there.
    """
    if drafts.parents is None:
        verdict = sampler.verify(logits, drafts.tokens)
        counts = _counts(requests, verdict)
        states.commit(torch.tensor(counts, device=rows.device))
        return verdict, [each[:n] for each, n in zip(hidden, counts, strict=True)]
    verdict, paths = sampler.walk(logits, rows, children(drafts.parents))
    paths = [path[:n] for path, n in zip(paths, _counts(requests, verdict), strict=True)]
    states.commit_paths(torch.tensor([path[-1] for path in paths], device=rows.device))
    return verdict, [each[path] for each, path in zip(hidden, paths, strict=True)]


def _counts(requests: Sequence[Request], verdict: Verdict) -> list[int]:
    each = zip(requests, verdict.tokens, strict=True)
    return [request.count_to_end(tokens) for request, tokens in each]


def _now(states: VerifyStates) -> float:
    if states.starts.is_cuda:
        torch.cuda.synchronize(states.starts.device)
    return perf_counter()
