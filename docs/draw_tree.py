#!/usr/bin/env python3
"""Draws docs/tree.svg: a tree of drafts, where its rows lie, and what a verify keeps of it.

    python docs/draw_tree.py

Positions, ancestors, cells and the accepted way come from the package's own functions. What is
accepted is told by pattern and weight of line, so it reads in black and white.
"""

from __future__ import annotations

from pathlib import Path

import torch
from draw_ring import centred, text

from tllm_wmtp.tree import TreeShape, ancestors, path_to, steps_up

SHAPE = TreeShape(width=2, depth=4)
PARENTS = torch.tensor([[0, 0, 0, 1, 2, 4, 4]])
LEAF = 5  # the last row that the target agrees with
LENGTH = 20  # committed rows before the step
WIDTH, HEIGHT = 860, 470
TOP, LEFT, LEVEL, RADIUS = 92, 92, 118, 19
CELL = 50

STEPS = steps_up(SHAPE, PARENTS)
SEES = ancestors(STEPS)[0]
ROWS, COUNTS = path_to(STEPS, SHAPE.levels(), torch.tensor([LEAF]))
WAY = ROWS[0, : int(COUNTS)].tolist()
LEVELS = SHAPE.levels().tolist()


def centre(row: int) -> tuple[float, float]:
    level = LEVELS[row]
    rows = range(SHAPE.rows)[SHAPE.level(level)]
    spread = 0 if level == 0 else (rows.index(row) - (len(rows) - 1) / 2) * 84
    return LEFT + level * LEVEL, TOP + 62 + spread


def tree() -> list[str]:
    parts = [text(46, 34, "The tree: 1 + k (d - 1) rows, one verify", 17, 'font-weight="bold"')]
    for level in range(SHAPE.depth):
        x = LEFT + level * LEVEL
        name = "pending" if level == 0 else f"level {level}"
        parts.append(centred(x, TOP - 26, name, 13))
        parts.append(centred(x, TOP + 152, f"position {LENGTH + level}", 12))
    for row in range(1, SHAPE.rows):
        (x0, y0), (x1, y1) = centre(int(PARENTS[0, row])), centre(row)
        heavy = 3.2 if row in WAY else 1.2
        parts.append(f'<path d="M {x0} {y0} L {x1} {y1}" stroke-width="{heavy}" fill="none"/>')
    for row in range(SHAPE.rows):
        x, y = centre(row)
        fill, heavy = ("url(#way)", 3.2) if row in WAY else ("#ffffff", 1.2)
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="{RADIUS}" fill="{fill}" stroke-width="{heavy}"/>'
        )
        parts.append(f'<circle cx="{x}" cy="{y}" r="11" fill="#ffffff" stroke="none"/>')
        parts.append(centred(x, y, row, 15, 'font-weight="bold"'))
    return parts


def mask() -> list[str]:
    x0, y0, cell = 590, 66, 22
    parts = [text(x0 - 32, 34, "Who sees whom", 17, 'font-weight="bold"')]
    for row in range(SHAPE.rows):
        parts.append(centred(x0 - 14, y0 + (row + 0.5) * cell, row, 12))
        parts.append(centred(x0 + (row + 0.5) * cell, y0 - 10, row, 12))
        for other in range(SHAPE.rows):
            fill = "#777777" if SEES[row, other] else "#ffffff"
            x, y = x0 + other * cell, y0 + row * cell
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" fill="{fill}" '
                'stroke-width="0.8"/>'
            )
    x = x0 + SHAPE.rows * cell + 12
    for line, note in enumerate(("row: its", "ancestors", "and itself,", "and all", "before 20")):
        parts.append(text(x, y0 + 52 + 17 * line, note, 13))
    return parts


def cells(y: float, content: dict[int, int], title: str) -> list[str]:
    """Cells of the target's pages from position LENGTH on; ``content`` is cell to row."""
    parts = [text(46, y - 14, title, 14)]
    for cell in range(SHAPE.rows):
        x, row = LEFT + cell * CELL, content.get(cell)
        fill = "url(#way)" if row in WAY else "#ffffff"
        dashed = "" if row is not None else ' stroke-dasharray="3 3"'
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="34" fill="{fill}"{dashed}/>')
        if row is not None:
            middle = x + CELL / 2
            parts.append(f'<circle cx="{middle}" cy="{y + 17}" r="11" fill="#fff" stroke="none"/>')
            parts.append(centred(middle, y + 17, row, 15, 'font-weight="bold"'))
        parts.append(centred(x + CELL / 2, y + 44, LENGTH + cell, 11))
    return parts


def moves() -> list[str]:
    parts = []
    for cell, row in enumerate(WAY):
        if cell == row:
            continue
        x0, x1 = LEFT + (row + 0.5) * CELL, LEFT + (cell + 0.5) * CELL
        parts.append(
            f'<path d="M {x0} 356 L {x1} 398" fill="none" stroke-width="1.6" '
            'marker-end="url(#arrow)"/>'
        )
    return parts


def draw() -> str:
    notes = (
        "Rows are stored in order, at 20 + row;",
        "rotated for 20 + level.",
        "",
        f"Accepted: {' - '.join(map(str, WAY))}, {len(WAY)} rows.",
        "The target adds its own next token.",
        "",
        "The ring moves nothing: the next draft",
        "feeds the accepted rows again, chained.",
    )
    body = [
        *tree(),
        *mask(),
        *cells(302, {row: row for row in range(SHAPE.rows)}, "The target's keys after the verify"),
        *moves(),
        *cells(402, dict(enumerate(WAY)), ""),
        text(46, 392, "after the commit", 14),
        *(text(490, 300 + 18 * line, note, 13) for line, note in enumerate(notes)),
    ]
    description = (
        f"A tree of width {SHAPE.width} and depth {SHAPE.depth}: the pending token, row 0, and "
        f"three levels of two drafts. The way {WAY} is accepted; its keys are moved to consecutive "
        "cells of the target's pages, which the other rows' cells are left to be overwritten."
    )
    inside = "\n".join(body)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" \
width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" role="img">
<title>A tree of drafts, its mask, and what the commit keeps</title>
<desc>{description}</desc>
<defs>
<pattern id="way" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" \
fill="#ffffff"/><path d="M 0 8 L 8 0" stroke="#000000" stroke-width="1.4"/></pattern>
<marker id="arrow" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M 0 0 L 10 5 L 0 10 Z" fill="#000000" stroke="none"/></marker>
</defs>
<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
<g stroke="#000000" stroke-width="1.3">
{inside}
</g>
</svg>
""".replace("<text ", '<text stroke="none" ')


if __name__ == "__main__":
    target = Path(__file__).with_name("tree.svg")
    target.write_text(draw(), encoding="utf-8")
    print(f"wrote {target}")
