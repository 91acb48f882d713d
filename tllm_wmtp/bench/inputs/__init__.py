"""Seeded long-context inputs of an exact number of tokens, and readers for published ones.

:func:`prompts` is the one entry; :func:`score` rates an output. The same arguments give the same
bytes on every platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tllm_wmtp.bench.inputs.chance import Chance
from tllm_wmtp.bench.inputs.demo_kinds import DEMO_KINDS, demo_options, demo_prompt
from tllm_wmtp.bench.inputs.fit import check_tokenizer, fit
from tllm_wmtp.bench.inputs.generated import UndeterminedError, draft
from tllm_wmtp.bench.inputs.lexicon import LEXICONS
from tllm_wmtp.bench.inputs.options import (
    DIFFICULTIES,
    GENERATED,
    Task,
    check_choice,
    check_whole,
    resolve,
)
from tllm_wmtp.bench.inputs.prompt import Prompt
from tllm_wmtp.bench.inputs.published import PUBLISHED, published_prompts, published_source
from tllm_wmtp.bench.inputs.scoring import score
from tllm_wmtp.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Every task: generated, in the demonstration language, published.
TASKS: dict[str, Task] = {**GENERATED, **DEMO_KINDS, **PUBLISHED}

#: Of all prompts that are made together, which are held at once.
MOST_TOKENS = 1 << 30

#: Texts that are made until one determines its answers; only lists of words can need a second.
ATTEMPTS = 8

__all__ = [
    "DIFFICULTIES",
    "LEXICONS",
    "TASKS",
    "Prompt",
    "Task",
    "check",
    "make_prompt",
    "prompts",
    "score",
]


def prompts(
    task: str,
    tokenizer: Tokenizer,
    tokens: int,
    count: int,
    seed: int,
    lexicon: str = "english",
    difficulty: str = "medium",
    path: str | Path | None = None,
    **options: Any,
) -> list[Prompt]:
    """``count`` different prompts, the same for the same arguments.

    Args:
        task: a name of :data:`TASKS`.
        tokenizer: of the model that is to read them.
        tokens: ids of each prompt, exactly; of published items, at most.
        lexicon, difficulty: of the generated tasks; others ignore them.
        path: file or folder of a published task.
        options: of the task (``TASKS[task].options``); the difficulty gives the rest.

    Raises:
        ConfigError: an unknown task, option or value, too few tokens for the records, a broken
            file, or a tokenizer that cuts or pads.
    """
    check_whole("count", count, 1)
    check(task, tokens, seed, lexicon, difficulty, path, **options)
    check_tokenizer(tokenizer)
    if task in PUBLISHED:
        return published_prompts(task, tokenizer, tokens, count, seed, path, options)
    if tokens * count > MOST_TOKENS:
        raise ConfigError(
            f"{count} prompts of {tokens} tokens",
            f"together they may have {MOST_TOKENS} tokens",
            "ask for fewer, and for more under another seed",
        )
    return [
        make_prompt(task, tokenizer, tokens, seed, index, lexicon, difficulty, **options)
        for index in range(count)
    ]


def check(
    task: str,
    tokens: int,
    seed: int,
    lexicon: str = "english",
    difficulty: str = "medium",
    path: str | Path | None = None,
    **options: Any,
) -> None:
    """Everything of :func:`prompts` that can be checked without a tokenizer, before one is loaded.

    Raises:
        ConfigError: as :func:`prompts`; what depends on tokens or on a file's content comes later.
    """
    check_choice("task", task, tuple(TASKS))
    check_whole("tokens", tokens, 1)
    check_whole("seed", seed, 0)
    spoken = LEXICONS[check_choice("lexicon", lexicon, tuple(LEXICONS))]
    check_choice("difficulty", difficulty, DIFFICULTIES)
    if task in PUBLISHED:
        published_source(task, path, options)
        return
    check_whole("tokens", tokens, 1, MOST_TOKENS)
    if path is not None:
        raise ConfigError(
            f"path {str(path)!r} of task {task}",
            f"only {' and '.join(PUBLISHED)} are read from a file",
            "remove the path",
        )
    if task in DEMO_KINDS:
        demo_options(task, tokens, options)
    else:
        resolve(task, difficulty, spoken, tokens, options)


def make_prompt(
    task: str,
    tokenizer: Tokenizer,
    tokens: int,
    seed: int,
    index: int = 0,
    lexicon: str = "english",
    difficulty: str = "medium",
    **options: Any,
) -> Prompt:
    """The ``index``-th of the prompts that :func:`prompts` makes of a task that is generated."""
    check_choice("task", task, (*GENERATED, *DEMO_KINDS))
    check(task, tokens, seed, lexicon, difficulty, **options)
    check_whole("index", index, 0)
    check_tokenizer(tokenizer)
    if task in DEMO_KINDS:
        return demo_prompt(task, tokenizer, tokens, seed, index, options)
    spoken = LEXICONS[lexicon]
    resolved = resolve(task, difficulty, spoken, tokens, options)
    # Without the tokens: at another length the same records are asked for.
    chance = Chance("inputs", task, lexicon, seed, index, _listed(resolved))
    settings = {**GENERATED[task].fixed, **resolved}
    for attempt in range(ATTEMPTS):
        made = draft(task, spoken, settings, tokens, chance.child(f"attempt {attempt}"))
        fitted = fit(made.layout, tokenizer, tokens)
        try:
            answers = made.answers_in(fitted.text)
            break
        except UndeterminedError:
            if attempt == ATTEMPTS - 1:
                raise
    resolved = {"lexicon": lexicon, "difficulty": difficulty, **resolved}
    return Prompt(
        task, fitted.ids, fitted.text, answers, resolved, "all", seed, index,
        needles=fitted.positions,
    )  # fmt: skip


def _listed(options: Mapping[str, Any]) -> str:
    """The options as text; of numbers with a fraction, the exact one."""
    return ",".join(
        f"{name}={value.hex() if isinstance(value, float) else value}"
        for name, value in sorted(options.items())
    )
