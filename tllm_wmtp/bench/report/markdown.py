"""The same sections as Markdown, for a repository's pages: tables, and the figures as pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from tllm_wmtp.bench.report import paper
from tllm_wmtp.bench.report.blocks import Column, Figure, Section, Strong, Table

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#])")


def escape(text: str) -> str:
    """``text`` as one line of Markdown that means only itself."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def lines(sections: Sequence[Section], pictures: Sequence[str]) -> Iterator[str]:
    """Paragraphs of the sections that were measured.

    Args:
        pictures: address of each figure's picture, in the order of the figures.
    """
    figures, tables = iter(enumerate(pictures, start=1)), 0
    for section in sections:
        if not section.blocks:
            continue
        yield f"## {escape(section.title)}"
        yield escape(section.question)
        yield f"```sh\n{section.measure}\n```"
        for block in section.blocks:
            if isinstance(block, Table):
                tables += 1
                yield from _table(block, tables)
            else:
                yield from _figure(block, *next(figures))


def _figure(block: Figure, number: int, picture: str) -> Iterator[str]:
    yield f"### Figure {number}. {escape(block.title)}"
    yield f"![{escape(block.alt)}]({quote(picture)})"
    yield escape(block.sentence)
    yield from _sources(block)


def _table(block: Table, number: int) -> Iterator[str]:
    title = f"Table {number}. {escape(block.caption)}"
    rows = [[_cell(cell) for cell in row] for row in block.rows]
    head = [escape(column.label) or " " for column in block.columns]
    rule = [_rule(column) for column in block.columns]
    content = "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
    if block.folded:
        yield f"<details><summary>{title}</summary>"
        yield content
        yield "</details>"
    else:
        yield f"### {title}"
        yield content
    yield from map(escape, block.notes)
    yield from _sources(block)


def _cell(text: str) -> str:
    return f"**{escape(text)}**" if isinstance(text, Strong) else escape(text)


def _rule(column: Column) -> str:
    return "---:" if column.numeric else "---"


def _sources(block: Figure | Table) -> Iterator[str]:
    if block.source:
        yield f"*Paper ({escape(paper.SETTING)}; {escape(paper.SOURCE)}): {escape(block.source)}*"
    if block.origin:
        yield f"*{escape(block.origin)}*"
