"""How many cases a run has, by which seed, and how they are drawn.

``FUZZ`` is the share of a full run, 1 for all of it (benchmarks/fuzz.py sets it, and ``FUZZ_SEED``); without it a short
selection runs, the same each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

SHARE = os.environ.get("FUZZ")
SEED = int(os.environ.get("FUZZ_SEED", "0"))

Case = TypeVar("Case")


def judge_cases(
    judge: Callable[[Case], None],
    strategy: SearchStrategy[Case],
    record_property: Callable[[str, int], None],
    *,
    short: int,
    full: int,
    each: int = 1,
    part: int = 0,
) -> None:
    """``judge`` so many examples, of ``each`` cases; it raises for one that is wrong, and hypothesis shows the least.

    Each ``part`` of a test draws others. The cases that were judged become the test's property "cases".
    """
    judged = 0

    @seed(SEED + part)
    @settings(
        max_examples=short if SHARE is None else max(1, round(full * float(SHARE))),
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(case: Case) -> None:
        nonlocal judged
        judged += each
        judge(case)

    try:
        run()
    finally:
        record_property("cases", judged)
