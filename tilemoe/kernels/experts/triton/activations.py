"""The activations of `tilemoe.activations` as Triton device functions, selected by name at compile time.

They compute values, and the gradients that down_proj_dgrad needs. All arithmetic is fp32; with PRECISE False it uses
approximations that are exact enough for 16-bit results. ``limit`` is a parameter of swiglu_oai and swiglu_clamped,
``alpha`` of swiglu_oai (in swiglu_clamped it is 1).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(z, PRECISE: tl.constexpr):
    """1 / (1 + exp(-z))."""
    return scaled_sigmoid(z, 1.0, PRECISE)


@triton.jit
def scaled_sigmoid(z, scale, PRECISE: tl.constexpr):
    """1 / (1 + exp(-scale * z)); unless PRECISE, a scalar ``scale`` is folded into the constant of the exponent."""
    return tl.sigmoid(scale * z) if PRECISE else base2_sigmoid(z * (scale * -1.4426950408889634))


@triton.jit
def base2_sigmoid(exponent):
    """1 / (1 + 2^exponent) as a squared rsqrt: half the instructions of a division, equal after rounding to 16 bits."""
    root = tl.math.rsqrt(1.0 + tl.math.exp2(exponent))
    return root * root


@triton.jit
def normal(z, PRECISE: tl.constexpr):
    """(Phi(z), Phi'(z)) of the standard normal distribution, Phi(z) = (1 + erf(z / sqrt(2))) / 2.

    Unless PRECISE, erf is avoided, since it branches: Phi(-|z|) = density * P(t), t = 1 / sqrt(1 + p|z| + q z^2). p, q
    and the polynomial P are fitted. The largest relative error is 7e-7 for |z| <= 13.2; beyond, fp32 underflows.
    """
    if PRECISE:
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
    else:
        square = z * z
        density = tl.math.exp2(-0.7213475204444817 * square - 1.3257480647361592)
        t = tl.math.rsqrt(0.08753220736980438 * square + (0.5562834143638611 * tl.abs(z) + 1.0))
        ratio = 0.0533137284219265 + 0.3191555440425873 * t
        ratio = 0.2601882219314575 + t * (0.32249394059181213 + t * ratio)
        ratio = -0.00013580615632236004 + t * (0.2982976734638214 + t * ratio)
        tail = density * ratio
        cdf = tl.where(z > 0, 1.0 - tail, tail)
    return cdf, density


@triton.jit
def inner(z, NAME: tl.constexpr, PRECISE: tl.constexpr):
    """(f(z), f'(z)). f is the activation itself, or if that is gated, the function that is applied to the gate."""
    if NAME == "silu" or NAME == "swiglu":
        sig = sigmoid(z, PRECISE)
        value = z * sig
        slope = sig + value * (1.0 - sig)
    elif NAME == "gelu" or NAME == "geglu":
        cdf, density = normal(z, PRECISE)
        value = z * cdf
        slope = cdf + z * density
    elif NAME == "gelu_tanh" or NAME == "geglu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u)
        square = z * z
        if PRECISE:
            exponent = z * (1.5957691216057308 + 0.07135481627260025 * square)
            sig = tl.sigmoid(exponent)
            value = z * sig
            rest = value * tl.sigmoid(-exponent)  # not value * (1 - sig), whose rounding error would be amplified below
        else:
            sig = base2_sigmoid(z * (-2.302208198144325 - 0.1029432395800235 * square))
            value = z * sig
            rest = value - value * sig
        slope = sig + rest * (1.5957691216057308 + 0.21406444881780075 * square)
    elif NAME == "relu" or NAME == "reglu":
        value = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where(z > 0, 1.0, 0.0)
    else:
        tl.static_assert(NAME == "relu2", "an activation without a kernel")
        positive = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def gated_value(gate, up, limit, alpha, NAME: tl.constexpr, PRECISE: tl.constexpr):
    """a = act(gate, up) of a gated activation."""
    if NAME == "swiglu_oai" or NAME == "swiglu_clamped":
        gate, up = _clamped(gate, up, limit)
        a = gate * scaled_sigmoid(gate, alpha, PRECISE) * _factor(up, NAME)
    else:
        value, _slope = inner(gate, NAME, PRECISE)
        a = value * up
    return a


@triton.jit
def gated_grad(gate, up, da, limit, alpha, NAME: tl.constexpr, PRECISE: tl.constexpr):
    """(a, dgate, dup) of a gated activation: the recomputed a, and the gradients of gate and up from ``da``."""
    if NAME == "swiglu_oai" or NAME == "swiglu_clamped":
        bounded_gate, bounded_up = _clamped(gate, up, limit)
        factor = _factor(bounded_up, NAME)
        sig = scaled_sigmoid(bounded_gate, alpha, PRECISE)
        value = bounded_gate * sig
        slope = sig + alpha * (value - value * sig)
        dgate = tl.where(gate > limit, 0.0, da * factor * slope)
        dup = tl.where(tl.abs(up) > limit, 0.0, da * value)
        a = value * factor
    else:
        value, slope = inner(gate, NAME, PRECISE)
        a, dgate, dup = value * up, da * up * slope, da * value
    return a, dgate, dup


@triton.jit
def _clamped(gate, up, limit):
    """(gate, up) clamped: gate from above only, up from both sides. NaN is kept."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _factor(up, NAME: tl.constexpr):
    """The factor by which the activated gate is multiplied: up, or up + 1 in swiglu_oai (gpt-oss)."""
    return up + 1.0 if NAME == "swiglu_oai" else up
