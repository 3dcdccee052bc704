"""The one way to compare results: the error against fp64, relative to ordinary PyTorch's error in the same dtype.

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

# No RMS-relative error may exceed its cap, however large the baseline's error is.
ERROR_CAPS: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
)
_OUTLIER = 12.0  # a single element may be off by this many caps times the RMS


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """RMS of the difference over the RMS of ``exact``, which must not be all zeros: ``error = rms(a - e) / rms(e)``.

    actual: (...) of any float dtype; exact: (...) fp64.

    Raises:
        AssertionError: ``exact`` is all zeros, or empty.

    Examples:
        >>> from tilemoe.testing import relative_error
        >>> exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
        >>> round(relative_error(torch.tensor([3.0, 4.5]), exact), 3)
        0.1
    """
    assert exact.any(), "the exact value is zero throughout: nothing is relative to it"
    return _rms(actual.double() - exact) / _rms(exact)


def assert_equal(actual: Any, expected: Any, where: object = "") -> None:
    """Assert that tensors, or sequences or mappings of them, have equal bits and dtypes; NaN equals nothing.

    Raises:
        AssertionError: a value, a shape or a dtype differs; the message begins with ``where``.

    Examples:
        >>> from tilemoe.testing import assert_equal
        >>> assert_equal({"o": torch.ones(2)}, {"o": torch.ones(2)})
        >>> assert_equal(torch.ones(1), torch.ones(1).double(), "o")
        Traceback (most recent call last):
        AssertionError: o: The values for attribute 'dtype' do not match: torch.float32 != torch.float64.
    """
    message = (lambda found: f"{where}: {found}") if where else None
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0, msg=message)


def assert_close_to_reference(
    actual: Mapping[str, Tensor], baseline: Mapping[str, Tensor], exact: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Assert that each tensor of ``actual`` errs at most twice as much as ``baseline``, and no more than a cap.

    Tensors are (...), of any shape. Errors are RMS-relative, against ``exact`` (fp64). baseline: the same quantities by
    ordinary PyTorch in ``dtype``, that of x; shapes and dtypes must agree with it. The tolerance is at least a single
    rounding to the dtype. With so few elements that chance matters, twice becomes up to ten times; the cap stays.
    No element may be off by more than 12 caps times the RMS; an element above 12 RMS, whose own rounding is as large,
    may be off by a cap times its size. Where the exact value is all zeros (a token without an expert, an expert without
    a token), only zeros pass. A tolerance that zeros would pass is refused.

    Raises:
        AssertionError: the message names the tensor, its error and the tolerance.

    Examples:
        >>> from tilemoe.testing import assert_close_to_reference
        >>> exact = {"o": torch.linspace(-1, 1, 64, dtype=torch.float64)}
        >>> rounded = {"o": exact["o"].bfloat16()}
        >>> assert_close_to_reference(rounded, rounded, exact, torch.bfloat16)
        >>> assert_close_to_reference({"o": rounded["o"] * 1.1}, rounded, exact, torch.bfloat16)
        Traceback (most recent call last):
        AssertionError: o: RMS-relative error 9.94e-02 exceeds 5.86e-03
    """
    assert actual.keys() == baseline.keys() == exact.keys(), "the three must hold the same names"
    # Many elements share one routed row's error: the smallest tensor bounds the number of independent samples.
    samples = min((t.numel() for t in exact.values() if t.numel()), default=1)
    margin = 1 + 4 / math.sqrt(samples)
    for name, expected in exact.items():
        _assert_close(name, actual[name], baseline[name], expected, dtype, margin)


def assert_moe_matches_reference(
    inputs: Mapping[str, Tensor], plan: RoutingPlan, moe: MoE = tilemoe_moe, **options: Any
) -> dict[str, Tensor]:
    """Compare ``moe``'s output (T, d) and all its gradients with the reference; returns them by name (o, dx, dw1, ...).

    inputs: x (T, d), w1, w2, scores and biases of any float dtype, as `make_inputs` gives them. ``options``
    (activation, gate_up, activation_limit, activation_alpha) go to ``moe``, to ordinary PyTorch and to the reference.
    Options that only ``moe`` has must be bound to it beforehand.

    Raises:
        AssertionError: a tensor is too far off (`assert_close_to_reference`).

    Examples:
        >>> from functools import partial
        >>> from tilemoe.testing import assert_moe_matches_reference, hostile_routings, make_inputs
        >>> for routing in hostile_routings():
        ...     inputs = make_inputs(routing.plan, 16, 8, dtype=torch.bfloat16)
        ...     found = assert_moe_matches_reference(inputs, routing.plan, partial(tilemoe.moe, kernels="torch"))
        >>> sorted(found)
        ['dscores', 'dw1', 'dw2', 'dx', 'o']
    """
    found = against_reference(inputs, plan, moe, **options)
    assert_close_to_reference(*found, inputs["x"].dtype)
    return found[0]


def against_reference(
    inputs: Mapping[str, Tensor], plan: RoutingPlan, moe: MoE = tilemoe_moe, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Output (T, d) and gradients by ``moe``, by ordinary PyTorch in the inputs' dtype and by the reference in fp64.

    Takes the arguments of ``moe`` and raises the same errors: a ValueError if they are wrong.

    Examples:
        >>> from tilemoe.testing import against_reference, make_inputs, relative_error
        >>> plan = tilemoe.plan_topk(torch.tensor([[0, 1], [2, 0]]), num_experts=3)
        >>> found, plain, exact = against_reference(make_inputs(plan, 16, 8), plan)
        >>> relative_error(found["o"], exact["o"]) < 1e-6, exact["o"].dtype
        (True, torch.float64)
    """
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
    # In fp64 the baseline and the exact value are the same computation.
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
