"""The host arithmetic of one speculative step on a compiled engine: plan, then run.

A step is one forward that feeds the accepted rows of every request, at most ``depth`` each, padded
to a fixed number of rows, and ``depth - 2`` forwards of one row each, whose tokens and hidden
states are the last forward's outputs. Everything else a forward reads is known before the step, so
the whole step can be captured as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_wmtp.engine.proposer import DraftForward, Rows
from tllm_wmtp.errors import RequestError


@dataclass(frozen=True)
class AcceptedRows:
    """Rows that a request's ring has not seen: ``token_ids`` follow positions ``start``, ..."""

    lane: int
    start: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """Inputs of a step for b requests, on the host.

    ``token_ids``, ``positions`` ``[b * depth]`` with padding after ``count`` rows; ``row_offsets``
    ``[b + 1]``, ``starts`` and ``lanes`` ``[b]`` of the first forward; ``one_each [b + 1]``, the
    offsets of one row or answer per request; ``later_positions [depth - 2, b]`` of the others.
    """

    count: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    row_offsets: torch.Tensor
    starts: torch.Tensor
    lanes: torch.Tensor
    one_each: torch.Tensor
    later_positions: torch.Tensor


def plan_step(requests: Sequence[AcceptedRows], depth: int) -> StepPlan:
    """The plan of one step of ``requests``.

    Raises:
        RequestError: a request has no row, or more than ``depth``; or two share a lane.
    """
    lanes = [one.lane for one in requests]
    if len(set(lanes)) != len(lanes):
        raise RequestError(f"lanes {lanes}", "each request owns a ring", "give each its own lane")
    for one in requests:
        if not 1 <= len(one.token_ids) <= depth:
            raise RequestError(
                f"{len(one.token_ids)} accepted rows on lane {one.lane}",
                f"a step feeds 1 to {depth} per request",
                "store earlier rows first",
            )
    tokens = [token for one in requests for token in one.token_ids]
    places = [one.start + i for one in requests for i in range(len(one.token_ids))]
    padding = [0] * (depth * len(requests) - len(tokens))
    ends = torch.tensor([len(one.token_ids) for one in requests]).cumsum(0)
    after = torch.tensor([one.start + len(one.token_ids) for one in requests], dtype=torch.int64)
    return StepPlan(
        count=len(tokens),
        token_ids=torch.tensor([*tokens, *padding], dtype=torch.int64),
        positions=torch.tensor([*places, *padding], dtype=torch.int64),
        row_offsets=torch.cat((torch.zeros(1), ends)).to(torch.int32),
        starts=torch.tensor([one.start for one in requests], dtype=torch.int64),
        lanes=torch.tensor(lanes, dtype=torch.int32),
        one_each=torch.arange(len(requests) + 1, dtype=torch.int32),
        later_positions=after + torch.arange(depth - 2, dtype=torch.int64)[:, None],
    )


def run_step(plan: StepPlan, hidden: torch.Tensor, forward: DraftForward) -> torch.Tensor:
    """Drafts ``[b, depth - 1]`` of the plan, forward by forward: what a captured step replays.

    ``hidden [count, H]`` belongs to the accepted rows.
    """
    padding = plan.token_ids.shape[0] - plan.count
    padded = torch.cat((hidden, hidden.new_zeros(padding, hidden.shape[1])))
    answers = forward.run(
        Rows(
            plan.token_ids,
            padded,
            plan.positions,
            plan.row_offsets,
            plan.one_each,
            plan.starts,
            plan.lanes,
        )
    )
    drafts = [answers.logits.argmax(-1)]
    for positions in plan.later_positions:
        answers = forward.run(
            Rows(
                drafts[-1],
                answers.next_hidden,
                positions,
                plan.one_each,
                plan.one_each,
                positions,
                plan.lanes,
            )
        )
        drafts.append(answers.logits.argmax(-1))
    return torch.stack(drafts, dim=1)
