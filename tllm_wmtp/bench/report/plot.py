"""Panels: small plots with one axes each, drawn by matplotlib as SVG for the page or as PNG.

A panel is laid out in CSS pixels. On the page panels stand side by side and wrap, so that they
stay readable on a narrow screen.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tllm_wmtp.bench.report import words
from tllm_wmtp.bench.report.style import LIGHT, Look
from tllm_wmtp.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

PIXELS_PER_INCH = 72  # matplotlib's SVG unit is the point; the page takes it as a pixel
PNG_SCALE = 2.2
BOTTOM = 46
GAP = 13.0  # between two labels, in pixels

_RC: dict[Any, Any] = {
    "text.parse_math": False,  # names come from files
    "svg.fonttype": "none",
    "svg.hashsalt": "tllm-wmtp",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "axes.edgecolor": LIGHT["muted"],
    "axes.facecolor": "none",
    "axes.labelcolor": LIGHT["muted"],
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "text.color": LIGHT["ink"],
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "hatch.linewidth": 0.9,
    "hatch.color": LIGHT["ground"],
    "legend.frameon": False,
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Panel:
    """One axes: ``draw`` fills it; ``unit`` names the vertical axis with its unit.

    ``left`` and ``right`` are the pixels for tick labels and for the labels of lines, ``top`` those
    for the title, the unit and perhaps a legend.
    """

    title: str
    unit: str
    draw: Callable[[Axes], None]
    width: int = 440
    height: int = 300
    left: int = 46
    right: int = 92
    top: int = 46


def need_matplotlib() -> None:
    """Raises a ConfigError where matplotlib is missing, before anything is read."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed",
            "the report's figures need it",
            "pip install 'tllm-wmtp[bench]'",
        ) from error


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def svg(panel: Panel, prefix: str) -> str:
    """The panel as an ``<svg>`` element whose colours are the page's variables.

    ``prefix`` makes its ids those of no other panel of the page.
    """
    with _settings():
        canvas = _canvas(panel.width, panel.height)
        _add(canvas, panel, 0, 0)
        out = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.savefig(out, format="svg", metadata=nothing, transparent=True)
    return _for_page(out.getvalue(), prefix)


def png(title: str, panels: Sequence[Panel], footers: Sequence[str]) -> bytes:
    """All panels of a figure on a light ground, two in a row, or three where there are three."""
    in_row = 3 if len(panels) % 3 == 0 else 2
    rows = [panels[i : i + in_row] for i in range(0, len(panels), in_row)]
    width = max(sum(panel.width for panel in row) for row in rows)
    heights = [max(panel.height for panel in row) for row in rows]
    head = _wrapped(title, int(width / 8.2))
    foot = [line for footer in footers for line in _wrapped(footer, int(width / 5.8))]
    above, below = 24 + 18 * len(head), 18 + 13 * len(foot)
    total = above + sum(heights) + below
    with _settings():
        canvas = _canvas(width, total)
        canvas.set_facecolor(LIGHT["ground"])
        canvas.text(
            8 / width, 1 - 14 / total, "\n".join(head), va="top", fontsize=13, fontweight="bold"
        )
        canvas.text(
            8 / width, 10 / total, "\n".join(foot), va="bottom", fontsize=9, color=LIGHT["muted"]
        )
        top = above
        for row, height in zip(rows, heights, strict=True):
            left = 0
            for panel in row:
                _add(canvas, panel, left, top)
                left += panel.width
            top += height
        out = io.BytesIO()
        canvas.savefig(
            out,
            format="png",
            dpi=PIXELS_PER_INCH * PNG_SCALE,
            facecolor=LIGHT["ground"],
            metadata={"Software": None},
        )
    return out.getvalue()


def _canvas(width: int, height: int) -> Canvas:
    from matplotlib.figure import Figure

    return Figure(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH), dpi=PIXELS_PER_INCH)


def _add(canvas: Canvas, panel: Panel, left: int, top: int) -> None:
    """One axes for ``panel``, whose upper left corner is at ``left``, ``top`` of the canvas."""
    wide, high = canvas.get_size_inches() * PIXELS_PER_INCH
    inner_width = panel.width - panel.left - panel.right
    inner_height = panel.height - panel.top - BOTTOM
    axes = canvas.add_axes(
        (
            (left + panel.left) / wide,
            1 - (top + panel.height - BOTTOM) / high,
            inner_width / wide,
            inner_height / high,
        )
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0, pad=4)
    axes.tick_params(axis="x", length=3, pad=4)
    axes.grid(axis="y")
    axes.xaxis.labelpad = 6
    panel.draw(axes)
    x, y = (left + 8) / wide, 1 - (top + 16) / high
    canvas.text(x, y, panel.title, fontsize=11, fontweight="bold", va="baseline")
    canvas.text(x, y - 15 / high, panel.unit, fontsize=9.5, color=LIGHT["muted"], va="baseline")


# What panels draw.


def line(
    axes: Axes,
    xs: Sequence[float],
    ys: Sequence[float],
    intervals: Sequence[tuple[float, float] | None] | None,
    look: Look,
    joined: bool = True,
) -> None:
    """Points with their intervals, joined by a line in the look's dash."""
    if joined:
        axes.plot(xs, ys, color=look.colour, linestyle=look.dash, zorder=3)
    face = LIGHT["ground"] if look.hollow else look.colour
    axes.plot(
        xs, ys, look.marker, color=look.colour, markerfacecolor=face, markeredgewidth=1.2, zorder=4
    )
    for x, each in zip(xs, intervals or (), strict=False):
        if each is not None:
            whisker(axes, x, each, look)


