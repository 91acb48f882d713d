"""The prompts that are probed, by the names of their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tllm_wmtp.bench.inputs import DIFFICULTIES, LEXICONS, TASKS, prompts
from tllm_wmtp.bench.inputs.options import check_choice, check_whole
from tllm_wmtp.bench.inputs.published import PUBLISHED
from tllm_wmtp.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: The name of the input that is a user's own text.
FILE = "file"
#: A prompt's index is added, and the sum must be one of the 64 bits that seed a generator.
MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class ProbeInputs:
    """``count`` prompts of each of ``tasks``, ``tokens`` long, and the beginning of ``text``.

    Args:
        tasks: names of :data:`tllm_wmtp.bench.inputs.TASKS`.
        lexicon, difficulty: of the generated ones.
        path: of the published ones.
        text: one more prompt: its first ``tokens`` tokens.
    """

    tasks: tuple[str, ...]
    tokens: int
    count: int = 2
    seed: int = 0
    lexicon: str = "english"
    difficulty: str = "medium"
    path: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        for task in self.tasks:
            check_choice("input", task, tuple(TASKS))
        check_choice("lexicon", self.lexicon, tuple(LEXICONS))
        check_choice("difficulty", self.difficulty, DIFFICULTIES)
        check_whole("seed", self.seed, 0, MOST_SEED)
        if not self.tasks and self.text is None:
            raise ConfigError("no input", "a probe needs a prompt", "name one with --inputs")
        if self.path is not None and not any(task in PUBLISHED for task in self.tasks):
            raise ConfigError(
                f"path {str(self.path)!r}",
                f"only {' and '.join(PUBLISHED)} are read from a file",
                "remove the path, or name one of them with --inputs",
            )


@dataclass(frozen=True)
class ProbePrompt:
    """``index`` counts the prompts of one input."""

    input: str
    index: int
    ids: list[int]

    @property
    def about(self) -> dict[str, Any]:
        return {"input": self.input, "prompt": self.index, "prompt_tokens": len(self.ids)}


def make_prompts(tokenizer: Tokenizer | None, inputs: ProbeInputs) -> list[ProbePrompt]:
    """All prompts of ``inputs``, in its order; the text comes last.

    Raises:
        ConfigError: too few tokens for a task, too short a text, a task's file that cannot be read,
            or a checkpoint that has no tokenizer or another than the task's.
    """
    if tokenizer is None:
        raise ConfigError(
            "a checkpoint without tokenizer.json",
            "a probe reads text",
            "use a directory that has its tokenizer",
        )
    made = [
        ProbePrompt(task, prompt.index, prompt.ids)
        for task in inputs.tasks
        for prompt in prompts(
            task,
            tokenizer,
            inputs.tokens,
            inputs.count,
            inputs.seed,
            inputs.lexicon,
            inputs.difficulty,
            Path(inputs.path) if inputs.path is not None and task in PUBLISHED else None,
        )
    ]
    if inputs.text is not None:
        made.append(ProbePrompt(FILE, 0, _beginning(tokenizer, inputs.text, inputs.tokens)))
    return made


def _beginning(tokenizer: Tokenizer, text: str, tokens: int) -> list[int]:
    ids = tokenizer.encode(text).ids
    if len(ids) < tokens:
        raise ConfigError(
            f"a text of {len(ids)} tokens",
            f"the context is {tokens}",
            "lower --context, or give a longer text",
        )
    return ids[:tokens]
