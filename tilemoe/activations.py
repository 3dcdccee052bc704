"""The one table of activations: value, and gradient from the saved pre-activation.

R routed rows · n expert width

A gated activation reads ``h`` (R, 2n), holding gate and up side by side ("concatenated": columns [gate; up]) or
alternating ("interleaved": columns gate0, up0, gate1, ...); an ungated one reads ``h`` (R, n). Both give ``a`` (R, n).
Everything is computed in fp32, or fp64 for fp64 inputs, whatever the dtype of storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilemoe.config import GATED_ACTIVATIONS, validate_activation
from tilemoe.tracing import specialised

_BLOCK_BYTES = 1 << 20  # a block of fp32 pre-activations and its temporaries stay in a core's cache
_OAI_LIMIT, _OAI_ALPHA = 7.0, 1.702  # gpt-oss
_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_TANH_C, _TANH_K = math.sqrt(2.0 / math.pi), 0.044715


@dataclass(frozen=True)
class ActivationSpec:
    """A validated activation with its parameters and its place in memory; hashable."""

    name: str
    gate_up: str = "concatenated"
    limit: float = _OAI_LIMIT
    alpha: float = _OAI_ALPHA

    @property
    def is_gated(self) -> bool:
        return self.name in GATED_ACTIVATIONS

    @property
    def width_factor(self) -> int:
        """Columns of h per column of a: 2 when gated, else 1."""
        return 2 if self.is_gated else 1


def activation_spec(name: str, gate_up: str, limit: float | None, alpha: float | None) -> ActivationSpec:
    """The spec of a table entry; ValueError for an unknown name or parameters it does not have."""
    # torch.compile(dynamic=True) makes symbols of numbers, of a module's constants, too.
    limit, alpha, default_limit, default_alpha = specialised(limit, alpha, _OAI_LIMIT, _OAI_ALPHA)
    validate_activation(name, limit, alpha)
    return ActivationSpec(
        name, gate_up, default_limit if limit is None else limit, default_alpha if alpha is None else alpha
    )


# --- the inner, one-argument functions: z -> (f(z), f'(z)), all in the compute dtype ---------------------------------


def _silu(z: Tensor) -> tuple[Tensor, Tensor]:
    sig = torch.sigmoid(z)
    value = z * sig
    return value, sig + value * (1.0 - sig)


def _gelu(z: Tensor) -> tuple[Tensor, Tensor]:
    cdf = 0.5 * (1.0 + torch.erf(z * _SQRT_HALF))
    return z * cdf, cdf + z * (_INV_SQRT_2PI * torch.exp(-0.5 * z * z))


def _gelu_tanh(z: Tensor) -> tuple[Tensor, Tensor]:
    t = torch.tanh(_TANH_C * (z + _TANH_K * z * z * z))
    slope = _TANH_C * (1.0 + 3.0 * _TANH_K * z * z)
    return 0.5 * z * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * slope


def _relu(z: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(z), (z > 0).to(z.dtype)


def _relu2(z: Tensor) -> tuple[Tensor, Tensor]:
    positive = torch.relu(z)
    return positive * positive, 2.0 * positive


_INNER: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu2": _relu2,
    "swiglu": _silu,
    "geglu": _gelu,
    "geglu_tanh": _gelu_tanh,
    "reglu": _relu,
}


def row_blocks(h: Tensor) -> list[slice]:
    """Row slices for element-wise work on ``h`` (R, .): cache-sized in eager mode on a CPU, else one.

    docs/notes/cpu.md has what that gains.
    """
    if h.device.type != "cpu" or torch.compiler.is_compiling():
        return [slice(0, h.shape[0])]  # a range would tie what is traced to this number of rows
    step = max(1, _BLOCK_BYTES // (4 * h.shape[1]))
    return [slice(start, min(start + step, h.shape[0])) for start in range(0, h.shape[0], step)]


def split_gate_up(h: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor]:
    """Views of the gate and up columns, (R, n) each, of a gated ``h`` (R, 2n)."""
    if spec.gate_up == "interleaved":
        return h[:, 0::2], h[:, 1::2]
    n = h.shape[1] // 2
    return h[:, :n], h[:, n:]


def _compute(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def activation_value(h: Tensor, spec: ActivationSpec) -> Tensor:
    """``a`` (R, n) in the compute dtype (fp32, or fp64 for fp64 ``h``), from ``h`` (R, 2n) or (R, n)."""
    if not spec.is_gated:
        return _ungated_value(_compute(h), spec)
    gate, up = (_compute(part) for part in split_gate_up(h, spec))
    if spec.name == "swiglu":
        return torch.nn.functional.silu(gate) * up  # one fused pass instead of sigmoid and product
    if spec.name == "swiglu_oai":
        gate = gate.clamp(max=spec.limit)
        up = up.clamp(-spec.limit, spec.limit)
        return gate * torch.sigmoid(spec.alpha * gate) * (up + 1.0)
    return _INNER[spec.name](gate)[0] * up


def _ungated_value(z: Tensor, spec: ActivationSpec) -> Tensor:
    return _INNER[spec.name](z)[0]


def activation_grad(h: Tensor, da: Tensor, spec: ActivationSpec, dh: Tensor) -> Tensor:
    """Recompute ``a`` from ``h`` and write ``dh = da * d(act)/dh`` (rounded to its dtype) into ``dh``, shaped like h.

    ``da`` (R, n) in the compute dtype. Returns ``a`` (R, n) in the compute dtype. At a kink (relu at 0) the
    derivative is 0, at a clamp's bound it is 1, as in PyTorch.
    """
    if not spec.is_gated:
        a, slope = _INNER[spec.name](_compute(h))
        dh.copy_(da * slope)
        return a
    gate, up = (_compute(part) for part in split_gate_up(h, spec))
    dgate, dup = split_gate_up(dh, spec)
    if spec.name == "swiglu_oai":
        return _swiglu_oai_grad(gate, up, da, spec, dgate, dup)
    value, slope = _INNER[spec.name](gate)
    dgate.copy_(slope.mul_(up).mul_(da))
    dup.copy_(value * da)
    return value.mul_(up)


def _swiglu_oai_grad(gate: Tensor, up: Tensor, da: Tensor, spec: ActivationSpec, dgate: Tensor, dup: Tensor) -> Tensor:
    gate_inside = gate <= spec.limit
    up_inside = up.abs() <= spec.limit
    gate = gate.clamp(max=spec.limit)
    up_plus_one = up.clamp(-spec.limit, spec.limit) + 1.0
    sig = torch.sigmoid(spec.alpha * gate)
    value = gate * sig
    slope = sig + spec.alpha * value * (1.0 - sig)
    dgate.copy_(da * up_plus_one * slope * gate_inside)
    dup.copy_(da * value * up_inside)
    return value * up_plus_one
