"""``wmtp quantize``: an NVFP4 copy of a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tllm_wmtp.cli import arguments
from tllm_wmtp.errors import RequestError

if TYPE_CHECKING:
    from tllm_wmtp.checkpoint.quantize import Calibration, Summary

#: Tokens of one calibration sequence.
SEQUENCE = 512
#: Kinds and seed of the synthetic calibration text; evaluation uses other seeds.
SYNTHETIC, SEED = ("logs", "sentences", "passages", "records"), 9_000


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("quantize", help="write an NVFP4 copy of a checkpoint")
    parser.add_argument("--model", required=True, help="checkpoint directory, or demo")
    parser.add_argument("--out", required=True, type=Path, help="a new directory")
    parser.add_argument("--format", choices=("nvfp4",), default="nvfp4")
    parser.add_argument(
        "--mtp",
        choices=("nvfp4", "bf16"),
        default="nvfp4",
        help="the MTP head's layers: quantized, or left as they are (default nvfp4)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="MODULES",
        help="modules to leave alone: a name, a wildcard or re:EXPRESSION; may be repeated",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="text (UTF-8) to observe activations on, or none: weights only (default: synthetic)",
    )
    parser.add_argument(
        "--calibration-tokens", type=arguments.positive, default=8192, help="of it (default 8192)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="compute type of the calibration",
    )
    parser.add_argument(
        "--backend",
        choices=("builtin", "modelopt"),
        default="builtin",
        help="who quantizes the target; the weights get the same bits (modelopt: pip install "
        "'tllm-wmtp[quantize]')",
    )
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tllm_wmtp.checkpoint.quantize import quantize_checkpoint
    from tllm_wmtp.checkpoint.recipe import Recipe

    directory = arguments.model_directory(args.model)
    calibration = _calibration(args, directory)
    with _bar() as bar:
        tasks = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        summary = quantize_checkpoint(
            directory,
            args.out,
            Recipe(args.mtp == "nvfp4", tuple(args.exclude)),
            calibration,
            args.backend,
            progress=advance,
        )
    print(json.dumps(report(summary)) if args.json else describe(summary))
    return 0


def report(summary: Summary) -> dict[str, Any]:
    """The ``--json`` object."""
    return {
        "out": str(summary.out),
        "quant_algo": summary.algorithm,
        "quantized_matrices": summary.quantized,
        "other_tensors": summary.kept,
        "source_bytes": summary.source_bytes,
        "bytes": summary.bytes,
        "shards_taken_up": summary.taken_up,
        "exclude_modules": list(summary.excluded),
    }


def describe(summary: Summary) -> str:
    inputs = "" if summary.algorithm == "NVFP4" else "; weights only"
    return (
        f"{summary.out}: {summary.quantized} matrices in NVFP4, {summary.kept} tensors as they "
        f"were{inputs}; {summary.bytes:,} bytes of weights, {summary.source_bytes:,} before"
    )


def _bar() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _calibration(args: argparse.Namespace, directory: Path) -> Calibration | None:
    from tllm_wmtp.checkpoint.calibration import token_chunks
    from tllm_wmtp.checkpoint.directory import CheckpointDirectory
    from tllm_wmtp.checkpoint.quantize import Calibration

    if args.calibration == "none":
        return None
    tokenizer = CheckpointDirectory(directory).tokenizer()
    if tokenizer is None:
        raise RequestError(
            "a calibration text",
            f"{directory} has no tokenizer.json",
            "add the file, or use --calibration none (weights only)",
        )
    text = _synthetic(args) if args.calibration is None else _read(args.calibration)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return Calibration(token_chunks(ids, args.calibration_tokens, SEQUENCE), args.dtype)


def _synthetic(args: argparse.Namespace) -> str:
    """Text of the demonstration's language: right for it, a stopgap for any other model."""
    from tllm_wmtp.demo import language

    if args.model != "demo":
        sys.stderr.write(
            "wmtp quantize: activations are observed on synthetic text; give text of your own "
            "with --calibration FILE\n"
        )
    # Another vocabulary makes as many tokens of it, or more.
    tokens = max(args.calibration_tokens // len(SYNTHETIC), 256)
    return "".join(language.prompt(kind, tokens, SEED).text for kind in SYNTHETIC)


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"calibration text {name!r}",
            f"it cannot be read ({error.strerror})",
            "check path and rights, or use --calibration none (weights only)",
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"calibration text {name!r}", f"it must be UTF-8 text ({error.reason})", "convert it"
        ) from error
