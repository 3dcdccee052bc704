"""The keyed permutation: a bijection for every size and key, and well mixed."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemoe.data.permutation import permute

KEYS = st.tuples(st.integers(0, 1), st.integers(0, 2**64), st.integers(0, 2**40))


@settings(deadline=None)
@given(st.integers(1, 5000), KEYS)
def test_bijection(size: int, key: tuple[int, ...]):
    image = permute(np.arange(size), size, key)
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 65536, 65537])
def test_bijection_around_powers_of_two(size: int):
    assert np.array_equal(np.sort(permute(np.arange(size), size, (7,))), np.arange(size))


@given(st.integers(1, 1 << 62), KEYS, st.lists(st.integers(0, 1 << 62), min_size=1, max_size=50))
def test_stays_inside_and_distinct_for_any_size(size: int, key: tuple[int, ...], numbers: list[int]):
    indices = np.unique(np.array([number % size for number in numbers], dtype=np.int64))
    image = permute(indices, size, key)
    assert ((image >= 0) & (image < size)).all()
    assert len(np.unique(image)) == len(indices)


@given(st.integers(1, 5000), KEYS)
def test_pointwise(size: int, key: tuple[int, ...]):
    whole = permute(np.arange(size), size, key)
    some = np.arange(0, size, 7)
    assert np.array_equal(permute(some[::-1], size, key), whole[some][::-1])
    assert permute(np.array([], dtype=np.int64), size, key).shape == (0,)


@pytest.mark.parametrize("size", [10, 100, 1000])
def test_images_and_neighbours_are_spread_evenly_over_the_keys(size: int):
    """Chi-square with 9 and 8 degrees of freedom: above 35 with a chance below 1e-4, and the keys are fixed."""
    pairs = np.array([permute(np.array([0, 1]), size, (key,)) for key in range(2000)])
    distance = (pairs[:, 1] - pairs[:, 0]) % size - 1  # of two neighbours: never 0, so size - 1 values
    for values, bins in (
        (pairs[:, 0] * 10 // size, 10),
        (pairs[:, 1] * 10 // size, 10),
        (distance * 9 // (size - 1), 9),
    ):
        expected = 2000 / bins
        assert float(((np.bincount(values, minlength=bins) - expected) ** 2 / expected).sum()) < 35


def test_no_order_is_left():
    image = permute(np.arange(20_000), 20_000, (3,)).astype(float)
    for lag in (1, 2, 64, 128):
        assert abs(np.corrcoef(image[:-lag], image[lag:])[0, 1]) < 0.03
    assert abs(np.corrcoef(np.arange(20_000), image)[0, 1]) < 0.03


def test_cost_does_not_depend_on_the_size():
    started = time.perf_counter()
    for key in range(20):
        permute(np.arange(1000), 10**17, (key,))
    assert time.perf_counter() - started < 2
