"""Documents of the demonstration language as inputs, made by ``tllm_wmtp.demo.language``.

They are made of its tokenizer's ids, so no other tokenizer gives them an exact length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tllm_wmtp.bench.inputs.chance import Chance
from tllm_wmtp.bench.inputs.fit import encode
from tllm_wmtp.bench.inputs.options import Task, check_whole, refuse_unknown
from tllm_wmtp.bench.inputs.prompt import Prompt
from tllm_wmtp.demo import language
from tllm_wmtp.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: More tokens than a line of logs or sentences has.
LONGEST_LINE = 64
LEAST_RECALL = 16


def _task(about: str, **options: Any) -> Task:
    return Task(about, {"medium": options}, {})


DEMO_KINDS: dict[str, Task] = {
    "logs": _task("structured log lines that repeat with few surprises (demo tokenizer)"),
    "sentences": _task("sentences of little entropy (demo tokenizer)"),
    "lists": _task(
        "records among sentences, several asked for as a list (demo tokenizer)",
        n_records=None,
        n_asked=None,
    ),
    "recall": _task("a random segment of words, repeated (demo tokenizer)", n_symbols=64),
}


def demo_options(task: str, tokens: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The task's options with their defaults; ConfigError where one or the length is wrong."""
    refuse_unknown(f"task {task}", given, DEMO_KINDS[task].options)
    options = {**DEMO_KINDS[task].presets["medium"], **given}
    for name, value in options.items():
        if value is not None:
            check_whole(name, value, 1)
    if task == "recall" and tokens < LEAST_RECALL:
        raise ConfigError(
            f"{tokens} tokens", f"task recall needs {LEAST_RECALL} or more", "raise the tokens"
        )
    return options


def demo_prompt(
    task: str,
    tokenizer: Tokenizer,
    tokens: int,
    seed: int,
    index: int,
    given: Mapping[str, Any],
) -> Prompt:
    """One prompt of exactly ``tokens`` ids.

    ``logs`` and ``sentences`` end at a line break, and begin wherever that leaves the first token.

    Raises:
        ConfigError: another tokenizer, an unknown option, or too few tokens.
    """
    options = demo_options(task, tokens, given)
    spare = LONGEST_LINE if task in ("logs", "sentences") else 0
    draw = Chance("demo", task, tokens, seed, index).below(2**52)
    try:
        made = language.prompt(task, tokens + spare, draw, **options)
    except ValueError as error:
        raise ConfigError(
            f"task {task} with {tokens} tokens and {_listed(options)}",
            str(error),
            "raise the tokens or lower the option",
        ) from error
    ids = made.ids[-tokens:]
    text = language.text_of(ids)
    if encode(tokenizer, text) != ids:
        raise ConfigError(
            f"task {task} with another tokenizer than the demonstration's",
            "its documents are made of that tokenizer's ids",
            "use the demo tokenizer, or a niah task with the demo lexicon",
        )
    expected = "" if made.expected_ids is None else language.text_of(made.expected_ids)
    answers, scoring = _answers(task, expected)
    if task == "lists":
        records = [line for line in text.split("\n") if line.startswith("key ")]
        options = {"n_records": len(records), "n_asked": len(answers)}
    options["lexicon"] = "demo"
    return Prompt(task, ids, text, answers, options, scoring, seed, index)


def _listed(options: Mapping[str, Any]) -> str:
    given = [f"{name} {value}" for name, value in options.items() if value is not None]
    return ", ".join(given) or "no options"


def _answers(task: str, expected: str) -> tuple[tuple[str, ...], str]:
    if task == "lists":
        items = expected.split(" ;")[:-1]
        return tuple(item.split(" = ")[1] for item in items), "all"
    if task == "recall":
        return (expected.strip(),), "continuation"
    return (), "none"
