"""Each activation's value, written like its definition; autograd gives the gradient.

R rows · n expert width
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilemoe.activations import validate_activation
from tilemoe.checks import require_choice
from tilemoe.config import GATE_UP_LAYOUTS, GATED_ACTIVATIONS


def activation(
    h: Tensor, name: str, gate_up: str = "concatenated", limit: float | None = None, alpha: float | None = None
) -> Tensor:
    """``a`` (R, n) in h's dtype, from ``h`` (R, 2n) if the activation is gated, else (R, n).

    ``limit`` is a parameter of swiglu_oai (default 7.0, gpt-oss's) and swiglu_clamped (10.0, DeepSeek-V4's); ``alpha``
    of swiglu_oai alone (1.702).

    Raises:
        ValueError: there is no such activation or layout, or the activation has no ``limit`` or ``alpha``.

    Examples:
        >>> tilemoe.reference.activation(torch.tensor([[-1.0, 3.0]]), "relu2").tolist()
        [[0.0, 9.0]]
        >>> tilemoe.reference.activation(torch.tensor([[2.0, 3.0]]), "reglu").tolist()  # relu(gate) * up
        [[6.0]]
    """
    validate_activation(name, limit, alpha)
    require_choice("gate_up", gate_up, GATE_UP_LAYOUTS)
    if name not in GATED_ACTIVATIONS:
        return _pointwise(h, name)
    gate, up = _gate_and_up(h, gate_up)
    if name == "swiglu_oai":
        return _swiglu_oai(gate, up, 7.0 if limit is None else limit, 1.702 if alpha is None else alpha)
    if name == "swiglu_clamped":
        bound = 10.0 if limit is None else limit
        return _pointwise(gate.clamp(max=bound), "silu") * up.clamp(min=-bound, max=bound)
    inner = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}[name]
    return _pointwise(gate, inner) * up


def _gate_and_up(h: Tensor, gate_up: str) -> tuple[Tensor, Tensor]:
    if gate_up == "interleaved":
        pairs = h.unflatten(1, (-1, 2))
        return pairs[:, :, 0], pairs[:, :, 1]
    gate, up = h.chunk(2, dim=1)
    return gate, up


def _pointwise(z: Tensor, name: str) -> Tensor:
    if name == "silu":
        return z / (1 + torch.exp(-z))
    if name == "gelu":
        return z * (1 + torch.erf(z / math.sqrt(2))) / 2
    if name == "gelu_tanh":
        return z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2
    if name == "relu":
        return torch.relu(z)
    assert name == "relu2"
    return torch.relu(z) ** 2


def _swiglu_oai(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """The clamped SwiGLU of gpt-oss: the gate is clamped from above only, and the up side is shifted by one."""
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
