"""The activations inside kernels: `tilemoe.activations` once more, in Triton, with the name a compile-time constant.

Everything is fp32. ``limit`` and ``alpha`` belong to swiglu_oai.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(z, PRECISE: tl.constexpr):
    """1 / (1 + exp(-z)), or without a division, which takes half the instructions: 16-bit results are the same."""
    if PRECISE:
        value = tl.sigmoid(z)
    else:
        root = tl.math.rsqrt(1.0 + tl.math.exp2(z * -1.4426950408889634))
        value = root * root
    return value


@triton.jit
def inner(z, NAME: tl.constexpr, PRECISE: tl.constexpr):
    """(f(z), f'(z)) of the one-argument function at the heart of the activation ``NAME``."""
    if NAME == "silu" or NAME == "swiglu":
        sig = sigmoid(z, PRECISE)
        value = z * sig
        slope = sig + value * (1.0 - sig)
    elif NAME == "gelu" or NAME == "geglu":
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        value = z * cdf
        slope = cdf + z * (0.3989422804014327 * tl.exp(-0.5 * z * z))
    elif NAME == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u)
        sig = sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z), PRECISE)
        value = z * sig
        slope = sig + value * (1.0 - sig) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    elif NAME == "relu" or NAME == "reglu":
        value = tl.where(z < 0, 0.0, z)
        slope = tl.where(z > 0, 1.0, 0.0)
    else:
        tl.static_assert(NAME == "relu2", "an activation without a kernel")
        positive = tl.where(z < 0, 0.0, z)
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def gated_value(gate, up, limit, alpha, NAME: tl.constexpr, PRECISE: tl.constexpr):
    """a from gate and up."""
    if NAME == "swiglu_oai":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        a = gate * sigmoid(alpha * gate, PRECISE) * (up + 1.0)
    else:
        value, _slope = inner(gate, NAME, PRECISE)
        a = value * up
    return a


@triton.jit
def gated_grad(gate, up, da, limit, alpha, NAME: tl.constexpr, PRECISE: tl.constexpr):
    """(a, dgate, dup): a recomputed, and the gradient ``da`` carried to gate and up."""
    if NAME == "swiglu_oai":
        gate_inside = gate <= limit
        up_inside = tl.abs(up) <= limit
        gate = tl.where(gate > limit, limit, gate)
        up_plus_one = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        sig = sigmoid(alpha * gate, PRECISE)
        value = gate * sig
        slope = sig + alpha * value * (1.0 - sig)
        dgate = tl.where(gate_inside, da * up_plus_one * slope, 0.0)
        dup = tl.where(up_inside, da * value, 0.0)
        a = value * up_plus_one
    else:
        value, slope = inner(gate, NAME, PRECISE)
        a, dgate, dup = value * up, da * up * slope, da * value
    return a, dgate, dup
