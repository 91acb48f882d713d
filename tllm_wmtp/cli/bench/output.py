"""What every ``wmtp bench`` shares: its options, its progress bar and its file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tllm_wmtp.cli import arguments
from tllm_wmtp.errors import ConfigError


def add_output(parser: argparse.ArgumentParser) -> None:
    arguments.add_json(parser)
    parser.add_argument("--out", type=folder, help="a folder that also gets the JSON, as a file")


def folder(text: str) -> Path:
    """A folder that is there or can be made; refused before anything is measured."""
    path = Path(text)
    there = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r}: it must be a folder that can be written, and {there} is not; "
            "choose another one"
        )
    return path


def with_progress(
    run: Callable[[Callable[[str, int, int], None]], dict[str, Any]], label: str
) -> dict[str, Any]:
    """The result of ``run``, while a bar per label shows how far it is."""
    console = Console(stderr=True)
    with Progress(
        TextColumn(label),
        BarColumn(),
        TextColumn("{task.completed} / {task.total}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done)

        return run(advance)


def need_two(repeats: int) -> None:
    if repeats < 2:
        raise ConfigError(
            f"repeats {repeats}", "an interval needs two runs or more", "raise --repeats"
        )


def table(title: str) -> Table:
    """An empty table as all benchmarks show theirs."""
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)


def write(folder: Path | None, result: dict[str, Any]) -> None:
    """The result as ``BENCHMARK-HASH.json``; nothing without a folder."""
    if folder is None:
        return
    name = f"{result['benchmark']}-{result['config_hash']}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {str(folder)!r}",
            f"the folder cannot be written ({error.strerror})",
            "choose another one",
        ) from error
