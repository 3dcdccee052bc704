"""FLOPs and bytes of the eight kernels (docs/kernels.md), their rooflines: the least time they can take, and the rows
that GEMM tiles pad under random routing: the exact expectation, without sampling.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · R routed rows · w = 2n gated, n not ·
X rows of an expert

Bytes count every operand once: a token's row of x that K experts read comes from memory once and K-1 times from cache.
A multiplication and an addition are two FLOPs. The few FLOPs of activations and of sums are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from tilemoe.config import quantizes_wgrad
from tilemoe.perf.hardware import Ceilings
from tilemoe.shape import MoEShape

FORWARD = ("up_proj_act", "down_proj", "combine")
BACKWARD = ("down_proj_dgrad_dact", "down_proj_wgrad", "up_proj_dgrad", "up_proj_wgrad", "combine_grad")
IN_FP8 = ("up_proj_act", "down_proj", "down_proj_dgrad_dact", "up_proj_dgrad")  # in an FP8 layer of any width
_INDEX_BYTES = 4  # per entry of the plan
_SCORE_BYTES = 4
_SPREAD = 12  # standard deviations from the mean; terms beyond are below 1e-30
BALANCED = 0.1  # share of the ridge: ceilings vary by more between machines and clocks


@dataclass(frozen=True)
class Cost:
    """FLOPs, and bytes read and written."""

    flops: int
    read: int
    written: int

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """FLOP/byte; 0 where nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    def roofline_ms(self, ceilings: Ceilings) -> float:
        """The larger of the time to compute and the time to move the bytes, in milliseconds."""
        return 1e3 * max(self.flops / (ceilings.tflops * 1e12), self.bytes / (ceilings.tbps * 1e12))

    def bound(self, ceilings: Ceilings) -> str:
        """ "memory" or "arithmetic", whichever takes longer at the ceilings, or "balanced" if within `BALANCED`."""
        if abs(self.intensity - ceilings.ridge) <= BALANCED * ceilings.ridge:
            return "balanced"
        return "memory" if self.intensity < ceilings.ridge else "arithmetic"


def is_in_fp8(step: str, shape: MoEShape) -> bool:
    """Whether a step of an FP8 layer computes its products in FP8: the steps in `IN_FP8` and wide weight gradients."""
    by_row = {"down_proj_wgrad": shape.intermediate_size, "up_proj_wgrad": shape.width}.get(step, 0)
    return step in IN_FP8 or quantizes_wgrad(shape.hidden_size, by_row)


def kernel_costs(shape: MoEShape, precision: str = "bf16") -> dict[str, Cost]:
    """{kernel: cost}, in the order they run; `FORWARD` writes h, as in training.

    ``precision`` "fp8": operands of up_proj, down_proj, down_proj_dgrad and up_proj_dgrad have one byte per element;
    x, do and dh are read and written once more to be quantised (docs/fp8.md); scales are not counted. Weights count as
    already quantised. down_proj_wgrad and up_proj_wgrad: see `_wgrad_cost`.
    """
    tokens, d, n = shape.num_tokens, shape.hidden_size, shape.intermediate_size
    rows, w, size = shape.num_rows, shape.width, shape.element_bytes
    narrow = 1 if precision == "fp8" else size
    x, h, a, y = (size * count for count in (tokens * d, rows * w, rows * n, rows * d))
    narrow_w1, narrow_w2 = (narrow * shape.num_experts * d * columns for columns in (w, n))
    quantised_x, quantised_h = (tokens * d, rows * w) if precision == "fp8" else (0, 0)
    index, score = _INDEX_BYTES * rows, _SCORE_BYTES * rows
    up, down = 2 * rows * d * w, 2 * rows * d * n
    return {
        "up_proj_act": Cost(up, x + quantised_x + narrow_w1 + index, quantised_x + h + narrow * rows * n),
        "down_proj": Cost(down, narrow * rows * n + narrow_w2, y),
        "combine": Cost(0, y + score + index, x),
        "down_proj_dgrad_dact": Cost(
            down, x + quantised_x + narrow_w2 + h + score + 2 * index, quantised_x + h + a + score
        ),
        "down_proj_wgrad": _wgrad_cost(shape, n, precision),
        "up_proj_dgrad": Cost(up, h + quantised_h + narrow_w1, quantised_h + y),
        "up_proj_wgrad": _wgrad_cost(shape, w, precision),
        "combine_grad": Cost(0, y + index, x),
    }


def _wgrad_cost(shape: MoEShape, columns: int, precision: str) -> Cost:
    """The cost of down_proj_wgrad (``columns`` n) or up_proj_wgrad (w). In FP8 do or x is quantised, then gathered into
    a transposed copy; a_scaled or dh is read once for its largest magnitudes and once to be quantised into a transposed
    copy; the GEMM reads both copies.
    """
    d, rows, size = shape.hidden_size, shape.num_rows, shape.element_bytes
    by_token, by_row, index = shape.num_tokens * d, rows * columns, _INDEX_BYTES * rows
    flops, gradient = 2 * rows * d * columns, size * shape.num_experts * d * columns
    if precision != "fp8" or not quantizes_wgrad(d, columns):
        return Cost(flops, size * (by_token + by_row) + index, gradient)
    quantised = by_token + rows * d + by_row  # written and read
    return Cost(flops, size * (by_token + 2 * by_row) + quantised + 3 * index, quantised + gradient)


def router_costs(shape: MoEShape) -> tuple[Cost, Cost]:
    """(forward, backward) costs of the router's GEMMs: logits (T, E) from x and weight (E, d), and both gradients."""
    tokens, d, experts = shape.num_tokens, shape.hidden_size, shape.num_experts
    x, weight = shape.element_bytes * tokens * d, shape.element_bytes * experts * d
    logits = 4 * tokens * experts  # fp32
    gemm = 2 * tokens * d * experts
    return Cost(gemm, x + weight, logits), Cost(2 * gemm, 2 * logits + x + weight, x + weight)


def layer_roofline_ms(shape: MoEShape, ceilings: Ceilings) -> tuple[float, float]:
    """(forward, backward) milliseconds of the layer with its router: the sums of its kernels' rooflines."""
    costs, router = kernel_costs(shape), router_costs(shape)
    forward = sum(costs[name].roofline_ms(ceilings) for name in FORWARD) + router[0].roofline_ms(ceilings)
    backward = sum(costs[name].roofline_ms(ceilings) for name in BACKWARD) + router[1].roofline_ms(ceilings)
    return forward, backward


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
