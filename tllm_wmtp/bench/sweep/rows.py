"""One row of results: its fields, and the file of rows.

A row is valid JSON without NaN or infinity. A value that is not there is null, and ``missing`` says
why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from tllm_wmtp.errors import ConfigError

SCHEMA = 1
#: Fields whose null says all: no window is the whole context.
SELF_EVIDENT = frozenset({"window"})
REMEDY = "make the file again with wmtp bench run"


@dataclass(frozen=True)
class Row:
    """What one cell gave.

    Times are in the unit that their name ends in, intervals are ``[low, high]`` of 95 %.
    ``t_iter_ms`` is the median of ``AL_i / X_i`` with the throughput ``X_i`` of the whole batch, so
    an iteration takes ``t_iter_ms * b_eff`` (``step_ms``) and ``tpot_ms = t_iter_ms * b_eff / al``.
    ``steps = steps_kept + steps_ramp + steps_clipped`` counts iterations of the batch (chunks of
    all streams at an endpoint), ``accepted_histogram`` steps of each request. ``prompt_tokens`` and
    ``output_tokens`` are sums over the ``n_runs`` requests. ``bytes_moved`` are the fewest bytes
    that a step reads, ``floor_ms`` is the time that this takes.

    Raises:
        ConfigError: a value is of the wrong type, not finite, or null without a reason.
    """

    benchmark: str
    schema: int
    config_hash: str
    config: dict[str, Any]
    arm: str
    model: str
    target: str
    input: str
    difficulty: str
    context: int
    depth: int
    window: int | None
    n_sink: int
    dtype: str
    kv_dtype: str
    batch: int
    max_tokens: int
    temperature: float
    seed: int
    date: str
    device: str
    processor: str
    threads: int
    isa: str
    n_runs: int
    prompt_tokens: int
    output_tokens: int
    steps: int
    steps_kept: int
    steps_clipped: int
    steps_ramp: int
    screened: int
    accepted_histogram: list[int] | None
    alpha: list[dict[str, Any]] | None
    al: float | None
    al_interval: list[float] | None
    b_eff: int | None
    t_iter_ms: float | None
    t_iter_ms_interval: list[float] | None
    tpot_ms: float | None
    tpot_ms_interval: list[float] | None
    tokens_per_s: float | None
    ttft_s: float | None
    step_ms: float | None
    draft_ms: float | None
    verify_ms: float | None
    ctx_ms: float | None
    fwd_ms: float | None
    draft_kv_bytes: int | None
    bytes_moved: int | None
    floor_ms: float | None
    fraction_of_floor: float | None
    read_bandwidth_gb_per_s: float | None
    score: float | None
    output_digest: str | None
    missing: dict[str, str]

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise _bad(f"{name} {value!r}", f"it must be {_spelled(kinds)}")
            if not _is_finite(value):
                raise _bad(f"{name} {value!r}", "every number must be finite")
        for name in sorted(_KINDS.keys() - SELF_EVIDENT - self.missing.keys()):
            if getattr(self, name) is None:
                raise _bad(f"{name} null", "missing must say why a value is not there")
        if (self.benchmark, self.schema) != ("run", SCHEMA):
            raise _bad(
                f"benchmark {self.benchmark!r}, schema {self.schema}",
                f"it must be 'run', schema {SCHEMA}",
            )

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Row:
        """The row that a JSON object holds.

        Raises:
            ConfigError: a field is unknown, missing or wrong.
        """
        unknown, absent = content.keys() - _KINDS.keys(), _KINDS.keys() - content.keys()
        if unknown:
            raise _bad(f"field {min(unknown)!r}", "a row has no such field")
        if absent:
            raise _bad(f"no field {min(absent)!r}", "a row has all fields, null ones too")
        return cls(**content)

    def line(self) -> str:
        """One line of JSON, with its line break."""
        return json.dumps(asdict(self), allow_nan=False) + "\n"


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of ``wmtp bench run``, in its order. A last line without an end is one
    that is being written, or was cut off: it is not there yet.

    Raises:
        ConfigError: the file cannot be read, or a line is no row; names the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"file {path}", f"it cannot be read ({error.strerror})", "check the path"
        ) from error
    return parse_rows(content, path)


def parse_rows(content: bytes, path: Path) -> list[Row]:
    """The rows that whole lines of a file's ``content`` hold; see :func:`read_rows`."""
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            parsed = json.loads(line, parse_constant=_refuse_constant)
            if not isinstance(parsed, dict):
                raise _bad(f"a {type(parsed).__name__}", "a row is a JSON object")
            rows.append(Row.from_dict(parsed))
        except ConfigError as error:
            raise ConfigError(
                f"{path} line {number}: {error.value}", error.rule, error.remedy
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} line {number}: {error}", "a line must be one JSON object", REMEDY
            ) from None
    return rows


def _kinds(hint: Any) -> tuple[type, ...]:
    """What ``isinstance`` may find: containers by their own type, integers also for floats."""
    members = get_args(hint) if type(None) in get_args(hint) else (hint,)
    found = [getattr(member, "__origin__", member) for member in members]
    return tuple(found) + ((int,) if float in found else ())


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))


def _spelled(kinds: tuple[type, ...]) -> str:
    return " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)


def _refuse_constant(constant: str) -> NoReturn:
    raise _bad(constant, "every number must be finite")


def _bad(value: str, rule: str) -> ConfigError:
    return ConfigError(value, rule, REMEDY)


_HINTS = get_type_hints(Row)
_KINDS = {field.name: _kinds(_HINTS[field.name]) for field in fields(Row)}
