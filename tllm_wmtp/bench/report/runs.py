"""Rows of ``wmtp bench run``, arranged: cases, and the arms' rows of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tllm_wmtp.bench.report import words
from tllm_wmtp.bench.report.schema import Machine, RunRow

#: How a label says the fields of a case, where it has to.
_SAID = {
    "target": "{}",
    "difficulty": "{}",
    "dtype": "{}",
    "kv_dtype": "KV {}",
    "batch": "batch {}",
    "max_tokens": "up to {} tokens",
    "temperature": "temperature {:g}",
    "seed": "seed {}",
}
#: Of a row's configuration: what makes the arms, what a case has under its own name, and addresses,
#: which may be one per arm.
_ELSEWHERE = {
    "arm", "depth", "window", "n_sink", "model", "device", "dtype", "kv_dtype", "context", "batch",
    "seed", "target", "input.task", "input.difficulty", "sampling.max_tokens",
    "sampling.temperature",
}  # fmt: skip

Settings = tuple[tuple[str, str], ...]
#: Model, target and context: what an operating point is of.
Place = tuple[str, str, int]


@dataclass(frozen=True, order=True)
class Case:
    """What two rows must share to be compared: everything but the arm and its draft.

    ``options`` are the further ones of the input, ``rest`` all other settings of the cell: names
    and values as JSON, those that are null left out.
    """

    model: str
    input: str
    context: int
    target: str
    difficulty: str
    dtype: str
    kv_dtype: str
    batch: int
    max_tokens: int
    temperature: float
    seed: int
    machine: Machine
    options: Settings
    rest: Settings

    @classmethod
    def of(cls, row: RunRow) -> Case:
        plain = [field.name for field in fields(cls) if field.name not in ("options", "rest")]
        settings = list(_settings(row.config))
        return cls(
            **{name: getattr(row, name) for name in plain},
            options=tuple(each for each in settings if each[0].startswith("input.")),
            rest=tuple(each for each in settings if not each[0].startswith("input.")),
        )

    @property
    def place(self) -> Place:
        return self.model, self.target, self.context

    def without(self, **same: object) -> Case:
        """The case with some fields set to one value, to group over them."""
        return replace(self, **same)  # type: ignore[arg-type]

    @property
    def said(self) -> dict[str, str]:
        """What a label may say, in words; an empty text is never said."""
        plain = {name: said.format(getattr(self, name)) for name, said in _SAID.items()}
        if self.batch == 1:
            plain["batch"] = ""
        further = {
            name: f"{name.rpartition('.')[2].replace('_', ' ')} {value}"
            for name, value in (*self.options, *self.rest)
        }
        return plain | further


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in sorted(config.items()):
        name = prefix + key
        if name in _ELSEWHERE or value is None:
            continue
        if isinstance(value, Mapping):
            yield from _settings(value, f"{name}.")
        else:
            yield name, json.dumps(value, sort_keys=True).strip('"')


def label(case: Case, among: Iterable[Case]) -> str:
    """Model, input and context, and what tells the case from others with these in common: each
    setting that differs, but for the value that most of them have."""

    def core(each: Case) -> tuple[object, ...]:
        return each.model, each.input, each.context

    others = [each.said for each in set(among) if core(each) == core(case)]
    parts = [case.model, case.input, words.tokens(case.context)]
    for name, text in case.said.items():
        values = Counter(other.get(name, "") for other in others)
        usual = 2 * values[text] > len(others) and name not in ("kv_dtype", "target")
        server = name == "target" and text != "embedded"  # seen from outside: always said
        if server or (len(values) > 1 and text and not usual):
            parts.append(text)
    return ", ".join(parts)


@dataclass(frozen=True, order=True)
class Point:
    """An operating point of the windowed draft."""

    depth: int
    window: int
    n_sink: int

    @classmethod
    def of(cls, row: RunRow) -> Point:
        if row.window is None:
            raise ValueError(f"the arm {row.arm} has no window")
        return cls(row.depth, row.window, row.n_sink)

    def __str__(self) -> str:
        return f"depth {self.depth}, window {self.window:,}, sink {self.n_sink}"


def operating_points(rows: Iterable[RunRow]) -> dict[Place, Point]:
    """By place, the point at which most of its cells were measured; of several the deepest, then
    the widest. A short context may need a smaller window, or native and windowed are the same."""
    counts: dict[Place, Counter[Point]] = {}
    for row in rows:
        if row.arm == "windowed":
            place = (row.model, row.target, row.context)
            counts.setdefault(place, Counter())[Point.of(row)] += 1
    return {
        place: max(found, key=lambda point: (found[point], point))
        for place, found in counts.items()
    }


def points_text(points: Mapping[Place, Point], cases: Iterable[Case]) -> str:
    """The point of all cases, or of each context where they differ; of each place where models or
    targets differ at one context."""
    used = {place: points[place] for place in sorted({case.place for case in cases})}
    if len(set(used.values())) == 1:
        return str(next(iter(used.values())))
    by_context: dict[int, set[Point]] = {}
    for (_, _, context), point in used.items():
        by_context.setdefault(context, set()).add(point)
    parts: dict[str, Point] = {}
    for (model, target, context), point in sorted(used.items(), key=lambda pair: pair[0][::-1]):
        where = "" if len(by_context[context]) == 1 else f"{model}, {target}, "
        parts[f"{where}{words.tokens(context)} tokens"] = point
    return "; ".join(f"{where}: {point}" for where, point in parts.items())


@dataclass(frozen=True)
class Arms:
    """The rows of one case; ``native`` by depth, ``windowed`` by point."""

    case: Case
    dense: RunRow | None
    native: dict[int, RunRow]
    windowed: dict[Point, RunRow]

    def at(self, point: Point) -> dict[str, RunRow]:
        """The arms that were measured at ``point``, native at its depth."""
        found = {
            "dense": self.dense,
            "native": self.native.get(point.depth),
            "windowed": self.windowed.get(point),
        }
        return {arm: row for arm, row in found.items() if row is not None}


def arranged(rows: Iterable[RunRow]) -> list[Arms]:
    """Every case in order, with the newest row of each setting."""
    cases: dict[Case, list[RunRow]] = {}
    for row in rows:
        cases.setdefault(Case.of(row), []).append(row)
    return [
        Arms(
            case,
            next((row for row in reversed(members) if row.arm == "dense"), None),
            {row.depth: row for row in members if row.arm == "native"},
            {Point.of(row): row for row in members if row.arm == "windowed"},
        )
        for case, members in sorted(cases.items())
    ]


def overlap(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool | None:
    """Whether two intervals share a value; None where one is missing."""
    if one is None or other is None:
        return None
    return one[0] <= other[1] and other[0] <= one[1]


def reasons(rows: Iterable[RunRow], names: Collection[str]) -> list[str]:
    """Why these fields are missing, each reason once."""
    every = {(n, why) for row in rows for n, why in row.missing.items() if n in names}
    return [f"{words.ABSENT} {name}: {reason}." for name, reason in sorted(every)]
