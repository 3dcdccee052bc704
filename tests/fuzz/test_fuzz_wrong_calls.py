"""Wrong calls of the public API: every single replacement of an argument, and several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from api import CALLS
from fuzzing import Cases, judge_cases, seed_of
from helpers import raises_one_line
from hypothesis import strategies as st
from wrong_calls import kinds_of, why_wrong

import tilemoe

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module", autouse=True)
def a_job_of_one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_public_name_is_called() -> None:
    """But what is derived from, what is returned and modules."""
    uncalled = {"Backend", "MoEOutput", "reference", "__version__"}
    assert {*tilemoe.__all__} - uncalled <= {function.partition(".")[0] for function in CALLS}


@pytest.mark.parametrize("function", CALLS)
def test_the_calls_that_wrong_ones_are_made_from_are_right(function: str) -> None:
    assert why_wrong(function, {}) is None


@pytest.mark.parametrize("function", CALLS)
def test_an_argument_that_it_does_not_have(function: str) -> None:
    call = CALLS[function]
    with raises_one_line("argument 'nothing'", TypeError):
        call.function(**call.arguments(), nothing=None)


@pytest.mark.parametrize("function", CALLS)
def test_one_wrong_argument(function: str, record_property: Callable[..., None]) -> None:
    changes = [{name: kind} for name, kinds in kinds_of(function).items() for kind in kinds]
    record_property("cases", len(changes))
    found = {str(change): why_wrong(function, change) for change in changes}
    assert {change: why for change, why in found.items() if why is not None} == {}


SEVERAL = Cases(10_000, parts=1, short=200)  # in one part, because two would draw some calls both


@st.composite
def wrong_calls(draw: Any) -> tuple[str, dict[str, str]]:
    """A function, and two or three of its arguments with what takes their place."""
    function = draw(st.sampled_from([name for name in CALLS if len(kinds_of(name)) > 1]))
    kinds = kinds_of(function)
    names = draw(st.lists(st.sampled_from(list(kinds)), min_size=2, max_size=3, unique=True))
    return function, {name: draw(st.sampled_from(kinds[name])) for name in names}


def test_several_wrong_arguments(record_property: Callable[..., None]) -> None:
    def judge(wrong: tuple[str, dict[str, str]]) -> None:
        assert why_wrong(*wrong) is None

    judge_cases(judge, wrong_calls(), record_property, SEVERAL, seed_of("wrong calls"))
