"""The one registry of activations: name -> value, gradient, gated or not.

R routed rows · n expert width

A gated activation takes gate and up, (R, n) each; an ungated one takes z (R, n). Both give ``a`` (R, n), computed in
the dtype they are given (fp32, or fp64). The formulas are written with tensors' own methods: this file imports no
torch, so that `tilemoe.config` can read the names.

The same functions for kernels are in `tilemoe.kernels.experts.triton.activations`, by the same names;
`tilemoe.kernels.experts.torch.activations` applies these here to a stored pre-activation. `tilemoe.reference` has its
own, on purpose. To add one: an entry here, a branch there (CONTRIBUTING.md has a worked diff).
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
    """An activation of the registry with its parameters and its place in memory; hashable.

    ``gate_up``: where gate and up lie in h (R, 2n), "concatenated" (columns [gate; up]) or "interleaved" (gate0, up0,
    gate1, ...). ``limit`` clamps swiglu_oai and swiglu_clamped, ``alpha`` is swiglu_oai's slope; else neutral.
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
        return 2 if self.is_gated else 1


@dataclass(frozen=True)
class Activation:
    """An entry of the registry.

    value    (gate, up, spec) or (z, spec) -> a.
    grad     (gate, up, da, spec) -> (a, dgate, dup), or (z, da, spec) -> (a, dz): a recomputed, and ``da`` carried
             through. At a kink (relu at 0) the derivative is 0, at a clamp's bound it is 1, as in PyTorch.
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
    """``a = f(gate) * up``; ``value``: a faster way to the same."""

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
    from torch.nn.functional import silu  # here, because the names are read without torch

    return silu(gate) * up  # one fused pass instead of sigmoid and product


def clamped(shift: float, limit: float, alpha: float | None) -> Activation:
    """``a = gate sigmoid(alpha gate) (up + shift)``, gate clamped from above and up on both sides; alpha None: 1."""

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
    """Raise ValueError unless ``name`` is registered and limit/alpha are given only where they mean something."""
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
    """The spec of an entry; ValueError for an unknown name or parameters it does not have."""
    if limit is not None or alpha is not None:
        limit, alpha = _specialised(limit, alpha)
    validate_activation(name, limit, alpha)
    entry = REGISTRY[name]
    if entry.limit is None:
        return ActivationSpec(name, gate_up, math.inf, 1.0)  # PyTorch 2.11 makes symbols of a dataclass' defaults, too
    # The defaults, too: torch.compile(dynamic=True) makes symbols of numbers that it finds in a table.
    limit, alpha = _specialised(limit or entry.limit, alpha or entry.alpha)
    return ActivationSpec(name, gate_up, limit, 1.0 if alpha is None else alpha)


def _specialised(limit: float | None, alpha: float | None) -> tuple[Any, Any]:
    from tilemoe.runtime.tracing import specialised  # imports torch

    return specialised(limit, alpha)
