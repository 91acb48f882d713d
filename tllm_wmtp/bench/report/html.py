"""HTML of blocks. Every text goes through :func:`escape`; only this module writes tags."""

from __future__ import annotations

import html as standard
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tllm_wmtp.bench.report import paper, plot
from tllm_wmtp.bench.report.blocks import Figure, Section, Strong, Table

HALF_PAGE = 500
_BRACKETS = re.compile(r"^(\S.*?) (\([^()]*\))(.*)$")


def escape(text: str) -> str:
    """``text`` as HTML text or attribute value; control characters become a visible mark."""
    visible = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(text))
    return standard.escape(visible, quote=True)


def paragraph(text: str, kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f"<p{mark}>{escape(text)}</p>"


def code(text: str) -> str:
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'


def source(text: str) -> str:
    """The paper's figure, marked as the paper's."""
    if not text:
        return ""
    return (
        f'<p class="source"><b>Paper</b> ({escape(paper.SETTING)}; {escape(paper.SOURCE)}): '
        f"{escape(text)}</p>"
    )


def figure(block: Figure, number: int) -> str:
    """Panels side by side; with an odd number of them the caption fills the last place."""
    drawings = []
    for index, panel in enumerate(block.panels, start=1):
        said = f"{panel.title}: {panel.unit}."
        alt = f"{block.alt} {said}" if index == 1 else f"Figure {number}, continued. {said}"
        drawings.append(
            f'<div class="panel" style="--wide: {panel.width}px" role="img" '
            f'aria-label="{escape(alt)}">{plot.svg(panel, f"f{number}p{index}")}</div>'
        )
    beside = len(block.panels) % 2 == 1 and block.panels[-1].width <= HALF_PAGE
    kind = ' class="beside"' if beside else ""
    return (
        f'<figure id="figure-{number}">\n'
        f"<h3><span>Figure {number}.</span> {escape(block.title)}</h3>\n"
        '<div class="panels">\n' + "\n".join(drawings) + f"\n<figcaption{kind}>"
        f"{paragraph(block.sentence)}{source(block.source)}{paragraph(block.origin, 'origin')}"
        "</figcaption>\n</div>\n</figure>"
    )


def table(block: Table, number: int) -> str:
    head = "".join(
        f'<th scope="col"{_flush(column.numeric)}>{escape(column.label)}</th>'
        for column in block.columns
    )
    body = "\n".join(_row(block, row) for row in block.rows)
    notes = "".join(paragraph(note, "note") for note in block.notes)
    title = f"<span>Table {number}.</span> {escape(block.caption)}"
    inner = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table {number}">'
        f'<table>\n<caption class="unseen">{title}</caption>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>\n"
        f"{notes}{source(block.source)}"
        f"{paragraph(block.origin, 'origin') if block.origin else ''}"
    )
    if block.folded:
        inner = f"<details><summary>{title}</summary>\n{inner}</details>"
    else:
        inner = f"<h3>{title}</h3>\n{inner}"
    return f'<div class="table" id="table-{number}">\n{inner}\n</div>'


def _row(block: Table, row: Sequence[str]) -> str:
    cells = []
    for index, (cell, column) in enumerate(zip(row, block.columns, strict=True)):
        text = escape(cell)
        if column.numeric and (match := _BRACKETS.match(text)):
            text = f"{match[1]} <small>{match[2]}</small>{match[3]}"
        if isinstance(cell, Strong):
            text = f"<strong>{text}</strong>"
        mark = _flush(column.numeric)
        cells.append(
            f'<th scope="row"{mark}>{text}</th>' if index == 0 else f"<td{mark}>{text}</td>"
        )
    return f"<tr>{''.join(cells)}</tr>"


def _flush(numeric: bool) -> str:
    return ' class="n"' if numeric else ""


@dataclass(frozen=True)
class Drawn:
    """A figure of the page, and its number and section there."""

    number: int
    section: str
    figure: Figure

    def png(self) -> bytes:
        """The same drawing as a PNG, with its origin, and the paper's figures named as such."""
        footers = [self.figure.origin]
        if self.figure.source:
            footers.append(f"Paper ({paper.SETTING}; {paper.SOURCE}): {self.figure.source}")
        return plot.png(self.figure.title, self.figure.panels, footers)


class Numbered:
    """Figures and tables of a page, numbered in their order; figures are kept for their PNGs."""

    def __init__(self) -> None:
        self.figures: list[Drawn] = []
        self._tables = 0

    def section(self, section: Section) -> str:
        parts = [
            f'<section id="{escape(section.key)}">',
            f"<h2>{escape(section.title)}</h2>",
            paragraph(section.question, "question"),
        ]
        if not section.blocks:
            parts += [
                '<div class="missing">',
                paragraph("Not measured here. This measures it:"),
                code(section.measure),
                "</div>",
            ]
        parts += [self.block(section.key, block) for block in section.blocks]
        return "\n".join([*parts, "</section>"])

    def block(self, key: str, block: Figure | Table) -> str:
        if isinstance(block, Table):
            self._tables += 1
            return table(block, self._tables)
        number = len(self.figures) + 1
        self.figures.append(Drawn(number, key, block))
        return figure(block, number)
