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
from hypothesis import strategies as st
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
    monkeypatch.setattr(fuzzing, "SHARE", "0.25")
    assert [*cases.numbers] == [*range(max(1, cases.parts // 4))], "the first ones of all: a longer run goes on"


def drawn(number: int, draws: int = 20) -> list[Layer]:
    found: list[Layer] = []
    judge_cases(found.append, layers((1, 2), 3, number), lambda *_: None, Cases(0, 1, short=draws), number)
    return found


def test_seeds_backends_dtypes_and_parts_have_cases_of_their_own() -> None:
    whose: dict[Any, Any] = {}
    for run, backend, dtype, part in itertools.product((1, 2), ("GPU", "interpreter"), FLOATS, (0, 1)):
        found = drawn(seed_of(backend, dtype, part, run=run))
        seeds = [generator.initial_seed() % 2**32 for layer in found for generator in layer.generators(2)]
        for case in {*found, *seeds}:
            assert whose.setdefault(case, (run, backend, dtype, part)) == (run, backend, dtype, part)
    assert drawn(seed_of("GPU", 0)) == drawn(seed_of("GPU", 0))


def test_only_right_cases_and_the_first_wrong_one_count() -> None:
    """Neither the plainest, nor what is tried to find the least that is wrong."""
    recorded: list[tuple[str, int]] = []
    seen: list[int] = []

    def judge(case: int) -> None:
        seen.append(case)
        assert len(seen) < 6 or case < 3

    with pytest.raises(AssertionError):
        judge_cases(judge, st.integers(0, 10**6), lambda *found: recorded.append(found), Cases(0, 1, 50, each=2), 1)
    wrong = next(i for i, case in enumerate(seen) if i >= 5 and case >= 3)
    assert (seen[0], recorded) == (0, [("cases", 2 * wrong)])
    assert len(seen) > wrong + 1
    judge_cases(lambda case: None, st.integers(), lambda *found: recorded.append(found), Cases(0, 1, 50, each=2), 1)
    assert recorded[1] == ("cases", 100)
