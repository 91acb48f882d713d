"""``wmtp bench run``: a suite, cell by cell."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tllm_wmtp.cli import arguments

if TYPE_CHECKING:
    from tllm_wmtp.bench.sweep.cells import Cell
    from tllm_wmtp.bench.sweep.rows import Row
    from tllm_wmtp.bench.sweep.runner import Outcome
    from tllm_wmtp.bench.sweep.suite import Suite


def add_parser(kinds: argparse._SubParsersAction[Any]) -> None:
    run = kinds.add_parser("run", help="a suite of inputs, arms and settings")
    run.add_argument("suite", type=Path, metavar="SUITE.yaml", help="what to run")
    run.add_argument(
        "--out", type=Path, help="folder of the results, one file per suite; taken up if it exists"
    )
    run.add_argument(
        "--dry-run", "--list", action="store_true", help="list the cells, and run none"
    )
    run.add_argument(
        "--stop-on-error", action="store_true", help="end with the first cell that fails"
    )
    arguments.add_json(run)
    run.set_defaults(run=run_suite_file)


def run_suite_file(args: argparse.Namespace) -> int:
    from tllm_wmtp.bench.sweep.suite import Names, load_suite
    from tllm_wmtp.errors import ConfigError

    names = Names(arguments.count, arguments.context, arguments.model_directory)
    suite = load_suite(args.suite, names)
    if args.dry_run:
        print(json.dumps(listing(suite)) if args.json else "\n".join(cells_lines(suite)))
        return 0
    if args.out is None:
        raise ConfigError(
            "no --out", "every cell's row goes to a file", "add --out FOLDER, or use --dry-run"
        )
    from tllm_wmtp.bench.sweep.runner import run_suite

    with Bar(Console(stderr=True)) as bar:
        outcome = run_suite(suite, args.out, bar, args.stop_on_error)
    if args.json:
        print(json.dumps(summary(outcome, suite)))
    else:
        print("\n".join([*rows_lines(outcome.rows), *verdict(outcome)]))
    return 0 if outcome.holds else 1


def listing(suite: Suite) -> dict[str, Any]:
    cells = [{"config_hash": cell.digest, **cell.config} for cell in suite.cells]
    return {"config_hash": suite.digest, "cells": len(cells), "list": cells}


def summary(outcome: Outcome, suite: Suite) -> dict[str, Any]:
    return {
        "benchmark": "run",
        "config_hash": suite.digest,
        "file": str(outcome.file),
        "cells": outcome.cells,
        "done": outcome.done,
        "skipped": outcome.skipped,
        "failed": len(outcome.failed),
        "errors": [
            {"config_hash": cell.digest, "cell": cell.label, "error": _message(error)}
            for cell, error in outcome.failed
        ],
        "differing": [[row.config_hash for row in group] for group in outcome.differing],
    }


def verdict(outcome: Outcome) -> list[str]:
    """What was done, and what does not hold."""
    lines = [
        f"{outcome.done} of {outcome.cells} cells run, {outcome.skipped} were there, "
        f"{len(outcome.failed)} failed: {outcome.file}"
    ]
    for group in outcome.differing:
        arms = ", ".join(
            row.arm + (f" d{row.depth}" if row.depth > 1 else "")
            + (f" W{row.window}" if row.window is not None else "")
            for row in group
        )  # fmt: skip
        first = group[0]
        lines.append(
            f"the outputs of {first.model} on {first.input}, {first.context:,} tokens, "
            f"{first.kv_dtype}, batch {first.batch}, seed {first.seed} DIFFER among {arms}"
        )
    return lines


class Bar:
    """One bar over all cells by their predicted cost, with the time left; a line per cell that is
    done where there is no terminal."""

    def __init__(self, console: Console):
        self._console = console
        self._done, self._ahead = 0.0, 0.0
        self._count, self._cells = 0, 0
        self._task: TaskID | None = None
        self._progress = Progress(
            BarColumn(bar_width=16),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),  # last, where a narrow terminal cuts it
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, cells: Sequence[Cell], skipped: int) -> None:
        self._cells = len(cells)
        note = f"{len(cells)} cells" + (f", {skipped} are there" if skipped else "")
        self._console.print(note, style="dim", highlight=False)
        if cells:
            total = sum(cell.cost for cell in cells)
            self._task = self._progress.add_task("loading", total=total, left="")

    def advance(self, cost: float) -> None:
        self._ahead += cost
        self._show()

    def done(self, cell: Cell, row: Row) -> None:
        self._finish(cell)
        told = "" if row.tpot_ms is None else f" TPOT {row.tpot_ms:.2f} ms, AL {row.al:.2f}"
        self._line(cell, told)

    def failed(self, cell: Cell, error: Exception) -> None:
        self._finish(cell)
        self._console.print(
            f"{cell.label}: {_message(error)}", style="red", highlight=False, markup=False
        )

    def _finish(self, cell: Cell) -> None:
        self._done += cell.cost
        self._ahead = max(0.0, self._ahead - cell.cost)
        self._count += 1
        self._show(cell.label)

    def _line(self, cell: Cell, told: str) -> None:
        if not self._console.is_terminal:
            text = f"{self._count}/{self._cells} {cell.label}{told}"
            self._console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    def _show(self, label: str | None = None) -> None:
        if self._task is None:
            return
        task = self._progress.tasks[0]
        worked, total = self._done + self._ahead, task.total or 0.0
        left = ""
        if worked and task.elapsed:
            seconds = max(0, round(task.elapsed * (total - worked) / worked))
            left = f"{seconds // 60}:{seconds % 60:02d} left"
        changed: dict[str, Any] = {} if label is None else {"description": label}
        self._progress.update(self._task, completed=worked, left=left, **changed)


def cells_lines(suite: Suite) -> list[str]:
    names = ("cell", "model", "input", ">context", "arm", ">depth", ">window", ">sink", "KV",
             ">batch", ">seed", "target")  # fmt: skip
    rows = [
        (
            cell.digest,
            cell.model,
            cell.input.task,
            f"{cell.context:,}",
            cell.arm,
            str(cell.depth),
            "" if cell.window is None else str(cell.window),
            "" if cell.window is None else str(cell.n_sink),
            cell.kv_dtype,
            str(cell.batch),
            str(cell.seed),
            cell.target.kind,
        )
        for cell in suite.cells
    ]
    return [*aligned(names, rows), f"{len(suite.cells)} cells"]


def rows_lines(rows: Sequence[Row]) -> list[str]:
    names = ("model", "input", ">context", "arm", ">depth", ">window", "KV", ">batch", ">seed",
             ">AL", ">TPOT ms", ">95 %", ">TTFT s", ">tokens/s")  # fmt: skip
    shown = []
    for row in rows:
        span = row.tpot_ms_interval
        shown.append(
            (
                row.model,
                row.input,
                f"{row.context:,}",
                row.arm,
                str(row.depth),
                "" if row.window is None else str(row.window),
                row.kv_dtype,
                str(row.batch),
                str(row.seed),
                _shown(row.al),
                _shown(row.tpot_ms),
                "" if span is None else f"{span[0]:.2f}-{span[1]:.2f}",
                _shown(row.ttft_s),
                _shown(row.tokens_per_s, 0),
            )
        )
    return aligned(names, shown)


def aligned(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns, never cut; a name that begins with ``>`` is that of a right-aligned one."""
    heads = [name.removeprefix(">") for name in names]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    marks = [">" if name.startswith(">") else "<" for name in names]
    return [
        "  ".join(
            f"{text:{mark}{width}}" for text, mark, width in zip(line, marks, widths, strict=True)
        ).rstrip()
        for line in (heads, *rows)
    ]


def _shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _message(error: Exception) -> str:
    from tllm_wmtp.errors import WmtpError

    return str(error) if isinstance(error, WmtpError) else f"{type(error).__name__}: {error}"
