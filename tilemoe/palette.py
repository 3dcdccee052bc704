"""Colours of every figure, from dark to light, so that they are told apart in grey, too; each with a marker, dashes and
a hatch of its own. No matplotlib: keywords for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SEQUENTIAL = "cividis"  # of values: lightness grows with them


@dataclass(frozen=True)
class Style:
    """How one of several series is drawn."""

    colour: str
    marker: str
    dashes: Any  # matplotlib's linestyle
    hatch: str

    @property
    def bar(self) -> dict[str, Any]:
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": "black", "linewidth": 0.5}

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes}


STYLES = (
    Style("#1b3a6b", "o", "-", ""),
    Style("#a3263a", "s", "--", "\\\\"),
    Style("#2f7fb0", "v", "-.", "xx"),
    Style("#e08214", "D", ":", "//"),
    Style("#a6bddb", "^", (0, (5, 1)), "--"),
    Style("#d9d9d9", "P", (0, (3, 1, 1, 1)), ".."),
)


def spread(count: int) -> tuple[Style, ...]:
    """``count`` of `STYLES`, at most all, as far apart in lightness as they can be; one is the darkest.

    ValueError: more than there are.
    """
    if not 0 <= count <= len(STYLES):
        raise ValueError(f"count must be from 0 to {len(STYLES)}, got {count}; draw fewer series in a figure")
    gaps = max(1, count - 1)
    return tuple(STYLES[(index * (len(STYLES) - 1) + gaps // 2) // gaps] for index in range(count))
