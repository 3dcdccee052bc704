"""Value and gradient of the registry's activations on rows of a stored pre-activation, in fp32 (fp64 for fp64).

R routed rows · n expert width · h (R, 2n) of a gated activation, (R, n) of an ungated one
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.activations import REGISTRY, ActivationSpec


def split_gate_up(h: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor]:
    """Views of the gate and up columns, (R, n) each, of a gated ``h`` (R, 2n)."""
    if spec.gate_up == "interleaved":
        return h[:, 0::2], h[:, 1::2]
    n = h.shape[1] // 2
    return h[:, :n], h[:, n:]


def activation_value(h: Tensor, spec: ActivationSpec) -> Tensor:
    """``a`` (R, n) in the compute dtype (fp32, or fp64 for fp64 ``h``)."""
    return REGISTRY[spec.name].value(*(_compute(part) for part in _parts(h, spec)), spec)


def activation_grad(h: Tensor, da: Tensor, spec: ActivationSpec, dh: Tensor) -> Tensor:
    """Recompute ``a`` from ``h`` and write ``dh = da * d(act)/dh`` (rounded to its dtype) into ``dh``, shaped like h.

    ``da`` (R, n) in the compute dtype. Returns ``a`` (R, n) in the compute dtype.
    """
    a, *grads = REGISTRY[spec.name].grad(*(_compute(part) for part in _parts(h, spec)), da, spec)
    for out, grad in zip(_parts(dh, spec), grads, strict=True):
        out.copy_(grad)
    return a


def _parts(h: Tensor, spec: ActivationSpec) -> tuple[Tensor, ...]:
    return split_gate_up(h, spec) if spec.is_gated else (h,)


def _compute(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()
