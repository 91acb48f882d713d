#!/usr/bin/env python3
"""Draws docs/ring.svg: a small ring, its slots, and who sees what.

    python docs/draw_ring.py

The slots come from the package's own ring, so the figure cannot disagree with the code. Roles are
told apart by pattern and border, so it reads in black and white.
"""

from __future__ import annotations

from math import cos, pi, sin
from pathlib import Path

from tllm_wmtp.ring import RingSpec

SPEC = RingSpec(n_sink=2, window=6, spare=3)
COMMITTED, QUERY = 14, 15  # 14 tokens are final; rows 14 and 15 are drafts, 15 asks
WIDTH, HEIGHT = 860, 560
CELL, LEFT, TOP = 48, 46, 84
CENTRE_X, CENTRE_Y, OUTER, INNER = 345, 372, 152, 84

FILLS = {
    "sink": "url(#sink)",
    "window": "#d5d5d5",
    "draft": "url(#draft)",
    "spare": "url(#spare)",
    "gone": "#ffffff",
}
LEGEND = (
    ("sink", "sink: first tokens, always seen"),
    ("window", "window: final tokens, seen"),
    ("draft", "drafts: seen, may yet be refused"),
    ("spare", "spare: not seen now; kept for the"),
    ("", "shorter sequence after a refusal"),
    ("gone", "overwritten: never seen again"),
)


def role(position: int) -> str:
    if position < SPEC.n_sink:
        return "sink"
    if position >= COMMITTED:
        return "draft"
    if position in SPEC.visible_positions(QUERY):
        return "window"
    return "spare" if position > QUERY - (SPEC.capacity - SPEC.n_sink) else "gone"


def text(x: float, y: float, content: object, size: int = 15, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" {more}>{content}</text>'


def centred(x: float, y: float, content: object, size: int = 15, more: str = "") -> str:
    return text(x, y + size * 0.36, content, size, f'text-anchor="middle" {more}')


def box(x: float, y: float, width: float, kind: str, height: float = CELL) -> str:
    dashed = ' stroke-dasharray="3 3" stroke="#888888"' if kind == "gone" else ""
    heavy = ' stroke-width="3"' if kind == "draft" else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{FILLS[kind]}"{dashed}{heavy}/>'
    )


def badge(x: float, y: float, content: object, kind: str) -> str:
    """A number on a plain disc, so that no pattern runs through it."""
    colour = "#888888" if kind == "gone" else "#000000"
    disc = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="13" fill="#ffffff" stroke="none"/>'
    return disc + centred(x, y, content, 15, f'font-weight="bold" fill="{colour}"')


def sector(index: int, count: int, kind: str) -> tuple[str, float]:
    """A piece of the ring, clockwise from the top, and the angle of its middle."""
    begin, end = (2 * pi * (index + side) / count - pi / 2 for side in (0, 1))

    def at(radius: float, angle: float) -> str:
        return f"{CENTRE_X + radius * cos(angle):.1f} {CENTRE_Y + radius * sin(angle):.1f}"

    heavy = ' stroke-width="3"' if kind == "draft" else ""
    path = (
        f"M {at(INNER, begin)} L {at(OUTER, begin)} A {OUTER} {OUTER} 0 0 1 {at(OUTER, end)} "
        f"L {at(INNER, end)} A {INNER} {INNER} 0 0 0 {at(INNER, begin)} Z"
    )
    return f'<path d="{path}" fill="{FILLS[kind]}"{heavy}/>', (begin + end) / 2


def sequence() -> list[str]:
    parts = [text(LEFT, 34, "The sequence: token positions", 17, 'font-weight="bold"')]
    heavy_last = sorted(range(QUERY + 1), key=lambda position: role(position) == "draft")
    for position in heavy_last:
        x, kind = LEFT + position * CELL, role(position)
        parts.append(box(x, TOP, CELL, kind))
        parts.append(badge(x + CELL / 2, TOP + CELL / 2, position, kind))
    window_begin = QUERY - SPEC.window + 1
    spans = (
        (0, SPEC.n_sink, f"n_sink = {SPEC.n_sink}"),
        (window_begin, QUERY + 1, f"window W = {SPEC.window}, the query's own key included"),
    )
    for begin, end, label in spans:
        x0, x1, y = LEFT + begin * CELL + 4, LEFT + end * CELL - 4, TOP - 10
        parts.append(f'<path d="M {x0} {y + 5} V {y} H {x1} V {y + 5}" fill="none"/>')
        parts.append(centred((x0 + x1) / 2, y - 12, label, 14))
    tip = LEFT + (QUERY + 0.5) * CELL
    parts.append(
        f'<path d="M {tip} {TOP + CELL + 24} V {TOP + CELL + 6}" marker-end="url(#arrow)"/>'
    )
    parts.append(
        text(tip + 24, TOP + CELL + 40, f"the query, q = {QUERY}", 14, 'text-anchor="end"')
    )
    return parts


