"""The registry of activation functions: each name's value, gradient, and whether it is gated.

R routed rows · n expert width

A gated activation takes gate and up, (R, n) each; an ungated one takes z (R, n). Both return ``a`` (R, n), computed in
the dtype of their inputs (fp32 or fp64). The formulas use only tensor methods and this file does not import torch, so
that `tilemoe.config` can read the names without torch.

The Triton versions, under the same names, are in `tilemoe.kernels.experts.triton.activations`.
`tilemoe.kernels.experts.torch.activations` applies this file's functions to a stored pre-activation.
`tilemoe.reference` has independent definitions, on purpose. A new activation needs an entry here, in the Triton ones,
and in the reference: see the diff in CONTRIBUTING.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilemoe.checks import require_choice, require_finite

if TYPE_CHECKING:
    from torch import Tensor

_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_TANH_C, _TANH_K = math.sqrt(2.0 / math.pi), 0.044715


@dataclass(frozen=True)
class ActivationSpec:
    """A registered activation with its parameters and its memory layout; hashable.

    ``gate_up``: the column order of h (R, 2n), "concatenated" ([gate; up]) or "interleaved" (gate0, up0, gate1, ...).
    ``limit`` is the clamp bound of swiglu_oai and swiglu_clamped, ``alpha`` the sigmoid's slope in swiglu_oai.
    """

    name: str
    gate_up: str = "concatenated"
    limit: float = math.inf
    alpha: float = 1.0

    @property
    def is_gated(self) -> bool:
        return REGISTRY[self.name].is_gated

    @property
    def width_factor(self) -> int:
        """Columns of h per column of a: 2 when gated, else 1."""
        return 2 if REGISTRY[self.name].is_gated else 1


@dataclass(frozen=True)
class Activation:
    """An entry of the registry.

    value    (gate, up, spec) or (z, spec) -> a.
    grad     (gate, up, da, spec) -> (a, dgate, dup), or (z, da, spec) -> (a, dz): recomputes a and backpropagates
             ``da``. As in PyTorch, the derivative of relu at 0 is 0, and that of a clamp at its bound is 1.
    limit, alpha    defaults of ``activation_limit`` and ``activation_alpha``; None: it has no such parameter.
    """

    is_gated: bool
    value: Callable[..., Tensor]
    grad: Callable[..., tuple[Tensor, ...]]
    limit: float | None = None
    alpha: float | None = None


Pointwise = Callable[["Tensor"], "tuple[Tensor, Tensor]"]  # z -> (f(z), f'(z))


def pointwise(inner: Pointwise) -> Activation:
    """``a = f(z)``, ungated."""

    def value(z: Tensor, spec: ActivationSpec) -> Tensor:
        return inner(z)[0]

    def grad(z: Tensor, da: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor]:
        a, slope = inner(z)
        return a, da * slope

    return Activation(False, value, grad)


def gated(inner: Pointwise, value: Callable[..., Tensor] | None = None) -> Activation:
    """``a = f(gate) * up``; ``value``: an optional faster implementation of the same function."""

    def plain_value(gate: Tensor, up: Tensor, spec: ActivationSpec) -> Tensor:
        return inner(gate)[0] * up

    def grad(gate: Tensor, up: Tensor, da: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor, Tensor]:
        f, slope = inner(gate)
        dgate, dup = slope.mul_(up).mul_(da), f * da
        return f.mul_(up), dgate, dup

    return Activation(True, value or plain_value, grad)


def _silu(z: Tensor) -> tuple[Tensor, Tensor]:
    sig = z.sigmoid()
    value = z * sig
    return value, sig + value * (1.0 - sig)


def _gelu(z: Tensor) -> tuple[Tensor, Tensor]:
    cdf = 0.5 * (1.0 + (z * _SQRT_HALF).erf())
    return z * cdf, cdf + z * (_INV_SQRT_2PI * (-0.5 * z * z).exp())


def _gelu_tanh(z: Tensor) -> tuple[Tensor, Tensor]:
    t = (_TANH_C * (z + _TANH_K * z * z * z)).tanh()
    slope = _TANH_C * (1.0 + 3.0 * _TANH_K * z * z)
    return 0.5 * z * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * slope


def _relu(z: Tensor) -> tuple[Tensor, Tensor]:
    return z.relu(), (z > 0).to(z.dtype)


def _relu2(z: Tensor) -> tuple[Tensor, Tensor]:
    positive = z.relu()
    return positive * positive, 2.0 * positive


def _swiglu_value(gate: Tensor, up: Tensor, spec: ActivationSpec) -> Tensor:
    from torch.nn.functional import silu  # imported here, because names are read without torch

    return silu(gate) * up  # silu is one fused kernel, in place of a sigmoid and a product


def clamped(shift: float, limit: float, alpha: float | None) -> Activation:
    """``a = gate sigmoid(alpha gate) (up + shift)``, gate clamped from above, up to [-limit, limit]; alpha None: 1."""

    def value(gate: Tensor, up: Tensor, spec: ActivationSpec) -> Tensor:
        gate = gate.clamp(max=spec.limit)
        return gate * (spec.alpha * gate).sigmoid() * (up.clamp(-spec.limit, spec.limit) + shift)

    def grad(gate: Tensor, up: Tensor, da: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor, Tensor]:
        gate_inside = gate <= spec.limit
        up_inside = up.abs() <= spec.limit
        gate = gate.clamp(max=spec.limit)
        factor = up.clamp(-spec.limit, spec.limit) + shift
        sig = (spec.alpha * gate).sigmoid()
        inner = gate * sig
        slope = sig + spec.alpha * inner * (1.0 - sig)
        return inner * factor, da * factor * slope * gate_inside, da * inner * up_inside

    return Activation(True, value, grad, limit, alpha)


REGISTRY: dict[str, Activation] = {
    "swiglu": gated(_silu, _swiglu_value),
    "geglu": gated(_gelu),
    "geglu_tanh": gated(_gelu_tanh),
    "reglu": gated(_relu),
    "swiglu_oai": clamped(1.0, limit=7.0, alpha=1.702),  # gpt-oss
    "swiglu_clamped": clamped(0.0, limit=10.0, alpha=None),  # DeepSeek-V4
    "silu": pointwise(_silu),
    "gelu": pointwise(_gelu),
    "gelu_tanh": pointwise(_gelu_tanh),
    "relu": pointwise(_relu),
    "relu2": pointwise(_relu2),
}


def validate_activation(name: str, limit: float | None, alpha: float | None) -> None:
    """ValueError unless ``name`` is registered, and limit and alpha are None if it has no such parameter."""
    require_choice("activation", name, REGISTRY)
    for parameter, value in (("limit", limit), ("alpha", alpha)):
        if value is None:
            continue
        arg = f"activation_{parameter}"
        if getattr(REGISTRY[name], parameter) is None:
            owners = " or ".join(
                repr(other) for other, entry in REGISTRY.items() if getattr(entry, parameter) is not None
            )
            raise ValueError(f"{arg} is a parameter of activation={owners}; leave it None for {name!r}")
        require_finite(arg, value, positive=True)


def activation_spec(
    name: str, gate_up: str = "concatenated", limit: float | None = None, alpha: float | None = None
) -> ActivationSpec:
    """The `ActivationSpec` of ``name``; None: the default. ValueError: it is unknown or lacks a given parameter."""
    if limit is not None or alpha is not None:
        limit, alpha = _specialised(limit, alpha)
    if limit is not None or alpha is not None or not isinstance(name, str) or name not in REGISTRY:
        validate_activation(name, limit, alpha)
    entry = REGISTRY[name]
    if entry.limit is None:
        return ActivationSpec(name, gate_up, math.inf, 1.0)  # literals: PyTorch 2.11 makes defaults symbolic
    # Specialise the defaults, too: torch.compile(dynamic=True) makes numbers read from a table symbolic.
    limit, alpha = _specialised(limit or entry.limit, alpha or entry.alpha)
    return ActivationSpec(name, gate_up, limit, 1.0 if alpha is None else alpha)


def _specialised(limit: float | None, alpha: float | None) -> tuple[Any, Any]:
    from tilemoe.runtime.tracing import specialised  # imports torch

    return specialised(limit, alpha)
