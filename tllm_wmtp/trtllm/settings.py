"""What a user sets for TensorRT-LLM, from a file and from the environment, read once.

TensorRT-LLM's own YAML takes no foreign keys, and its workers inherit only environment variables
that begin with ``TRTLLM`` or ``TLLM``. So ``TRTLLM_WMTP_CONFIG`` may name a YAML or JSON file of
the fields below, and ``TRTLLM_WMTP_<FIELD>`` overrides one field.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tllm_wmtp.errors import ConfigError

PREFIX = "TRTLLM_WMTP_"
RING, PAGES, ENGINE, OFF = "ring", "pages", "engine", "off"
REFUSE, NATIVE = "refuse", "native"


@dataclass(frozen=True)
class Settings:
    """
    Args:
        mode: ``ring``: the draft layer has rings of its own and our kernel; ``pages``: the stock
            kernel over the block table's first and last pages; ``engine``: the draft is a compiled
            engine; ``off``: stock MTP.
        window: most recent tokens that the draft sees, its own included.
        n_sink: first tokens that it always sees.
        engine: directory that ``wmtp build --engine draft`` made, for ``mode: engine``.
        unsupported: ``refuse`` models and options that the window does not cover, or run them with
            stock MTP (``native``) and a warning.
    """

    mode: str = RING
    window: int = 4032
    n_sink: int = 64
    engine: str | None = None
    unsupported: str = REFUSE

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", (RING, PAGES, ENGINE, OFF)),
            ("unsupported", (REFUSE, NATIVE)),
        ):
            value = getattr(self, name)
            _require(
                value in allowed, name, value, f"is one of {', '.join(allowed)}", "use one of them"
            )
        for name, least in (("window", 1), ("n_sink", 0)):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool)
            _require(
                is_count and value >= least,
                name,
                value,
                f"is a number of tokens, at least {least}",
                "use 4032 and 64, which are the usual choice",
            )
        _require(
            (self.mode == ENGINE) == (self.engine is not None),
            "engine",
            self.engine,
            f"names the directory of mode 'engine' and of no other (mode is {self.mode!r})",
            "set both or neither",
        )


def _require(holds: bool, name: str, value: object, rule: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(f"{PREFIX}{name.upper()} {value!r}", f"{name} {rule}", remedy)


def read(environment: Mapping[str, str]) -> Settings:
    """The settings that ``environment`` describes.

    Raises:
        ConfigError: a variable or key that does not exist, or a value that breaks a rule.
    """
    known = [field.name for field in fields(Settings)]
    values: dict[str, Any] = {}
    file = environment.get(f"{PREFIX}CONFIG")
    if file:
        values = _read_file(Path(file))
    for variable, text in environment.items():
        if variable.startswith(PREFIX) and variable != f"{PREFIX}CONFIG":
            values[variable.removeprefix(PREFIX).lower()] = text
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{PREFIX}{name.upper()}",
                f"no such setting; there are {', '.join(known)}",
                "correct the name",
            )
    for name in ("window", "n_sink"):
        given = values.get(name)
        if isinstance(given, str) and given.strip().isdecimal():
            values[name] = int(given)
    return Settings(**values)


def _read_file(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{PREFIX}CONFIG {file}", f"it cannot be read: {error.strerror}", "correct the path"
        ) from None
    values = _parse(file, text)
    if not isinstance(values, dict):
        raise ConfigError(f"{PREFIX}CONFIG {file}", "it holds names and values", "see the example")
    return values


def _parse(file: Path, text: str) -> Any:
    try:
        load: Callable[[str], Any] = importlib.import_module("yaml").safe_load
    except ImportError:  # TensorRT-LLM depends on it; elsewhere JSON has to do
        load = json.loads
    try:
        return load(text)
    except Exception as error:  # yaml's own has no name here where yaml is missing
        problem = " ".join(str(error).split())
    raise ConfigError(f"{PREFIX}CONFIG {file}", f"it is YAML or JSON: {problem}", "correct it")


@functools.cache
def current() -> Settings:
    """This process's settings; later changes of the environment mean nothing."""
    return read(os.environ)
