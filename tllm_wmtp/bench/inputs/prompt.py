"""What every input is: ids, the same as text, and the answers that are expected."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

#: How an output is scored (see :mod:`tllm_wmtp.bench.inputs.scoring`).
SCORINGS = ("all", "letter", "target", "continuation", "none")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        task: a name of :data:`tllm_wmtp.bench.inputs.TASKS`.
        ids: what ``tokenizer.encode(text).ids`` gives, special tokens that it adds included.
        text: the prompt.
        answers: what a right output holds; empty where the task has no answer.
        options: every setting that the prompt was made with, resolved; JSON values only.
        scoring: one of :data:`SCORINGS`.
        seed: of all prompts made together.
        index: of this one among them.
        needles: index of the first token of each answer-bearing record, in ascending order.
        cut_tokens: tokens of a published context that were left out to fit the budget.
        source: identifier of a published item.
    """

    task: str
    ids: list[int] = field(repr=False)
    text: str = field(repr=False)
    answers: tuple[str, ...]
    options: dict[str, Any]
    scoring: str
    seed: int
    index: int = 0
    needles: tuple[int, ...] = ()
    cut_tokens: int = 0
    source: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def depths(self) -> tuple[float, ...]:
        """Where each of :attr:`needles` begins, as a share of the prompt."""
        return tuple(position / len(self.ids) for position in self.needles)

    @property
    def name(self) -> str:
        return f"{self.task}-{self.tokens}-{self.seed}-{self.index}"

    @property
    def text_sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def ids_sha256(self) -> str:
        """Of the ids as decimal numbers separated by commas."""
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()
