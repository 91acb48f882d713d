"""Rows of ``wmtp bench run``, arranged: cases, and the arms' rows of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from tllm_wmtp.bench.report import words
from tllm_wmtp.bench.report.schema import Machine, RunRow

#: Fields of a case that a label leaves out where all cases agree, and how it says them.
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


@dataclass(frozen=True, order=True)
class Case:
    """What two rows must share to be compared: everything but the arm and its draft."""

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

    @classmethod
    def of(cls, row: RunRow) -> Case:
        return cls(**{field.name: getattr(row, field.name) for field in fields(cls)})

    def without(self, **same: object) -> Case:
        """The case with some fields set to one value, to group over them."""
        return replace(self, **same)  # type: ignore[arg-type]


def label(case: Case, among: Iterable[Case]) -> str:
    """Model, input and context, and whatever else differs among the cases; batch 1 is not said."""
    others = list(among)
    parts = [case.model, case.input, f"{words.tokens(case.context)} tokens"]
    for name, said in _SAID.items():
        value = getattr(case, name)
        usual = name == "batch" and value == 1
        if len({getattr(other, name) for other in others}) > 1 and not usual:
            parts.append(said.format(value))
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


def operating_point(rows: Sequence[RunRow]) -> Point | None:
    """The point at which most cases were measured; of several the deepest, then the widest."""
    counts = Counter(Point.of(row) for row in rows if row.arm == "windowed")
    if not counts:
        return None
    return max(counts, key=lambda point: (counts[point], point))


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
