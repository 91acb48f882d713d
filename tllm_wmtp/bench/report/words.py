"""Numbers as text, the same way everywhere in the report."""

from __future__ import annotations

import math
from collections.abc import Iterable

EN_DASH, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"
#: Stands for a value that is not there; a note beside the table says why.
ABSENT = EN_DASH


def number(value: float | None) -> str:
    """Three significant digits, as a plain number: 4.36, 71.0, 302, 1,040, 0.0317."""
    if value is None:
        return ABSENT
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return fixed(value, min(max(digits, 0), 6))


def fixed(value: float | None, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}".replace("-", MINUS)


def interval(low_high: tuple[float, float] | None, digits: int | None = None) -> str:
    """``3.09–3.37``, and with "to" where an end is negative."""
    if low_high is None:
        return ABSENT
    joint = " to " if min(low_high) < 0 else EN_DASH
    return joint.join(number(end) if digits is None else fixed(end, digits) for end in low_high)


def with_interval(
    value: float | None, low_high: tuple[float, float] | None, digits: int | None = None
) -> str:
    """``3.22 (3.09–3.37)``, or the value alone where it has no interval."""
    shown = number(value) if digits is None else fixed(value, digits)
    if value is None or low_high is None:
        return shown
    return f"{shown} ({interval(low_high, digits)})"


def ratio(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}{TIMES}"


def percent(share: float | None, digits: int = 0) -> str:
    return ABSENT if share is None else f"{share * 100:.{digits}f} %"


def percent_with_interval(share: float, low_high: tuple[float, float]) -> str:
    """``93.0 % (90.9–94.6)``."""
    low, high = (f"{end * 100:.1f}" for end in low_high)
    return f"{percent(share, 1)} ({low}{EN_DASH}{high})"


def signed_percent(share: float) -> str:
    """``+44 %``, ``−3 %``, ``0 %``."""
    rounded = round(share * 100)
    sign = "+" if rounded > 0 else MINUS if rounded < 0 else ""
    return f"{sign}{abs(rounded)} %"


def count(value: int | None) -> str:
    return ABSENT if value is None else f"{value:,}"


def tokens(value: int) -> str:
    """``16K`` for 16,384, ``261k`` for 261,000, ``1.04M`` for 1,040,000, else all digits."""
    if value >= 2**20 and value % 2**20 == 0:
        return f"{value >> 20}M"
    if value >= 1024 and value % 1024 == 0:
        return f"{value >> 10}K"
    if value >= 1_000_000:
        return f"{value / 1e6:.2f}".rstrip("0").rstrip(".") + "M"
    if value >= 10_000 and value % 1000 == 0:
        return f"{value // 1000}k"
    return f"{value:,}"


def size(value: float) -> str:
    """Bytes in binary units: ``4.0 MiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:,.{1 if value < 100 * unit else 0}f} {name}"
    return f"{value:.0f} B"


def listed(items: Iterable[str]) -> str:
    """``a, b and c``."""
    names = list(items)
    if len(names) < 2:
        return "".join(names)
    return ", ".join(names[:-1]) + " and " + names[-1]


def plural(n: int, noun: str) -> str:
    """``1 row``, ``2 rows``, ``1,024 rows``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
