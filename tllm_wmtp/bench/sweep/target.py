"""What a target gives for a cell, and what one has to do."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tllm_wmtp.bench.inputs import Prompt
from tllm_wmtp.bench.sweep.cells import Cell
from tllm_wmtp.bench.sweep.protocol import Answer, Iteration


@dataclass(frozen=True)
class Floor:
    """``bytes_moved``: the fewest that a step reads; ``bandwidth`` in bytes per second, None where
    it was not measured."""

    bytes_moved: int
    bandwidth: float | None


@dataclass(frozen=True)
class Measured:
    """All requests of a cell, in order; ``prompts`` are theirs. ``missing`` says why the target
    does not show something, by the names of :class:`tllm_wmtp.bench.sweep.rows.Row`."""

    prompts: Sequence[Prompt]
    answers: Sequence[Answer]
    iterations: Sequence[Iteration]
    floor: Floor | None = None
    device: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


#: A cell with its measurement, or with what went wrong.
Result = tuple[Cell, Measured | Exception]
#: Told how much predicted cost has been worked off.
Advance = Callable[[float], None]


class Target(Protocol):
    """Who answers a suite's cells."""

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Checks that these cells can be answered, before any is.

        Raises:
            WmtpError: one cannot.
        """
        ...

    def run(self, cells: Sequence[Cell], advance: Advance) -> Generator[Result, None, None]:
        """Answers the cells, in an order that suits the target; one that fails takes no other with
        it."""
        ...
