"""The speculation loop's body: draft, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from tllm_wmtp.executor.draft import Proposer
from tllm_wmtp.executor.request import Request
from tllm_wmtp.models.spec import Target
from tllm_wmtp.models.states import VerifyStates


@dataclass(frozen=True)
class Step:
    """``tokens[b]`` is what request b gained: its accepted drafts and the target's own token.

    ``finite[b]`` is False where the target's logits held NaN or infinity, so they chose nothing.
    """

    tokens: list[list[int]]
    finite: list[bool]
    draft_s: float
    verify_s: float

    @property
    def step_s(self) -> float:
        return self.draft_s + self.verify_s


def speculative_step(
    target: Target, proposer: Proposer, requests: Sequence[Request], states: VerifyStates
) -> Step:
    """One step of all ``requests``.

    Row t of the verify sees the drafts before it, so its most likely token is the target's own if
    all of them were accepted, and takes the place of the first one refused. The output is
    therefore the target's, whatever was proposed.
    """
    begin = _now(states)
    drafts = proposer.propose(requests)  # [B, gamma]
    drafted = _now(states)

    pending = torch.tensor([[request.pending] for request in requests], device=drafts.device)
    states.begin([request.kv_length for request in requests])
    hidden = target(torch.cat((pending, drafts), dim=1), states.positions, states)
    highest, choices = target.logits(hidden).max(-1)  # [B, depth]; the highest shows any NaN

    accepted = matching_prefix(drafts, choices)
    states.commit(accepted + 1)

    tokens = []
    rows = zip(requests, choices.tolist(), accepted.tolist(), hidden, strict=True)
    for request, chosen, count, request_hidden in rows:
        tokens.append(chosen[: count + 1])
        request.advance(tokens[-1], request_hidden[: count + 1])
    finite = highest.isfinite().all(1).tolist()
    return Step(tokens, finite, drafted - begin, _now(states) - drafted)


def matching_prefix(drafts: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """How many leading ``drafts [B, gamma]`` equal ``choices [B, gamma + 1]``: int64 ``[B]``."""
    return (drafts == choices[:, :-1]).long().cumprod(dim=1).sum(dim=1)


def _now(states: VerifyStates) -> float:
    if states.starts.is_cuda:
        torch.cuda.synchronize(states.starts.device)
    return perf_counter()
