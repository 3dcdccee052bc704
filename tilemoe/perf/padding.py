"""Padding rows that GEMM tiles compute under random routing: the exact expectation, without sampling.

T tokens · E experts · K experts per token · X rows of an expert
"""

from __future__ import annotations

import math
from functools import lru_cache

from tilemoe.shape import MoEShape

_SPREAD = 12  # standard deviations from the mean; terms beyond are below 1e-30


@lru_cache(maxsize=1024)
def expected_units(trials: int, probability: float, unit: int) -> float:
    """``E[ceil(X / unit)]`` for binomial X with ``trials`` and ``probability``."""
    if probability >= 1:
        return math.ceil(trials / unit)
    mean = trials * probability
    reach = _SPREAD * math.sqrt(mean * (1 - probability)) + _SPREAD
    first, last = max(0, math.floor(mean - reach)), min(trials, math.ceil(mean + reach))
    log_choices = math.lgamma(trials + 1)
    log_odds = math.log(probability), math.log1p(-probability)
    total = 0.0
    for rows in range(max(1, first), last + 1):
        log_ways = log_choices - math.lgamma(rows + 1) - math.lgamma(trials - rows + 1)
        chance = math.exp(log_ways + rows * log_odds[0] + (trials - rows) * log_odds[1])
        total += chance * -(-rows // unit)
    return total


def padded_rows(shape: MoEShape, unit: int) -> float:
    """Rows of all experts, each expert's rounded up to ``unit``, if tokens choose K of E experts at random.

    Each token chooses K different experts, all sets equally likely, so an expert's rows are binomial (T, K / E):
    ``E unit E[ceil(X / unit)]``. If ``shape.rows`` is given, R / T replaces K.
    """
    if shape.num_rows == 0:
        return 0.0
    probability = shape.num_rows / (shape.num_tokens * shape.num_experts)
    return shape.num_experts * unit * expected_units(shape.num_tokens, probability, unit)


def padding_waste(shape: MoEShape, unit: int) -> float:
    """Rows computed beyond R, divided by R; 0 if R is 0."""
    return padded_rows(shape, unit) / shape.num_rows - 1 if shape.num_rows else 0.0
