"""What a section is made of, before it is HTML: figures, tables and sentences."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tllm_wmtp.bench.report import words
from tllm_wmtp.bench.report.plot import Panel
from tllm_wmtp.bench.report.schema import Measured

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Strong(str):
    """A cell that stands out, by weight and a mark."""


@dataclass(frozen=True)
class Column:
    """``numeric`` columns are set flush right."""

    label: str
    numeric: bool = True


def columns(words_: Sequence[str], numbers: Sequence[str]) -> tuple[Column, ...]:
    """Columns of words, then columns of numbers."""
    return (*(Column(label, False) for label in words_), *(Column(label) for label in numbers))


@dataclass(frozen=True)
class Figure:
    """``sentence`` says what the data says, computed from it; ``alt`` describes the drawing for who
    cannot see it; ``source`` is the paper's counterpart; ``origin`` machine and day."""

    title: str
    alt: str
    panels: tuple[Panel, ...]
    sentence: str
    origin: str
    source: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of texts, the first a heading of its row."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    origin: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()
    folded: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.caption}: {len(row)} cells in {len(self.columns)} columns")


@dataclass(frozen=True)
class Section:
    """One question and what was measured of it; without ``blocks`` it was not measured, and
    ``measure`` is the command that does."""

    key: str
    title: str
    question: str
    measure: str
    blocks: tuple[Figure | Table, ...] = ()
    headline: str = ""


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by ``key``; keys in the order of their texts, items in their own."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return dict(sorted(found.items(), key=lambda pair: repr(pair[0])))


def newest(items: Iterable[T], key: Callable[[T], K]) -> dict[K, T]:
    """The last item of each key: what was read last is the newest."""
    return {key(item): item for item in items}


def replaced(n: int) -> tuple[str, ...]:
    """A table's note on rows that a newer result of other repeats or contexts has replaced."""
    if n == 0:
        return ()
    return (
        f"{words.plural(n, 'older row')} of the same setting left out: the newest result is shown.",
    )


def origin(rows: Sequence[Measured]) -> str:
    """Machine and day of rows that one figure shows.

    Raises:
        ValueError: they are of several machines, which no figure mixes.
    """
    machines = sorted({row.machine for row in rows})
    if len(machines) != 1:
        raise ValueError(f"one figure of {len(machines)} machines")
    days = sorted({row.date for row in rows})
    if len(days) == 1:
        return f"Measured on {days[0]}: {machines[0]}."
    return (
        f"Measured on several days ({words.listed(days)}), so conditions may differ between rows: "
        f"{machines[0]}."
    )
