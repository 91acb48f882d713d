"""``wmtp report``: results as one page."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tllm_wmtp.cli import arguments
from tllm_wmtp.errors import ConfigError

if TYPE_CHECKING:
    from tllm_wmtp.bench.report import Report


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("report", help="one HTML page from the results of benchmarks")
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="folders that hold *.json and *.jsonl, also in folders below; or such files",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), help="the page (default report.html)"
    )
    parser.add_argument("--png", type=Path, metavar="DIR", help="a folder that gets the figures")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also the measured sections as Markdown; its pictures are those of --png",
    )
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tllm_wmtp.bench import report

    report.need_matplotlib()
    if args.markdown is not None and args.png is None:
        raise ConfigError(
            f"--markdown {str(args.markdown)!r}",
            "its figures are pictures in a folder",
            "add --png DIR",
        )
    if args.out.is_dir():
        raise ConfigError(
            f"--out {str(args.out)!r}", "it must be a file, and is a folder", "add a file's name"
        )
    made = report.build(report.load(args.folders))
    pictures = write_figures(made, args.png) if args.png is not None else []
    write(args.out, made.page.encode())
    if args.markdown is not None:
        beside = [os.path.relpath(path, args.markdown.parent) for path in pictures]
        write(args.markdown, report.as_markdown(made, beside).encode())
    if args.json:
        print(json.dumps(summary(args.out, made, pictures)))
    else:
        measured = sum(made.measured.values())
        print(f"{args.out}: {measured} of {len(made.measured)} sections measured")
        for note in made.notes:
            print(note)
    return 0


def summary(out: Path, made: Report, pictures: list[Path]) -> dict[str, Any]:
    return {
        "out": str(out),
        "figures": len(made.figures),
        "png": [str(path) for path in pictures],
        "measured": made.measured,
        "notes": list(made.notes),
    }


def write_figures(made: Report, folder: Path) -> list[Path]:
    """A PNG per figure, named by its section and number."""
    written = []
    for figure in made.figures:
        path = folder / f"{figure.section}-{figure.number}.png"
        write(path, figure.png())
        written.append(path)
    return written


def write(path: Path, content: bytes) -> None:
    """The whole file or none: a reader never sees half of it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.chmod(file.name, 0o666 & ~umask())
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r}", f"it cannot be written ({error.strerror})", "choose another place"
        ) from error


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
