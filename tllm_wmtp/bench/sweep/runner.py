"""Runs a suite: what is not in the file yet, cell by cell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tllm_wmtp import machine
from tllm_wmtp.bench.sweep.cells import Cell, TargetConfig, in_groups
from tllm_wmtp.bench.sweep.results import differing, row_of
from tllm_wmtp.bench.sweep.rows import Row
from tllm_wmtp.bench.sweep.store import RowFile
from tllm_wmtp.bench.sweep.suite import Suite
from tllm_wmtp.bench.sweep.target import Measured, Target


class Watch(Protocol):
    """Told how far a run is."""

    def begin(self, cells: Sequence[Cell], skipped: int) -> None:
        """Before the first cell, with those that are to be run."""

    def advance(self, cost: float) -> None:
        """So much predicted cost has been worked off since the last row."""

    def done(self, cell: Cell, row: Row) -> None: ...

    def failed(self, cell: Cell, error: Exception) -> None: ...


@dataclass
class Outcome:
    """What a run did. ``differing`` are groups of rows, old ones included, whose outputs should be
    the same."""

    file: Path
    cells: int
    done: int = 0
    skipped: int = 0
    failed: list[tuple[Cell, Exception]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    differing: list[list[Row]] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.failed and not self.differing


def suite_file(suite: Suite, folder: Path) -> Path:
    """Another suite has another file, so none is overwritten."""
    return folder / f"run-{suite.digest}.jsonl"


def run_suite(
    suite: Suite,
    folder: Path,
    watch: Watch,
    stop_on_error: bool = False,
    open_target: Callable[[TargetConfig, Mapping[str, Path]], Target] | None = None,
) -> Outcome:
    """Appends a row per cell to the suite's file; cells that it has are skipped.

    Raises:
        WmtpError: a cell cannot be run by its configuration, or the file cannot be used. Nothing
            has been run then.
    """
    make = open_target or target_of
    outcome = Outcome(suite_file(suite, folder), len(suite.cells))
    with RowFile(outcome.file) as file:
        there = {row.config_hash for row in file.rows}
        todo = [cell for cell in suite.cells if cell.digest not in there]
        outcome.skipped = len(suite.cells) - len(todo)
        planned = []
        for cells in in_groups(todo, lambda cell: cell.target):
            target = make(cells[0].target, suite.directories)
            target.prepare(cells)
            planned.append((target, cells))
        about = machine.describe()
        watch.begin(todo, outcome.skipped)
        for target, cells in planned:
            with contextlib.closing(target.run(cells, watch.advance)) as results:
                for cell, result in results:
                    row = _row(cell, result, about)
                    if isinstance(row, Row):
                        file.append(row)
                        outcome.done += 1
                        watch.done(cell, row)
                    else:
                        outcome.failed.append((cell, row))
                        watch.failed(cell, row)
                        if stop_on_error:
                            break
            if stop_on_error and outcome.failed:
                break
        outcome.rows = list(file.rows)
    outcome.differing = differing(outcome.rows)
    return outcome


def target_of(config: TargetConfig, directories: Mapping[str, Path]) -> Target:
    """The target that a configuration names."""
    if config.kind == "embedded":
        from tllm_wmtp.bench.sweep.embedded import EmbeddedTarget

        return EmbeddedTarget(directories)
    from tllm_wmtp.bench.sweep.endpoint import EndpointTarget

    return EndpointTarget(config, directories)


def _row(cell: Cell, result: Measured | Exception, about: Mapping[str, Any]) -> Row | Exception:
    if isinstance(result, Exception):
        return result
    try:
        return row_of(cell, result, about)
    except Exception as error:
        return error
