"""The styles of all figures: colours from dark to light, which differ in greyscale too, each with its own marker, dash
pattern and hatch. They are keyword arguments for matplotlib, which is not imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SEQUENTIAL = "cividis"  # the colour map for values: lightness grows with the value


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
    """``count`` of the `STYLES`, spread over their range of lightness; for a count of 1, the darkest.

    ValueError: ``count`` is negative or above the number of styles.
    """
    if not 0 <= count <= len(STYLES):
        raise ValueError(f"count must be from 0 to {len(STYLES)}, got {count}; draw fewer series in a figure")
    gaps = max(1, count - 1)
    return tuple(STYLES[(index * (len(STYLES) - 1) + gaps // 2) // gaps] for index in range(count))