def whisker(axes: Axes, x: float, ends: tuple[float, float], look: Look) -> None:
    """A vertical interval with caps."""
    axes.plot(
        [x, x], list(ends), color=look.colour, linewidth=1.1, marker="_", markersize=6, zorder=3
    )


def context_axis(axes: Axes, contexts: Sequence[int], label: str = "context, tokens") -> None:
    """A logarithmic axis with a tick at each context, thinned where they would touch."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    ticks = sorted(set(contexts))
    while len(ticks) > 7:
        ticks = ticks[::2]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter([words.tokens(tick) for tick in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = min(contexts), max(contexts)
    margin = (high / low) ** 0.06 if high > low else 1.5
    axes.set_xlim(low / margin, high * margin)
    axes.set_xlabel(label)


def log_values(axes: Axes, values: Iterable[float]) -> None:
    """A logarithmic vertical axis around ``values``, with few plain ticks."""
    values = list(values)
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    low, high = min(values) / 1.25, max(values) * 1.25
    if high < 3 * low:  # room for two ticks
        low, high = low / 1.6, high * 1.6
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [
            step * 10.0**power for power in range(-6, 9) for step in steps
            if low <= step * 10.0**power <= high
        ]  # fmt: skip
        if len(ticks) <= 7:
            break
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FixedFormatter([f"{tick:,g}" for tick in ticks]))
    axes.yaxis.set_minor_locator(NullLocator())


def plain_ticks(axes: Axes, ticks: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """Ticks of the horizontal axis at ``ticks`` alone."""
    axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks] if labels is None else labels)


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names lines at their right ends: (x, y, text, colour) each, moved apart where they touch."""
    if not ends:
        return
    box = axes.get_window_extent()
    axes.get_xlim(), axes.get_ylim()
    placed = sorted(
        (axes.transData.transform((x, y))[1], x, y, text, colour) for x, y, text, colour in ends
    )
    heights = spread([each[0] for each in placed], GAP * axes.figure.dpi / PIXELS_PER_INCH)
    for (before, x, y, text, colour), height in zip(placed, heights, strict=True):
        share = (height - box.y0) / box.height
        moved = abs(height - before) > 3
        axes.annotate(
            text,
            xy=(x, y),
            xytext=(1.035, share),
            textcoords="axes fraction",
            color=colour,
            fontsize=9.5,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkB": 5}
            if moved
            else None,
        )


def room(names: Iterable[str]) -> int:
    """Pixels to the right of an axes that :func:`label_ends` needs for ``names``."""
    return 22 + round(5.9 * max(map(len, names), default=0))


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending positions as near to ``wanted`` (ascending) as a distance of ``gap`` allows.

    Least squares: without the gaps it is an isotonic regression, by pooling neighbours.
    """
    pools: list[tuple[float, int]] = []  # mean, members
    for index, position in enumerate(wanted):
        mean, members = position - index * gap, 1
        while pools and pools[-1][0] > mean:
            other, more = pools.pop()
            mean = (mean * members + other * more) / (members + more)
            members += more
        pools.append((mean, members))
    levels = [mean for mean, members in pools for _ in range(members)]
    return [level + index * gap for index, level in enumerate(levels)]


def legend(axes: Axes, entries: Sequence[tuple[str, str, str]]) -> None:
    """A row of hatched samples above the axes: (name, colour, hatch) each."""
    from matplotlib.patches import Patch

    _legend(
        axes,
        [
            Patch(facecolor=colour, hatch=hatch, edgecolor=LIGHT["ground"], linewidth=0, label=name)
            for name, colour, hatch in entries
        ],
        handlelength=1.5,
        handleheight=0.9,
    )


def line_legend(axes: Axes, entries: Sequence[tuple[str, Look]], joined: bool = True) -> None:
    """A row of lines above the axes, where their ends leave no room for names."""
    handles = [
        axes.plot(
            [], [], look.marker, color=look.colour, linestyle=look.dash if joined else "none",
            label=name,
        )[0]
        for name, look in entries
    ]  # fmt: skip
    _legend(axes, handles, handlelength=3.2 if joined else 1.0)


def _legend(axes: Axes, handles: Sequence[Any], **shape: float) -> None:
    axes.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(handles),
        fontsize=9.5,
        columnspacing=1.6,
        handletextpad=0.6,
        borderaxespad=0.3,
        borderpad=0,
        labelcolor=LIGHT["ink"],
        **shape,
    )


def few_ticks(axes: Axes, axis: Literal["x", "y"] = "x") -> None:
    """About five ticks."""
    axes.locator_params(axis=axis, nbins=5)


# From matplotlib's SVG to the page's.

_ROLE = {colour: role for role, colour in LIGHT.items()}


@functools.cache
def _colours() -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, _ROLE)))


def _for_page(text: str, prefix: str) -> str:
    text = text[text.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.S)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r" font-family: [^;\"]*;?", "", text)
    text = re.sub(r"font: ([^;\"]*?)([\d.]+)px [^;\"]*", _font, text)
    text = re.sub(r' fill="(#\w{6})"', r' style="fill: \1"', text)
    text = re.sub(r' transform="rotate\(-?0 [^"]*\)"', "", text)
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    text = re.sub(
        r' id="([^"]+)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", text
    )
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = _colours().sub(lambda m: f"var(--{_ROLE[m[0]]})", text)
    text = re.sub(r"\n\s*", "\n", text)
    return text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1).strip()


def _font(match: re.Match[str]) -> str:
    weight = " font-weight: bold;" if re.search(r"bold|[67]00", match[1]) else ""
    return f"{weight.strip()} font-size: {match[2]}px".strip()


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, max(width, 20)) or [""]
