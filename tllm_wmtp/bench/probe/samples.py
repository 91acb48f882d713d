"""What was seen at every draft, as tensors over Q drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True)
class Outcome:
    """One read against the native one, over Q drafts.

    Args:
        token: its likeliest token.
        same: whether that is the native read's.
        kl: KL(native || this), nats.
        change: ``|o - o'| / |o|`` of what the attention answers.
        jaccard: overlap of the chosen experts; None for a head without.
    """

    token: torch.Tensor
    same: torch.Tensor
    kl: torch.Tensor
    change: torch.Tensor
    jaccard: torch.Tensor | None

    @classmethod
    def pool(cls, parts: Sequence[Outcome]) -> Outcome:
        """The drafts of all ``parts``, in their order."""
        return cls(
            **{
                field.name: _joined([getattr(p, field.name) for p in parts])
                for field in fields(cls)
            }
        )


def _joined(parts: Sequence[torch.Tensor | None]) -> Any:
    return None if parts[0] is None else torch.cat([part for part in parts if part is not None])


@dataclass(frozen=True)
class Samples:
    """Q drafts of N positions. Heads, bands: as :class:`.measures.AttentionRecord` has them.

    Args:
        draft: 1 for the first draft of a step, 2 for the one after it, ...
        position: which of the N positions the step starts at.
        margin: best logit less second best, of the native read.
        judged: whether all drafts before are the target's own tokens and ``truth`` is known.
        native, truth: likeliest token of the native read, and the target's.
        outcomes: of the other reads, by name.
    """

    draft: torch.Tensor
    position: torch.Tensor
    margin: torch.Tensor
    judged: torch.Tensor
    native: torch.Tensor
    truth: torch.Tensor
    keys: torch.Tensor
    mass: torch.Tensor
    value_norm: torch.Tensor
    tail_entropy: torch.Tensor
    tail_participation: torch.Tensor
    outcomes: dict[str, Outcome]

    @classmethod
    def pool(cls, parts: Sequence[Samples]) -> Samples:
        """All drafts of several prompts; no two prompts share a position."""
        joined: dict[str, Any] = {
            field.name: _joined([getattr(part, field.name) for part in parts])
            for field in fields(cls)
            if field.name not in ("position", "outcomes")
        }
        positions, count = [], 0
        for part in parts:
            positions.append(part.position + count)
            count += int(part.position.max()) + 1
        outcomes = {
            name: Outcome.pool([part.outcomes[name] for part in parts])
            for name in parts[0].outcomes
        }
        return cls(position=torch.cat(positions), outcomes=outcomes, **joined)
