"""What tests of a backend need: hostile routings, inputs of the right scale, poisoned memory and one way to compare.

Everything is judged against `tilemoe.reference` in fp64, and measured against ordinary PyTorch in the same dtype.
"""

from __future__ import annotations

from tilemoe.testing.compare import (
    ERROR_CAPS,
    assert_close_to_reference,
    assert_equal,
    assert_moe_matches_reference,
    relative_error,
)
from tilemoe.testing.inputs import forward_and_grads, make_inputs, plain_moe, poisoned_memory
from tilemoe.testing.routings import HostileRouting, hostile_routings, used_pairs

__all__ = [
    "ERROR_CAPS",
    "HostileRouting",
    "assert_close_to_reference",
    "assert_equal",
    "assert_moe_matches_reference",
    "forward_and_grads",
    "hostile_routings",
    "make_inputs",
    "plain_moe",
    "poisoned_memory",
    "relative_error",
    "used_pairs",
]
