"""JSON objects as frozen dataclasses: every field is there, of its type and finite, or an error
names the file, the place and the field."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from tllm_wmtp.errors import ConfigError

T = TypeVar("T")

_KINDS = {
    float: "a number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
    tuple: "a list",
}


def record(cls: type[T], content: Any, where: str) -> T:
    """``content`` as a ``cls``; keys that ``cls`` does not have are left out.

    Args:
        where: file and place, for the message of an error.

    Raises:
        ConfigError: ``content`` is no object, lacks a field without a default, or holds a value of
            another type than the field's.
    """
    if not isinstance(content, Mapping):
        raise _wrong(where, content, dict)
    values = {}
    for name, hint, required in _fields(typing.cast(Any, cls)):
        if name in content:
            values[name] = _convert(content[name], hint, f"{where}, field {name!r}")
        elif required:
            raise ConfigError(
                f"{where}, field {name!r}",
                "it is missing, and every such result has it",
                "measure again with this version, or take the file out of the folder",
            )
    return cls(**values)


@functools.cache
def _fields(cls: Any) -> tuple[tuple[str, Any, bool], ...]:
    hints = typing.get_type_hints(cls)
    return tuple(
        (
            field.name,
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
        if field.init
    )


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in inner:
            return None
        return _convert(value, next(each for each in inner if each is not types.NoneType), where)
    if origin is tuple:
        return _tuple(value, inner, where)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(where, value, dict)
        return {str(key): _convert(item, inner[1], where) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return record(typing.cast(Any, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise _wrong(where, value, hint)
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{where}: {value}", "a result is a finite number", "measure it again")
    return value


def _tuple(value: Any, inner: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(where, value, tuple)
    if inner[-1] is Ellipsis:
        return tuple(_convert(item, inner[0], f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(inner):
        raise ConfigError(
            f"{where}: {len(value)} values", f"it has {len(inner)}", "measure it again"
        )
    return tuple(
        _convert(item, hint, f"{where}[{i}]")
        for i, (item, hint) in enumerate(zip(value, inner, strict=True))
    )


def _wrong(where: str, value: Any, kind: Any) -> ConfigError:
    shown = repr(value)
    return ConfigError(
        f"{where}: {shown if len(shown) <= 60 else shown[:57] + '...'}",
        f"it must be {_KINDS.get(kind, 'a ' + getattr(kind, '__name__', str(kind)))}",
        "measure again with this version, or take the file out of the folder",
    )
