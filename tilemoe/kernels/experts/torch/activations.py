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
    work = torch.promote_types(h.dtype, torch.float32)
    if not spec.is_gated:
        return REGISTRY[spec.name].value(h.to(work), spec)
    gate, up = split_gate_up(h, spec)
    return REGISTRY[spec.name].value(gate.to(work), up.to(work), spec)


def activation_grad(h: Tensor, da: Tensor, spec: ActivationSpec, dh: Tensor) -> Tensor:
    """Recompute ``a`` from ``h`` and write ``dh = da * d(act)/dh`` (rounded to its dtype) into ``dh``, shaped like h.

    ``da`` (R, n) in the compute dtype. Returns ``a`` (R, n) in the compute dtype.
    """
    work = torch.promote_types(h.dtype, torch.float32)
    if not spec.is_gated:
        a, dz = REGISTRY[spec.name].grad(h.to(work), da, spec)
        dh.copy_(dz)
        return a
    gate, up = split_gate_up(h, spec)
    a, *grads = REGISTRY[spec.name].grad(gate.to(work), up.to(work), da, spec)
    for out, grad in zip(split_gate_up(dh, spec), grads, strict=True):
        out.copy_(grad)
    return a
