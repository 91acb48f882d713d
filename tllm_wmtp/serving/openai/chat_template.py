"""The checkpoint's own way to write a conversation as one prompt: a Jinja template.

It is found, and rendered in the same sandbox with the same names, as ``transformers`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tllm_wmtp.errors import CheckpointError, RequestError

TOKENIZER_CONFIG, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
#: Names of tokens that a template may use.
SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what a model has written, for training;
    here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja.
        special_tokens: of :data:`SPECIAL_TOKENS`, those that the checkpoint has.
        origin: the file, for errors.

    Raises:
        CheckpointError: it is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"chat template of {origin} ({error})",
                "it must be a Jinja template",
                "download the file again, or remove the template",
            ) from error

    @classmethod
    def of(cls, directory: Path) -> ChatTemplate | None:
        """The template of a checkpoint directory, or None where it has none.

        ``chat_template.jinja`` comes before ``chat_template`` in ``tokenizer_config.json``, which
        may also be a list of named ones: then the one called ``default``.

        Raises:
            CheckpointError: a file that cannot be read.
        """
        config = _tokenizer_config(directory / TOKENIZER_CONFIG)
        tokens = {name: _content(config.get(name)) for name in SPECIAL_TOKENS}
        special_tokens = {name: token for name, token in tokens.items() if token is not None}
        file = directory / TEMPLATE_FILE
        if file.exists():
            return cls(_read(file), special_tokens, str(file))
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {one.get("name"): one.get("template") for one in source if _is_object(one)}
            source = named.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(
                f"chat_template of {directory / TOKENIZER_CONFIG}: {type(source).__name__}",
                "it must be text, or a list of named templates",
                "download the file again",
            )
        return cls(source, special_tokens, str(directory / TOKENIZER_CONFIG))

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The conversation as a prompt, special tokens included.

        Args:
            messages: with ``role`` and ``content``.
            options: further names that the template may use.

        Raises:
            RequestError: the template refuses the conversation.
        """
        names = {
            "tools": None, "documents": None, "add_generation_prompt": True,
            **self._special_tokens, **options,
        }  # fmt: skip
        try:
            return self._template.render(messages=[dict(m) for m in messages], **names)
        except Exception as error:  # the template's own choice, or an operation on a wrong type
            raise RequestError(
                f"messages ({error})",
                "the checkpoint's chat template must be able to write them",
                "correct roles and contents, or use /v1/completions",
            ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it leaves the characters of HTML as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _content(token: Any) -> str | None:
    """A token's text: itself, or the ``content`` of what is known about it."""
    if _is_object(token):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _tokenizer_config(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        config = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: {error}", "it must be JSON", "download the file again"
        ) from error
    if not _is_object(config):
        raise CheckpointError(
            f"{file} holds a {type(config).__name__}",
            "it must hold a JSON object",
            "download the file again",
        )
    return dict(config)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file} ({error})", "it must be readable UTF-8 text", "check path and rights"
        ) from error


def _is_object(value: object) -> bool:
    return isinstance(value, dict)
