"""Numbers and options that several commands share, and errors in one form."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from tllm_wmtp.config import DTYPES, MtpConfig
from tllm_wmtp.errors import CheckpointError

NUMBER = re.compile(r"^(-?\d+)([km]?)$", re.IGNORECASE)
UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}
ARMS = ("dense", "native", "windowed")
#: The paper's longest prompt: what is left of 1,048,576 positions is room for the output.
MILLION_CONTEXT = 1_040_000
#: Names of SamplingParams with type, placeholder and meaning.
SAMPLING: tuple[tuple[str, type, str, str], ...] = (
    ("temperature", float, "T", "divides the logits; 0 takes the most likely token (default)"),
    ("top_k", int, "K", "draw from the K most likely tokens; 0 from all"),
    ("top_p", float, "P", "draw from the fewest most likely tokens that together reach P"),
    ("min_p", float, "P", "draw from tokens at least P times as likely as the likeliest"),
    ("repetition_penalty", float, "R", "divides the logits of tokens in prompt and output"),
    ("presence_penalty", float, "A", "subtracted from the logits of tokens in the output"),
    ("frequency_penalty", float, "A", "subtracted once per occurrence in the output"),
    ("seed", int, "N", "of the random numbers; a new one by default"),
)


class Parser(argparse.ArgumentParser):
    """Ends with exit code 2 and the message alone: value, rule, remedy."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}; see {self.prog} --help\n")
        raise SystemExit(2)


def count(text: str) -> int:
    """An integer, or one with a unit: 16k is 16,384 and 1m is 1,048,576."""
    match = NUMBER.match(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a whole number is expected, with k or m for 1,024 or 1,048,576; "
            "write for example 4032, 64k or 1m"
        )
    return int(match[1]) * UNITS[match[2].lower()]


def context(text: str) -> int:
    """Tokens of a prompt; as a prompt, 1m is 1,040,000 tokens, which leaves room for the output."""
    tokens = MILLION_CONTEXT if text.strip().lower() == "1m" else count(text)
    if tokens < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a context has one token or more; write for example 64k"
        )
    return tokens


def contexts(text: str) -> list[int]:
    """Contexts separated by commas, in ascending order."""
    return sorted({context(part) for part in text.split(",")})


def key_counts(text: str) -> list[int]:
    """Counts of 1 or more separated by commas, in ascending order; 1m is 1,048,576."""
    return sorted({positive(part) for part in text.split(",")})


def positive(text: str) -> int:
    """A count of 1 or more."""
    number = count(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be 1 or more; raise it")
    return number


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """``--depth --window --sink``: the operating point of the draft."""
    parser.add_argument(
        "--depth", type=count, default=7, help="most tokens that a step can emit (default 7)"
    )
    add_window(parser)


def add_window(parser: argparse.ArgumentParser) -> None:
    """``--window --sink``: what the draft sees."""
    parser.add_argument(
        "--window", type=count, default=4032, help="last tokens the draft sees (default 4032)"
    )
    parser.add_argument(
        "--sink", type=count, default=64, help="first tokens the draft always sees (default 64)"
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The options of :data:`SAMPLING`, for :func:`sampling`."""
    for name, kind, metavar, meaning in SAMPLING:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar=metavar, help=meaning)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Those of :data:`SAMPLING` that were given, for :class:`tllm_wmtp.SamplingParams`."""
    given = {name: getattr(args, name) for name, *_ in SAMPLING}
    return {name: value for name, value in given.items() if value is not None}


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")


def add_types(parser: argparse.ArgumentParser) -> None:
    """``--dtype --kv-dtype``: how weights are computed and how keys and values are kept."""
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute type")
    parser.add_argument(
        "--kv-dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="type of cached keys and values (default: the compute type)",
    )


def speculation(arm: str, args: argparse.Namespace) -> MtpConfig | None:
    """What an arm's name and ``--depth --window --sink`` mean to the engine."""
    if arm == "dense":
        return None
    if arm == "native":
        return MtpConfig.native(depth=args.depth)
    return MtpConfig(depth=args.depth, window=args.window, n_sink=args.sink)


def model_directory(name: str) -> Path:
    """The directory called ``name``; ``demo`` and ``demo-mamba2`` are those that the package
    ships."""
    import tllm_wmtp.demo

    shipped = {"demo": tllm_wmtp.demo.CHECKPOINT, "demo-mamba2": tllm_wmtp.demo.CHECKPOINT_MAMBA2}
    if name not in shipped:
        return Path(name)
    if not (shipped[name] / "config.json").exists():
        raise CheckpointError(
            f"model {name!r}",
            "this installation has no such demonstration checkpoint",
            "install the package again, or make one with build_scripts/train_demo_checkpoint.py",
        )
    return shipped[name]
