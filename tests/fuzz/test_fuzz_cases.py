"""The cases of a run: as many as are promised, and others for each seed, backend, dtype and part."""

from __future__ import annotations

import itertools
from typing import Any

import fuzzing
import pytest
import test_fuzz_routings
import test_fuzz_routings_values
import torch
from fuzzing import Cases, judge_cases, seed_of
from routings import Layer, layers

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PROMISED = {
    "torch": (test_fuzz_routings.CASES, 1, 1_000_000),
    "interpreter": (test_fuzz_routings_values.CASES_OF["interpreter"], 1, 10_000),
    "GPU": (test_fuzz_routings_values.CASES_OF["GPU"], len(FLOATS), 10_000),
}


@pytest.mark.parametrize("name", PROMISED)
def test_a_full_run_has_what_is_promised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, dtypes, promised = PROMISED[name]
    monkeypatch.setattr(fuzzing, "SHARE", "1")
    assert promised <= dtypes * len(cases.numbers) * cases.draws * cases.each <= 1.1 * promised


def test_seeds_backends_dtypes_and_parts_have_cases_of_their_own() -> None:
    whose: dict[Any, Any] = {}
    for owner in itertools.product((1, 2), ("GPU", "interpreter"), FLOATS[:2], (0, 1)):
        found: list[Layer] = []
        number = seed_of(*owner[1:], run=owner[0])
        judge_cases(found.append, layers((1, 2), 3, number), lambda *_: None, Cases(0, 1, short=5), number)
        seeds = [generator.initial_seed() % 2**32 for layer in found for generator in layer.generators(2)]
        assert all(whose.setdefault(case, owner) == owner for case in {*found, *seeds})
