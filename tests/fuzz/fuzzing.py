"""How many cases a run has, by which seed, and how they are drawn.

``FUZZ`` is the share of a full run's parts, 1 for all of them (benchmarks/record_tests.py sets it, and ``FUZZ_SEED``);
without it a short selection runs, the same each time.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

SHARE = os.environ.get("FUZZ")
SEED = int(os.environ.get("FUZZ_SEED", "0"))

Case = TypeVar("Case")


@dataclass(frozen=True)
class Cases:
    """Of a test: ``full`` of them in ``parts``, ``each`` of a draw; a short run is one part of ``short`` draws.

    A part is what one process does at a time, and what a run that is interrupted leaves whole or not done.
    """

    full: int
    parts: int
    short: int
    each: int = 1

    @property
    def numbers(self) -> range:
        """The parts of this run."""
        return range(1 if SHARE is None else max(1, round(self.parts * float(SHARE))))

    @property
    def draws(self) -> int:
        """In each part of this run."""
        return self.short if SHARE is None else math.ceil(self.full / self.parts / self.each)


def seed_of(*names: object, run: int = SEED) -> int:
    """64 bits of the run's seed and ``names``, which say whose cases it is: the backend, the dtype, the part."""
    return int.from_bytes(hashlib.sha256(repr((run, *names)).encode()).digest()[:8], "big")


def judge_cases(
    judge: Callable[[Case], None],
    strategy: SearchStrategy[Case],
    record_property: Callable[[str, int], None],
    cases: Cases,
    number: int,
) -> None:
    """``judge`` the draws of a part; it raises for one that is wrong, and hypothesis shows the least.

    number: of `seed_of`. The cases up to the first that is wrong become the test's property "cases"; hypothesis begins
    with the plainest there is, which every part has, and which does not count.
    """
    judged, is_wrong = -cases.each, False

    @seed(number)
    @settings(
        max_examples=1 + cases.draws,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(case: Case) -> None:
        nonlocal judged, is_wrong
        judged += 0 if is_wrong else cases.each
        try:
            judge(case)
        except BaseException:
            is_wrong = True
            raise

    try:
        run()
    finally:
        record_property("cases", judged)
