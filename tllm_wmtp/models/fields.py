"""Typed reading of ``config.json``: an error names the field, what it holds and what it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from tllm_wmtp.errors import CheckpointError


class Fields:
    """The fields of one JSON object; ``name`` says which (``config.json``, ``text_config``, ...).

    A field that is absent or null takes the default; without one it must be there.
    """

    def __init__(self, content: object, name: str = "config.json"):
        self.name = name
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{name} holds {content!r}",
                "it must be a JSON object",
                "use the config.json that belongs to the weights",
            )
        self._content = content

    def get(self, key: str, default: Any = None) -> Any:
        value = self._content.get(key)
        return default if value is None else value

    def need(self, key: str, default: Any = None) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(
                f"{self.name} lacks {key!r}",
                "every config of this family has it",
                "download the complete checkpoint",
            )
        return value

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.need(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(key, f"it must be a whole number of {least} or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.need(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.refuse(key, "it must be a number")
        if not math.isfinite(value) or value <= 0:
            self.refuse(key, "it must be a positive number")
        return float(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, several, or none."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            self.refuse(key, "it must be a token id or a list of them")
        return tuple(ids)

    def refuse(self, key: str, rule: str) -> NoReturn:
        raise CheckpointError(
            f"{key} {self.get(key)!r} in {self.name}",
            rule,
            "use the config.json that belongs to the weights",
        )
