"""The prompts that are probed, by the names of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tllm_wmtp.demo import language
from tllm_wmtp.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: The name of the input that is a user's own text.
FILE = "file"


@dataclass(frozen=True)
class ProbePrompt:
    """``index`` counts the prompts of one input."""

    input: str
    index: int
    ids: list[int]

    @property
    def about(self) -> dict[str, Any]:
        return {"input": self.input, "prompt": self.index, "prompt_tokens": len(self.ids)}


def make_prompts(
    tokenizer: Tokenizer | None,
    inputs: Sequence[str],
    context: int,
    count: int,
    seed: int,
    text: str | None,
) -> list[ProbePrompt]:
    """``count`` prompts of about ``context`` tokens for each of ``inputs``, and the beginning of
    ``text``.

    Raises:
        ConfigError: an unknown input, too short a text, or a checkpoint that does not read it.
    """
    if tokenizer is None:
        raise ConfigError(
            "a checkpoint without tokenizer.json",
            "a probe reads text",
            "use a directory that has its tokenizer",
        )
    prompts = [
        ProbePrompt(name, index, ids)
        for name in inputs
        for index, ids in enumerate(_of_language(tokenizer, name, context, count, seed))
    ]
    if text is not None:
        prompts.append(ProbePrompt(FILE, 0, _beginning(tokenizer, text, context)))
    return prompts


def check_inputs(inputs: Sequence[str]) -> None:
    """Refuses names of no input."""
    for name in inputs:
        if name not in language.KINDS:
            raise ConfigError(
                f"input {name!r}",
                f"the inputs are {', '.join(language.KINDS)}",
                "name one of them with --inputs, or give a text with --file",
            )


def _of_language(
    tokenizer: Tokenizer, kind: str, context: int, count: int, seed: int
) -> list[list[int]]:
    try:
        prompts = [language.prompt(kind, context, seed + index) for index in range(count)]
    except ValueError as error:
        raise ConfigError(
            f"context {context}", str(error), "use a context of 256 tokens or more"
        ) from error
    if any(tokenizer.encode(prompt.text).ids != prompt.ids for prompt in prompts[:1]):
        raise ConfigError(
            f"input {kind!r}",
            "it is of the demonstration's language, and the checkpoint's tokenizer is another",
            "give a text with --file",
        )
    return [prompt.ids for prompt in prompts]


def _beginning(tokenizer: Tokenizer, text: str, context: int) -> list[int]:
    ids = tokenizer.encode(text).ids
    if len(ids) < context:
        raise ConfigError(
            f"a text of {len(ids)} tokens",
            f"the context is {context}",
            "lower --context, or give a longer text",
        )
    return ids[:context]