def ring() -> list[str]:
    ring_slots = SPEC.capacity - SPEC.n_sink
    newest = {SPEC.slot(p): p for p in range(QUERY + 1)}
    parts = [
        text(LEFT, 196, "The lane: slots in memory", 17, 'font-weight="bold"'),
        text(LEFT, 290, "sinks keep", 14),
        text(LEFT, 308, "their slots", 14),
    ]
    for slot in range(SPEC.n_sink):
        left, top, kind = LEFT + slot * CELL, CENTRE_Y - CELL / 2, role(newest[slot])
        parts.append(box(left, top, CELL, kind))
        parts.append(badge(left + CELL / 2, top + CELL / 2, newest[slot], kind))
        parts.append(centred(left + CELL / 2, top + CELL + 14, f"slot {slot}", 12))
    pieces = []
    for index in range(ring_slots):
        slot = SPEC.n_sink + index
        kind = role(newest[slot])
        path, angle = sector(index, ring_slots, kind)
        pieces.append((kind == "draft", path, angle, slot, kind))
    for _, path, angle, slot, kind in sorted(pieces):
        parts.append(path)
        middle = (OUTER + INNER) / 2
        x, y = CENTRE_X + middle * cos(angle), CENTRE_Y + middle * sin(angle)
        parts.append(badge(x, y, newest[slot], kind))
        x, y = CENTRE_X + (OUTER + 24) * cos(angle), CENTRE_Y + (OUTER + 15) * sin(angle)
        parts.append(centred(x, y, f"slot {slot}", 12))
    parts += [
        centred(CENTRE_X, CENTRE_Y - 26, f"{ring_slots} slots", 16, 'font-weight="bold"'),
        centred(CENTRE_X, CENTRE_Y - 4, f"W + spare = {SPEC.window} + {SPEC.spare}", 13),
        centred(CENTRE_X, CENTRE_Y + 18, "next write:", 13),
        centred(CENTRE_X, CENTRE_Y + 36, f"slot {SPEC.slot(QUERY + 1)}", 13),
    ]
    return parts


def legend() -> list[str]:
    x, y, parts = 566, 222, []
    for kind, label in LEGEND:
        if not kind:  # continues the line above
            parts.append(text(x + 36, y - 13, label, 13))
            y += 19
            continue
        parts.append(box(x, y, 26, kind, 26))
        parts.append(text(x + 36, y + 18, label, 13))
        y += 44 if kind != "spare" else 48
    notes = (
        "slot(p) = p,  if p &lt; n_sink; else",
        "n_sink + (p - n_sink) mod (W + spare)",
    )
    for line, note in enumerate(notes):
        parts.append(
            text(x, y + 34 + 18 * line, note, 12, 'font-family="monospace" xml:space="preserve"')
        )
    return parts


def draw() -> str:
    description = (
        f"Sixteen token positions above a ring of {SPEC.capacity - SPEC.n_sink} slots. Positions 0 "
        "and 1 are sinks with slots of their own. The query at 15 sees the sinks and positions 10 "
        "to 15; 14 and 15 are drafts. Positions 7 to 9 are kept in the spare slots, because a "
        "query after a rollback sees them again; 2 to 6 are overwritten."
    )
    body = "\n".join([*sequence(), *ring(), *legend()])
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" \
width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" role="img">
<title>The ring of the windowed draft</title>
<desc>{description}</desc>
<defs>
<pattern id="sink" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" \
fill="#ffffff"/><path d="M 0 8 L 8 0" stroke="#000000" stroke-width="1.4"/></pattern>
<pattern id="draft" width="10" height="10" patternUnits="userSpaceOnUse"><rect width="10" \
height="10" fill="#ffffff"/><path d="M 0 5 H 10 M 5 0 V 10" stroke="#777777" \
stroke-width="1"/></pattern>
<pattern id="spare" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" \
fill="#ffffff"/><circle cx="4" cy="4" r="1.5" fill="#444444"/></pattern>
<marker id="arrow" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M 0 0 L 10 5 L 0 10 Z" fill="#000000" stroke="none"/></marker>
</defs>
<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
<g stroke="#000000" stroke-width="1.3">
{body}
</g>
</svg>
""".replace("<text ", '<text stroke="none" ')


if __name__ == "__main__":
    target = Path(__file__).with_name("ring.svg")
    target.write_text(draw(), encoding="utf-8")
    print(f"wrote {target}")
