"""Figures can be read in grey: the lightness of the styles, and that whatever draws takes its colours from there."""

from itertools import pairwise

import pytest
from matplotlib.colors import to_rgb

from tilemoe.plots import STYLES, spread

STEP = 10  # of lightness, of which black to white is 100


def lightness(colour: str | tuple[float, ...]) -> float:
    """CIE L*, of the relative luminance of sRGB (IEC 61966-2-1)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 903.3 * luminance if luminance <= 0.008856 else 116 * luminance ** (1 / 3) - 16


def test_each_style_is_lighter_than_the_one_before() -> None:
    found = [lightness(style.colour) for style in STYLES]
    assert all(after - before >= STEP for before, after in pairwise(found))


def test_styles_differ_without_colour_too() -> None:
    for name in ("marker", "dashes", "hatch"):
        assert len({getattr(style, name) for style in STYLES}) == len(STYLES)


def test_spread_is_as_far_apart_as_can_be() -> None:
    assert spread(0) == ()
    assert spread(1) == STYLES[:1]
    assert spread(3) == (STYLES[0], STYLES[3], STYLES[5])
    assert spread(len(STYLES)) == STYLES
    for count in range(2, len(STYLES)):
        taken = [STYLES.index(style) for style in spread(count)]
        assert taken == sorted(set(taken))
        assert (taken[0], taken[-1]) == (0, len(STYLES) - 1)
    with pytest.raises(ValueError, match="count must be from 0 to 6, got 7"):
        spread(7)
