"""Colours, markers, dashes and hatches. Arms differ in more than colour, which is never needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Light colours by role. Figures are drawn in these, and the page replaces each by a variable, so
#: no two roles may share one, and none may be black, which is what an SVG leaves unsaid.
LIGHT = {
    "ink": "#1d2125",
    "muted": "#59626c",
    "rule": "#d9dde2",
    "ground": "#fefefe",
    "dense": "#6b747e",
    "native": "#b85504",
    "windowed": "#0b64ad",
    "native-tint": "#f0c9a4",
    "windowed-tint": "#aacdec",
    "dense-tint": "#cfd4d9",
    "source": "#7a4f9a",
}
DARK = {
    "ink": "#e4e7ea",
    "muted": "#a0a9b3",
    "rule": "#3a4149",
    "ground": "#15181c",
    "dense": "#a3acb6",
    "native": "#f3954a",
    "windowed": "#66b3f2",
    "native-tint": "#7a4413",
    "windowed-tint": "#1d4c74",
    "dense-tint": "#464e57",
    "source": "#c6a2e2",
}

ARMS = ("dense", "native", "windowed")


@dataclass(frozen=True)
class Look:
    """How a series is drawn: ``dash`` as matplotlib takes it."""

    colour: str
    marker: str
    dash: Any
    hollow: bool = False


LOOKS = {
    "dense": Look(LIGHT["dense"], "s", (0, (1.2, 1.8))),
    "native": Look(LIGHT["native"], "o", (0, (5, 2))),
    "windowed": Look(LIGHT["windowed"], "D", "solid"),
}
#: Series of one arm that differ in something else: marker and dash, in this order.
VARIANTS: tuple[tuple[str, Any], ...] = (
    ("D", "solid"),
    ("o", (0, (5, 2))),
    ("s", (0, (1.2, 1.8))),
    ("^", (0, (6, 2, 1.2, 2))),
    ("v", (0, (3, 1.5))),
    ("P", (0, (8, 2))),
)
#: Figures of the paper: hollow, and in a colour that none of ours has.
SOURCE_LOOKS = {
    "q35": Look(LIGHT["source"], "^", (0, (1, 2)), hollow=True),
    "q122": Look(LIGHT["source"], "s", (0, (1, 2)), hollow=True),
    "nem": Look(LIGHT["source"], "o", (0, (1, 2)), hollow=True),
}
#: Parts of a stacked bar.
PLAIN, RISING, FALLING = "", "////", "\\\\\\\\"


def look(arm: str, variant: int = 0) -> Look:
    """The arm's look; another marker and dash for each further variant of it."""
    base = LOOKS[arm]
    if variant == 0:
        return base
    marker, dash = VARIANTS[variant % len(VARIANTS)]
    return Look(base.colour, marker, dash)
