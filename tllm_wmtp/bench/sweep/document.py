"""A YAML file whose mappings remember their lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tllm_wmtp.errors import ConfigError


class _Mapping(dict[str, Any]):
    """A mapping with the line of each key, and its own."""

    lines: dict[str, int]
    line: int


@dataclass(frozen=True)
class Document:
    """A mapping of a file, at ``line``; ``lines`` has those of its keys."""

    path: Path
    content: Mapping[str, Any]
    line: int
    lines: Mapping[str, int]

    def error(self, key: str | None, value: str, rule: str, remedy: str) -> ConfigError:
        """An error that names the key's line, or the mapping's."""
        line = self.line if key is None else self.lines.get(key, self.line)
        return ConfigError(f"{self.path} line {line}: {value}", rule, remedy)

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """
        Raises:
            ConfigError: there is a key that is not among ``known``.
        """
        names = tuple(known)
        for key in self.content:
            if key not in names:
                raise self.error(
                    key, f"key {key!r}", f"the keys are {', '.join(names)}", "correct or remove it"
                )

    def child(self, key: str) -> Document:
        """The mapping under ``key``."""
        return self._of(key, self.content[key])

    def children(self, key: str) -> list[Document]:
        """The mappings of the list under ``key``."""
        values = self.content[key]
        if not isinstance(values, list) or not values:
            raise self.error(key, f"{key} {values!r}", "it is a list of mappings", "correct it")
        return [self._of(key, value) for value in values]

    def _of(self, key: str, value: Any) -> Document:
        if not isinstance(value, _Mapping):
            raise self.error(
                key, f"{key} {value!r}", "a mapping of keys and values is expected", "correct it"
            )
        return Document(self.path, value, value.line, value.lines)


def read_document(path: Path) -> Document:
    """The mapping that a YAML file is.

    Raises:
        ConfigError: it cannot be read, is no mapping, or has a key twice; or PyYAML is not there.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            f"a suite {path}",
            f"reading YAML needs a package that is not there ({error.name})",
            "pip install 'tllm-wmtp[bench]'",
        ) from None

    class Loader(yaml.SafeLoader):
        """Keys are text, and there once."""

    def construct(loader: Loader, node: yaml.MappingNode) -> _Mapping:
        loader.flatten_mapping(node)
        made = _Mapping()
        made.lines, made.line = {}, node.start_mark.line + 1
        for key_node, value_node in node.value:
            key, line = loader.construct_object(key_node), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(
                    f"{path} line {line}: key {key!r}", "keys are words", "put it in quotes"
                )
            if key in made:
                raise ConfigError(
                    f"{path} line {line}: key {key!r}",
                    f"it is there already, in line {made.lines[key]}",
                    "remove one",
                )
            made[key], made.lines[key] = loader.construct_object(value_node, deep=True), line
        return made

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(
            f"suite {path}", f"it cannot be read ({error.strerror})", "check the path"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"suite {path}: {reason}", "it must be YAML", "correct it") from None
    if not isinstance(content, _Mapping):
        raise ConfigError(
            f"suite {path}", "it must be a mapping of keys and values", "see docs/evaluation.md"
        )
    return Document(path, content, content.line, content.lines)
