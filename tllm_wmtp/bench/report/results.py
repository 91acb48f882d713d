"""Reads every result under some folders: validated, the newest of each configuration, and where
each came from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tllm_wmtp.bench.report.records import record
from tllm_wmtp.bench.report.schema import (
    AttentionResult,
    DemoResult,
    DepthResult,
    FitResult,
    Machine,
    Measured,
    PlanResult,
    PrefillResult,
    ProbeResult,
    RunRow,
    StepResult,
)
from tllm_wmtp.bench.sweep.rows import parse_rows
from tllm_wmtp.errors import ConfigError

#: A text or a number, for finding a number that is none.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN|-?\d[\d.eE+-]*')


@dataclass(frozen=True)
class Source:
    """One file: what it holds, what of it is shown, and why not all.

    Attributes:
        path: the folder as it was given, and the file in it.
        sha256: of the file, 64 hex digits.
        kind: the benchmark; "" where the file holds none.
        hashes: configurations in it.
        state: "shown", or the reason why it is not.
    """

    path: str
    sha256: str
    kind: str
    hashes: tuple[str, ...]
    machines: tuple[Machine, ...]
    dates: tuple[str, ...]
    state: str


@dataclass(frozen=True)
class Results:
    """Everything that was found; within a kind the newest is last."""

    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()
    step: tuple[StepResult, ...] = ()
    prefill: tuple[PrefillResult, ...] = ()
    depth: tuple[DepthResult, ...] = ()
    attention: tuple[AttentionResult, ...] = ()
    demo: tuple[DemoResult, ...] = ()
    plan: tuple[PlanResult, ...] = ()
    fit: tuple[FitResult, ...] = ()
    probe: tuple[ProbeResult, ...] = ()
    run: tuple[RunRow, ...] = ()

    @property
    def machines(self) -> list[Machine]:
        return sorted({machine for source in self.sources for machine in source.machines})

    @property
    def dates(self) -> list[str]:
        return sorted({date for source in self.sources for date in source.dates})


@dataclass
class _Item:
    """One JSON object of a file."""

    kind: str
    config_hash: str
    value: Any
    age: tuple[str, float, str, int]

    @property
    def rows(self) -> tuple[Measured, ...]:
        if isinstance(self.value, Measured):
            return (self.value,)
        return tuple(row for row in getattr(self.value, "rows", ()) if isinstance(row, Measured))

    @property
    def machine(self) -> Machine | None:
        return self.rows[0].machine if self.rows else None


@dataclass
class _File:
    path: str
    sha256: str
    items: list[_Item] = field(default_factory=list)
    reason: str = ""


def _fit(content: Any, where: str) -> FitResult:
    if isinstance(content, dict) and isinstance(content.get("fits"), list):
        fits = [{**f, "jump": f.get("break")} for f in content["fits"] if isinstance(f, dict)]
        content = {**content, "fits": fits}
    return record(FitResult, content, where)


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "step": lambda content, where: record(StepResult, content, where),
    "prefill": lambda content, where: record(PrefillResult, content, where),
    "depth": lambda content, where: record(DepthResult, content, where),
    "attention": lambda content, where: record(AttentionResult, content, where),
    "demo": lambda content, where: record(DemoResult, content, where),
    "plan": lambda content, where: record(PlanResult, content, where),
    "fit": _fit,
    "probe": lambda content, where: record(ProbeResult, content, where),
    "run": lambda content, where: record(RunRow, content, where),
}


def load(folders: Sequence[Path]) -> Results:
    """Every ``*.json`` and ``*.jsonl`` under ``folders``, hidden folders left out.

    Of results of one benchmark, configuration and machine the newest is kept: by its day, then by
    its file's time, then by its place in the file. JSON that is no result is named, not shown.

    Raises:
        ConfigError: a folder is missing, a file is no JSON, a number is not finite, a result lacks
            a field, or nothing at all was found.
    """
    files = [_read(path, shown) for folder in folders for path, shown in _paths(folder)]
    items = [(item, file) for file in files for item in file.items]
    newest: dict[tuple[str, str, Machine | None], tuple[_Item, _File]] = {}
    for item, file in sorted(items, key=lambda pair: pair[0].age):
        newest[item.kind, item.config_hash, item.machine] = (item, file)
    kept = {id(item) for item, _ in newest.values()}
    if not kept:
        raise ConfigError(
            ", ".join(map(str, folders)),
            "no result of a benchmark is there",
            "make some with for example `wmtp bench step --out DIR`",
        )
    chosen: dict[str, list[Any]] = {kind: [] for kind in _READERS}
    for item, _ in sorted(newest.values(), key=lambda pair: pair[0].age):
        chosen[item.kind].append(item.value)
    owners = {key: file.path for key, (_, file) in newest.items()}
    return Results(
        sources=tuple(_source(file, kept, owners) for file in files),
        notes=tuple(_notes(files, kept, owners)),
        **{kind: tuple(values) for kind, values in chosen.items()},
    )


def _paths(folder: Path) -> Iterator[tuple[Path, str]]:
    if folder.is_file():
        yield folder, folder.name
        return
    if not folder.is_dir():
        raise ConfigError(
            f"{str(folder)!r}", "there is no such folder", "give one that holds results"
        )
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if path.suffix in (".json", ".jsonl") and path.is_file() and not hidden:
            yield path, (Path(folder.name) / inside).as_posix()


def _read(path: Path, shown: str) -> _File:
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
        changed = path.stat().st_mtime
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{shown}: {error}", "it must be readable UTF-8", "check the file or take it out"
        ) from error
    file = _File(shown, hashlib.sha256(raw).hexdigest())
    if path.suffix == ".json":
        documents = [(parse(text, shown), shown)]
    else:
        documents = list(_rows(raw, text, file))
    for index, (content, where) in enumerate(documents):
        kind = _kind(content)
        if kind not in _READERS:
            file.reason = f"holds {kind!r}, which no section shows" if kind else "no result"
            continue
        value = _READERS[kind](content, where)
        name = content.get("config_hash") or file.sha256[:12]
        item = _Item(kind, str(name), value, ("", changed, shown, index))
        date = item.rows[0].date if item.rows else ""
        item.age = (date, *item.age[1:])
        file.items.append(item)
    return file


def _rows(raw: bytes, text: str, file: _File) -> Iterator[tuple[Any, str]]:
    """The rows of ``wmtp bench run``; other lines of JSON are no results."""
    first = text.split("\n", 1)[0]
    if first.strip() and _kind(parse(first, file.path)) != "run":
        file.reason = "no result"
        return
    for number, row in enumerate(parse_rows(raw, Path(file.path)), start=1):
        yield dataclasses.asdict(row), f"{file.path}, line {number}"
    if raw and not raw.endswith(b"\n"):
        file.reason = "its last line is cut off, and left out"


def _kind(content: Any) -> str:
    """The benchmark that wrote ``content``; "" where none did."""
    if not isinstance(content, dict):
        return ""
    if isinstance(content.get("benchmark"), str):
        return str(content["benchmark"])
    if {"arms", "prompts", "lossless"} <= content.keys():
        return "demo"
    if {"request_bytes", "draft_share"} <= content.keys():
        return "plan"
    return ""


def parse(text: str, name: str, first_line: int = 1) -> Any:
    """``text`` as JSON.

    Raises:
        ConfigError: it is none, or holds NaN or a number that is infinite; with file and line.
    """

    def refuse(_: str) -> NoReturn:
        raise _NotFinite

    def number(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits)

    try:
        return json.loads(text, parse_constant=refuse, parse_float=number)
    except _NotFinite:
        line, value = _not_finite(text)
        raise ConfigError(
            f"{name}, line {first_line + line - 1}: {value}",
            "a result is a finite number, or null with a reason",
            "measure it again",
        ) from None
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ConfigError(
            f"{name}, line {first_line + line - 1}",
            f"it must be JSON ({getattr(error, 'msg', 'nested too deeply')})",
            "write it again, or take the file out of the folder",
        ) from error


class _NotFinite(Exception):
    pass


def _not_finite(text: str) -> tuple[int, str]:
    """Line, from 1, and spelling of the first number that is not finite."""
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token.startswith('"'):
            continue
        if token[-1] in "yN" or not math.isfinite(float(token)):
            return text.count("\n", 0, match.start()) + 1, token
    raise AssertionError("every number is finite")


def _source(
    file: _File, kept: set[int], owners: dict[tuple[str, str, Machine | None], str]
) -> Source:
    shown = sum(id(item) in kept for item in file.items)
    rows = [row for item in file.items for row in item.rows]
    if not file.items:
        state = f"not shown: {file.reason or 'empty'}"
    elif shown == len(file.items):
        state = "shown"
    elif len(file.items) == 1:
        item = file.items[0]
        state = f"not shown: {owners[item.kind, item.config_hash, item.machine]} is newer"
    else:
        state = f"{shown} of {len(file.items)} rows shown: newer ones replace the others"
    if file.items and file.reason:
        state += f"; {file.reason}"
    return Source(
        path=file.path,
        sha256=file.sha256,
        kind=", ".join(sorted({item.kind for item in file.items})),
        hashes=tuple(dict.fromkeys(item.config_hash for item in file.items)),
        machines=tuple(sorted({row.machine for row in rows})),
        dates=tuple(sorted({row.date for row in rows})),
        state=state,
    )


def _notes(
    files: Sequence[_File], kept: set[int], owners: dict[tuple[str, str, Machine | None], str]
) -> Iterator[str]:
    for file in files:
        old = [item for item in file.items if id(item) not in kept]
        if old:
            newer = sorted({owners[item.kind, item.config_hash, item.machine] for item in old})
            what = "1 result" if len(old) == 1 else f"{len(old)} results"
            yield (
                f"{what} of {file.path}: the same configuration on the same machine is newer in "
                f"{', '.join(newer)}, and that one is shown."
            )
        if file.reason and file.items:
            yield f"{file.path}: {file.reason}."
