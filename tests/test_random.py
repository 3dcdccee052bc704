"""Initial weights: against the same arithmetic in Python's integers and normal quantiles, moments, parts of a whole."""

from statistics import NormalDist

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tilemoe.runtime import random
from tilemoe.runtime.random import normal_, uniform_


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, std: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.empty(shape, dtype=dtype)
    normal_(weight, std, seeded(seed))
    return weight


def bits_of(key: int, row: int, column: int) -> int:
    """Of an element, signed."""
    z = (row * 0x9E3779B97F4A7C15 + key) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    low, high = z % 2**32, z >> 32
    z = (column * 0x9E3779B9 + low) % 2**32
    z = (z ^ z >> 16) * 0x85EBCA6B % 2**32 ^ high
    z = (z ^ z >> 13) * 0xC2B2AE35 % 2**32
    z ^= z >> 16
    return z - 2**32 if z >> 31 else z


def test_values_are_quantiles_of_a_hash_of_key_and_index() -> None:
    key = int(torch.randint(-(1 << 63), (1 << 63) - 1, (), generator=seeded())) % 2**64
    got, flat = drawn(3, 5, 70, std=0.5), torch.empty(15, 70)
    uniform_(flat, 3.0, seeded())
    for expert, row, column in ((0, 0, 0), (2, 4, 69), (1, 0, 31), (0, 3, 64)):
        bits = bits_of(key, 5 * expert + row, column)
        quantile = NormalDist().inv_cdf((bits + 2**31 + 0.5) / 2**32)
        assert float(got[expert, row, column]) == pytest.approx(0.5 * quantile, rel=2e-4, abs=1e-5)
        assert float(flat[5 * expert + row, column]) == float(torch.tensor(bits).float() * (3.0 * 2.0**-31))


def test_moments_and_correlations() -> None:
    size = 2048
    x, y = drawn(size, size).double(), drawn(size, size, seed=1).double()
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - mean) * size < 4 * variance**0.5
    assert 4.5 < x.abs().max() < 4.7
    pairs = [(x, y), *((x[:, k:], x[:, :-k]) for k in (1, 2, 16, 256)), *((x[k:], x[:-k]) for k in (1, 2, 16, 256))]
    for left, right in pairs:
        assert abs((left * right).mean()) * size < 4.5


@pytest.mark.parametrize("shape", [(130, 129), (3, 7, 64), (50,)])
def test_chunks_dtypes_and_strides_change_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn(*shape)
    assert torch.equal(drawn(*shape, dtype=torch.bfloat16), whole.bfloat16())
    monkeypatch.setattr(random, "_CPU_CHUNK", 200)
    assert torch.equal(drawn(*shape), whole)
    turned = torch.empty(*shape[:-2], *shape[-2:][::-1]).transpose(-1, -2) if len(shape) > 1 else torch.empty(shape)
    normal_(turned, 1.0, seeded())
    assert torch.equal(turned, whole)


def test_a_part_is_drawn_as_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sharded models `tests/parallel/parallel_checks.py` says the same."""
    whole = drawn(6, 8, 40)
    for starts, sizes in (((2, 0, 0), (3, 8, 40)), ((4, 5, 0), (2, 3, 40)), ((0, 2, 13), (6, 1, 20))):
        part = torch.empty(sizes)
        monkeypatch.setattr(random, "local_part", lambda weight, part=part, starts=starts: (part, starts))
        normal_(torch.empty(6, 8, 40), 1.0, seeded())
        places = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        assert torch.equal(part, whole[places])


def test_what_has_no_values_takes_its_key() -> None:
    weights = []
    for device in ("meta", "cpu"):
        generator = seeded()
        normal_(torch.empty(2, 3, device=device), 1.0, generator)
        weights.append(torch.empty(4, 5))
        normal_(weights[-1], 1.0, generator)
    assert torch.equal(*weights)
    with FakeTensorMode():
        normal_(torch.empty(2, 3), 1.0)


def test_the_default_generator_is_the_cpu_s() -> None:
    torch.manual_seed(3)
    weight = torch.empty(4, 5)
    normal_(weight, 1.0)
    assert torch.equal(weight, drawn(4, 5, seed=3))


@pytest.mark.gpu
def test_a_gpu_draws_the_same() -> None:
    weight = torch.empty(33, 4, 1000, device="cuda")
    normal_(weight, 0.02, seeded())
    assert torch.equal(weight.cpu(), drawn(33, 4, 1000, std=0.02))
