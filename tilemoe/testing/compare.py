"""The one way to compare: against fp64, by the error that ordinary PyTorch makes in the same dtype.

T tokens · E experts
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tilemoe import reference
from tilemoe.ops.moe import moe as tilemoe_moe
from tilemoe.plan import RoutingPlan
from tilemoe.testing.inputs import MoE, forward_and_grads, plain_moe

# No RMS-relative error may be larger, however bad the yardstick is.
ERROR_CAPS: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
)
_OUTLIER = 12.0  # caps that a single element may be off by, in units of the RMS


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """RMS of the difference over the RMS of ``exact``, which must not be all zeros."""
    return _rms(actual.double() - exact) / _rms(exact)


def assert_equal(actual: Any, expected: Any, where: object = "") -> None:
    """To the last bit: tensors, or sequences or mappings of them, of the same dtypes; NaN equals nothing."""
    message = (lambda found: f"{where}: {found}") if where else None
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0, msg=message)


def assert_close_to_reference(
    actual: Mapping[str, Tensor], baseline: Mapping[str, Tensor], exact: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Each tensor of ``actual`` is as close to ``exact`` (fp64) as twice the error of ``baseline``, and under a cap.

    baseline: the same quantities by ordinary PyTorch in ``dtype``, that of x; shapes and dtypes must agree with it.
    The error is the RMS-relative one. A single rounding to the dtype is its floor, and where there are so few elements
    that chance decides, twice becomes up to ten times; the cap stays. No element may be off by more than 12 caps, and
    one larger than 12 RMS, whose own rounding is as much, by more than a cap of its size.
    Where the exact value is zero throughout (a token without an expert, an expert without a token), zero is the only
    answer. AssertionError names the tensor. A tolerance that zeros would pass is refused.
    """
    assert actual.keys() == baseline.keys() == exact.keys(), "the three must hold the same names"
    # The error of a single routed row is common to many elements: the smallest tensor tells how many samples there are.
    samples = min((t.numel() for t in exact.values() if t.numel()), default=1)
    margin = 1 + 4 / math.sqrt(samples)
    for name, expected in exact.items():
        _assert_close(name, actual[name], baseline[name], expected, dtype, margin)


def assert_moe_matches_reference(
    inputs: Mapping[str, Tensor], plan: RoutingPlan, moe: MoE = tilemoe_moe, **options: Any
) -> dict[str, Tensor]:
    """``moe``'s output and all its gradients against the reference; returns them by name (o, dx, dw1, ...).

    ``options`` (activation, gate_up, activation_limit, activation_alpha) go to all three; what concerns ``moe`` alone,
    bind to it beforehand.
    """
    found = against_reference(inputs, plan, moe, **options)
    assert_close_to_reference(*found, inputs["x"].dtype)
    return found[0]


def against_reference(
    inputs: Mapping[str, Tensor], plan: RoutingPlan, moe: MoE = tilemoe_moe, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Output and gradients by ``moe``, by ordinary PyTorch and by the reference in fp64."""
    exact_inputs = {name: tensor.detach().double() for name, tensor in inputs.items()}
    exact = forward_and_grads(reference.moe, exact_inputs, plan, **options)
    baseline = forward_and_grads(plain_moe, inputs, plan, **options)
    return forward_and_grads(moe, inputs, plan, **options), baseline, exact


def _assert_close(
    name: str, actual: Tensor, baseline: Tensor, exact: Tensor, dtype: torch.dtype, margin: float
) -> None:
    assert exact.dtype == torch.float64, f"{name}: the exact value must be fp64"
    assert bool(exact.isfinite().all()), f"{name}: the exact value is not finite"
    assert actual.dtype == baseline.dtype, f"{name}: dtype {actual.dtype}, expected {baseline.dtype}"
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    assert bool(actual.isfinite().all()), f"{name}: not finite"
    if not exact.any():
        assert not actual.any(), f"{name}: must be exactly zero, found {float(actual.abs().max())}"
        return
    rms = _rms(exact)
    assert 1e-3 < rms < 1e3, f"{name}: inputs are badly scaled, its RMS is {rms:.1e}"
    coarser = max(dtype, actual.dtype, key=lambda each: torch.finfo(each).eps)
    cap = ERROR_CAPS[coarser]
    # In fp64 the yardstick and the exact value are one and the same computation.
    yardstick = cap if coarser == torch.float64 else 2 * relative_error(baseline, exact)
    tolerance = min(cap, margin * max(yardstick, torch.finfo(coarser).eps / 2))
    assert relative_error(torch.zeros_like(exact), exact) > 2 * tolerance, f"{name}: zeros would pass"
    error = relative_error(actual, exact)
    assert error <= tolerance, f"{name}: RMS-relative error {error:.2e} exceeds {tolerance:.2e}"
    worst = float(((actual.double() - exact).abs() / (exact.abs() / _OUTLIER).clamp(min=rms)).max())
    assert worst <= _OUTLIER * cap, f"{name}: an element is off by {worst:.2e} RMS, allowed {_OUTLIER * cap:.2e}"
    if exact.ndim > 1:
        empty = ~exact.flatten(1).any(dim=1)
        assert not actual[empty].any(), f"{name}: must be exactly zero at {empty.nonzero().flatten().tolist()}"


def _rms(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt()) if t.numel() else 0.0
