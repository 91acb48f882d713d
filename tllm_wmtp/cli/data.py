"""``wmtp data``: long-context inputs as JSON lines."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tllm_wmtp.bench.inputs import DIFFICULTIES, LEXICONS, TASKS, Prompt, Task, check, prompts
from tllm_wmtp.bench.inputs.lexicon import FILLERS, VALUE_TYPES
from tllm_wmtp.bench.inputs.options import UNIFORM
from tllm_wmtp.bench.inputs.published import PUBLISHED
from tllm_wmtp.cli import arguments
from tllm_wmtp.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Options of tasks that are whole numbers, and what they count.
COUNTS = {
    "keys": "keys that have records",
    "values": "records of each key",
    "queries": "keys asked for",
    "chains": "chains of assignments",
    "hops": "assignments from variable to variable in a chain",
    "common": "words asked for",
    "common_frequency": "how often each of them is on the list",
    "rare_frequency": "how often each other word is",
    "coded_words": "different words on the list",
    "n_records": "records in the document",
    "n_asked": "of them asked for",
    "n_symbols": "different words of the segment",
}
NAMES = {
    "domain": "LongBench-v2: only this domain",
    "sub_domain": "LongBench-v2: only this sub-domain",
    "length": "LongBench-v2: only short, medium or long ones",
    "question_difficulty": "LongBench-v2: only easy or hard ones",
    "subset": "BABILong: only files or folders of this name, for example qa2/128k",
}


def share_or_uniform(text: str) -> float | str:
    """``uniform``, or a number, which the task checks."""
    if text == UNIFORM:
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: it must be {UNIFORM} or a share from 0 to 1; write for example 0.5"
        ) from None


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("data", help="long-context inputs of an exact number of tokens")
    parser.add_argument("task", nargs="?", metavar="TASK", help="one of --list")
    parser.add_argument("--list", action="store_true", help="the tasks and their options")
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="model directory, tokenizer.json, or demo"
    )
    parser.add_argument("--tokens", type=arguments.context, help="of each prompt")
    parser.add_argument("--count", type=arguments.positive, default=1, help="prompts (default 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--lexicon", choices=LEXICONS, default="english")
    parser.add_argument("--difficulty", choices=DIFFICULTIES, default="medium")
    parser.add_argument("--filler", choices=FILLERS, help="what is between the records")
    parser.add_argument("--value-type", choices=VALUE_TYPES, help="of a record")
    parser.add_argument(
        "--depth",
        type=share_or_uniform,
        metavar="SHARE",
        help=f"where all records are, from 0 (first) to 1; {UNIFORM} spreads them",
    )
    parser.add_argument("--alpha", type=float, metavar="A", help="exponent of the Zipf law")
    for name, meaning in COUNTS.items():
        parser.add_argument(_flag(name), type=arguments.positive, metavar="N", help=meaning)
    parser.add_argument("--path", help="file or folder of a published task")
    for name, meaning in NAMES.items():
        parser.add_argument(_flag(name), metavar="NAME", help=meaning)
    parser.add_argument("--ids", action="store_true", help="write the token ids as well")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines (default: stdout)")
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    if args.list:
        print(json.dumps({"tasks": listing()}) if args.json else table(listing()))
        return 0
    for name in ("task", "tokenizer", "tokens"):
        if getattr(args, name) is None:
            where = "TASK" if name == "task" else _flag(name)
            raise ConfigError(f"no {where}", "it is needed", "give one; wmtp data --list has tasks")
    task, options = args.task, given_options(args)
    spoken = (args.lexicon, args.difficulty, args.path)
    check(task, args.tokens, args.seed, *spoken, **options)
    if args.out is not None:
        check_out(args.out)
    tokenizer = load_tokenizer(args.tokenizer)
    made = prompts(task, tokenizer, args.tokens, args.count, args.seed, *spoken, **options)
    lines = [json.dumps(line(prompt, args.ids), ensure_ascii=False) for prompt in made]
    if args.out is not None:
        write(args.out, lines)
    elif not args.json:
        if isinstance(sys.stdout, io.TextIOWrapper):  # the same bytes in every locale
            sys.stdout.reconfigure(encoding="utf-8", newline="\n")
        sys.stdout.write("".join(text + "\n" for text in lines))
    if args.json:
        print(json.dumps(summary(args, made)))
    elif args.out is not None:
        sys.stderr.write(f"{len(made)} prompts of {task} in {args.out}\n")
    return 0


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of tasks that are on the command line."""
    names = ("filler", "value_type", "depth", "alpha", *COUNTS, *NAMES)
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model directory or file, which then neither cuts nor pads.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    path = arguments.model_directory(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"tokenizer {name!r}",
            f"{file} must be the tokenizer.json of a model",
            "pass a directory that has one, the file itself, or demo",
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{file}: {error}",
            "it must be a tokenizer of the 'tokenizers' library",
            "download the file again",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def line(prompt: Prompt, with_ids: bool) -> dict[str, Any]:
    """One prompt as a JSON object."""
    return {
        "id": prompt.name,
        "task": prompt.task,
        "tokens": prompt.tokens,
        "text": prompt.text,
        **({"ids": prompt.ids} if with_ids else {}),
        "answers": list(prompt.answers),
        "scoring": prompt.scoring,
        "seed": prompt.seed,
        "index": prompt.index,
        "options": prompt.options,
        "needles": list(prompt.needles),
        "cut_tokens": prompt.cut_tokens,
        "source": prompt.source,
        "sha256": prompt.text_sha256,
    }


def check_out(file: Path) -> None:
    """Refuses what :func:`write` could not write, before prompts are made.

    Raises:
        ConfigError: a folder, or a file in none that is there or can be made.
    """
    there = next(each for each in file.absolute().parents if os.path.exists(each))
    if file.is_dir() or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise _unwritable(file, "a folder" if file.is_dir() else f"{there} takes no files")


def write(file: Path, lines: list[str]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(text + "\n" for text in lines), encoding="utf-8", newline="\n")
    except OSError as error:
        raise _unwritable(file, str(error.strerror)) from error


def _unwritable(file: Path, why: str) -> ConfigError:
    return ConfigError(
        f"--out {str(file)!r}",
        f"it must be a file that can be written ({why})",
        "choose another one",
    )


def summary(args: argparse.Namespace, made: list[Prompt]) -> dict[str, Any]:
    """What was made, without the texts."""
    return {
        "task": args.task,
        "tokens": args.tokens,
        "seed": args.seed,
        "file": None if args.out is None else str(args.out),
        "prompts": [
            {
                "id": prompt.name,
                "tokens": prompt.tokens,
                "answers": len(prompt.answers),
                "options": prompt.options,
                "cut_tokens": prompt.cut_tokens,
                "sha256": prompt.text_sha256,
                "ids_sha256": prompt.ids_sha256,
            }
            for prompt in made
        ],
    }


def listing() -> list[dict[str, Any]]:
    """Every task: its options, each with its default, by difficulty where there are three."""
    return [
        {
            "task": name,
            "about": task.about,
            "needs_path": name in PUBLISHED,
            "options": {option: _defaults(task, option) for option in task.options},
        }
        for name, task in TASKS.items()
    ]


def _defaults(task: Task, option: str) -> Any:
    values = {difficulty: preset[option] for difficulty, preset in task.presets.items()}
    same = len({str(value) for value in values.values()}) == 1
    return values["medium"] if same else values


def table(tasks: list[dict[str, Any]]) -> str:
    """The tasks as aligned lines of text."""
    width = max(len(task["task"]) for task in tasks)
    rows = [f"options with their defaults; {' | '.join(DIFFICULTIES)} where these differ", ""]
    for task in tasks:
        rows.append(f"{task['task']:<{width}}  {task['about']}")
        for name, value in task["options"].items():
            rows.append(f"{'':<{width}}    {_flag(name)} {_shown(value)}".rstrip())
    return "\n".join(rows)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return " | ".join(map(str, value.values())) if isinstance(value, dict) else str(value)
