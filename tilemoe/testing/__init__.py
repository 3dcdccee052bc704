"""Tools to test a backend: hostile routings, well-scaled inputs, poisoned memory and one way to compare results.

Results are compared with `tilemoe.reference` in fp64; ordinary PyTorch's error in the same dtype sets the tolerance.
"""

from __future__ import annotations

from tilemoe.testing.compare import ERROR_CAPS as ERROR_CAPS
from tilemoe.testing.compare import against_reference as against_reference
from tilemoe.testing.compare import assert_close_to_reference as assert_close_to_reference
from tilemoe.testing.compare import assert_equal as assert_equal
from tilemoe.testing.compare import assert_moe_matches_reference as assert_moe_matches_reference
from tilemoe.testing.compare import relative_error as relative_error
from tilemoe.testing.inputs import forward_and_grads as forward_and_grads
from tilemoe.testing.inputs import make_inputs as make_inputs
from tilemoe.testing.inputs import plain_moe as plain_moe
from tilemoe.testing.inputs import poisoned_memory as poisoned_memory
from tilemoe.testing.routings import HostileRouting as HostileRouting
from tilemoe.testing.routings import hostile_routings as hostile_routings
from tilemoe.testing.routings import used_pairs as used_pairs
