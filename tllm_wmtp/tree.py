"""Draft trees: what a verify and a draft need to know about rows that share ancestors.

A step verifies ``N = 1 + width * draft_len`` rows per request: row 0 is the pending token, the
root; then every level has ``width`` rows, level 1 first. ``parents [B, N]`` (int64) names the row
that each row follows, one of the level before; the root is its own parent. So ancestors come before
their descendants, and a row's logical position is its request's length plus its level.

A chain is the tree of width 1. Everything here is tensor arithmetic whose cost grows with the
depth, not with the number of rows; only :func:`children` runs on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tllm_wmtp.errors import ConfigError

__all__ = [
    "TreeShape",
    "ancestor_words",
    "ancestors",
    "children",
    "convolution_index",
    "path_to",
    "steps_up",
]

_WORD_BITS = 32


@dataclass(frozen=True)
class TreeShape:
    """``width`` rows on each of ``depth - 1`` levels below the root.

    A step emits at most ``depth`` tokens, as a chain of that depth does.
    """

    width: int
    depth: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(
                f"tree width {self.width}", "a level has at least one row", "pass 1 for a chain"
            )
        if self.depth < 2:
            raise ConfigError(
                f"tree depth {self.depth}", "a step drafts at least one level", "raise depth"
            )

    @property
    def draft_len(self) -> int:
        """Levels below the root."""
        return self.depth - 1

    @property
    def rows(self) -> int:
        """Rows of a request's tree, the root's included."""
        return 1 + self.width * self.draft_len

    def level(self, number: int) -> slice:
        """The rows of level ``number``; level 0 is the root."""
        if not 0 <= number <= self.draft_len:
            raise ValueError(f"level {number}: must lie in [0, {self.draft_len}]; raise depth")
        begin = 1 + (number - 1) * self.width
        return slice(0, 1) if number == 0 else slice(begin, begin + self.width)

    def levels(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Level of each row, int64 ``[N]``: what its position adds to the request's length."""
        rows = torch.arange(self.rows, device=device)
        return (rows + self.width - 1).div_(self.width, rounding_mode="floor")


def steps_up(shape: TreeShape, parents: torch.Tensor) -> torch.Tensor:
    """Row reached from each row by 0 .. depth - 1 steps towards the root, int64 ``[B, N, depth]``.

    From the root every step stays there. The other functions start from this.
    """
    if parents.dtype != torch.int64 or parents.dim() != 2 or parents.shape[1] != shape.rows:
        raise ValueError(
            f"parents is {parents.dtype} {tuple(parents.shape)}: must be int64 [B, {shape.rows}] "
            f"for a tree of width {shape.width} and depth {shape.depth}; pass one row index per row"
        )
    rows = torch.arange(shape.rows, device=parents.device).expand_as(parents)
    reached = [rows]
    for _ in range(shape.draft_len):
        reached.append(parents.gather(1, reached[-1]))
    return torch.stack(reached, dim=-1)


def ancestors(steps: torch.Tensor) -> torch.Tensor:
    """``[B, N, N]`` bool: row i descends from row j, or is it."""
    batch, rows, _ = steps.shape
    related = torch.zeros(batch, rows, rows, dtype=torch.bool, device=steps.device)
    return related.scatter_(2, steps, True)


def ancestor_words(related: torch.Tensor) -> torch.Tensor:
    """The attention operators' ancestor mask: ``[B, M, N]`` bool as int32 ``[B * M, words]``.

    Bit ``i % 32`` of word ``i // 32`` says whether the query row sees appended row i. A part of
    :func:`ancestors` serves a launch that appends only these rows and asks only these queries.
    """
    bits = F.pad(related.flatten(0, 1), (0, -related.shape[-1] % _WORD_BITS))
    weights = torch.ones((), dtype=torch.int64, device=related.device) << torch.arange(
        _WORD_BITS, device=related.device
    )
    words = (bits.unflatten(-1, (-1, _WORD_BITS)) * weights).sum(-1)
    return words.to(torch.int32)  # the same 32 bits, the highest becomes the sign


def convolution_index(steps: torch.Tensor, levels: torch.Tensor, kernel: int) -> torch.Tensor:
    """Inputs of a causal convolution along each row's path, int64 ``[B, N, kernel]``, oldest first.

    Indices count into the request's last ``kernel - 1`` inputs followed by the N rows. The last
    entry is the row itself, and a path that is shorter than the kernel goes on into the history.
    What follows an accepted row has ``index[b, row, 1:]`` as its history.
    """
    history = kernel - 1
    back = torch.arange(history, -1, -1, device=steps.device)
    past_root = back - levels[:, None]  # [N, kernel]; > 0: so many inputs before the root
    reachable = torch.minimum(back, levels[:, None]).clamp_(max=steps.shape[-1] - 1)
    rows = steps.gather(2, reachable.expand(steps.shape[0], -1, -1))
    return torch.where(past_root > 0, history - past_root, history + rows)


def path_to(
    steps: torch.Tensor, levels: torch.Tensor, leaf: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows from the root to ``leaf`` (int64 ``[B]``) and how many they are.

    Returns:
        ``rows [B, depth]`` and ``counts [B]``, both int64. ``rows[b, :counts[b]]`` ascends from 0
        to ``leaf[b]``; the entries after it repeat the leaf.
    """
    level = levels[leaf]
    order = torch.arange(steps.shape[-1], device=steps.device)
    up = (level[:, None] - order).clamp_(min=0)
    of_leaf = steps[torch.arange(leaf.shape[0], device=steps.device), leaf]
    return of_leaf.gather(1, up), level + 1


def children(parents: torch.Tensor) -> list[list[list[int]]]:
    """``children(parents)[b][row]``: rows that follow ``row``, ascending. Copies to the host."""
    found: list[list[list[int]]] = []
    for of_request in parents.tolist():
        below: list[list[int]] = [[] for _ in of_request]
        for row, parent in enumerate(of_request[1:], start=1):
            below[parent].append(row)
        found.append(below)
    return found
