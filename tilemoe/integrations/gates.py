"""Recognise which of tilemoe's activations a function computes, from its outputs and not from its name.

n expert width
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from tilemoe.activations import REGISTRY, ActivationSpec, activation_spec
from tilemoe.config import GATE_UP_LAYOUTS
from tilemoe.kernels.experts.torch.activations import activation_value

_ROWS, _WIDTH = 128, 32
# Up to magnitudes beyond any clamp that is there to be met; a limit that is known is added.
_MAGNITUDES = (0.0, 1e-3, 0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 30.0, 100.0, 1e3, 1e4, 6e4)
# Somebody may compute in fp32; the tables' nearest neighbours, erf and tanh GELU, are 100 times further apart.
_RTOL = _ATOL = 1e-5


def recognised_activation(
    function: Callable[[Tensor], Tensor], *, is_gated: bool, limit: float | None = None, alpha: float | None = None
) -> ActivationSpec | None:
    """The activation that ``function`` computes, with its gate/up layout; None if tilemoe has none such.

    ``function`` maps (rows, 2n) to (rows, n) if gated, else (rows, n) to (rows, n). ``limit`` and ``alpha`` are those
    of a clamped gate, if it has any. It is called once, on the CPU, with values of every size and sign: a clamp, a
    shift or another split of gate and up all show. What ``function`` raises is passed on.
    """
    # In a fixed order that pairs every gate with many ups.
    around = () if limit is None else tuple(limit * factor for factor in (0.5, 0.99, 1.01, 1.5))
    values = torch.tensor(_MAGNITUDES + around, dtype=torch.float64, device="cpu")
    values = torch.cat([values, -values])
    shape, generator = (_ROWS, 2 * _WIDTH if is_gated else _WIDTH), torch.Generator().manual_seed(0)
    h = values[torch.randint(len(values), shape, generator=generator, device="cpu")]
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        given = function(h.clone())
    if not isinstance(given, Tensor) or given.shape != (_ROWS, _WIDTH):
        return None
    for spec in _candidates(is_gated, limit, alpha):
        if torch.allclose(given.to(h.dtype), activation_value(h, spec), rtol=_RTOL, atol=_ATOL):
            return spec
    return None


def _candidates(is_gated: bool, limit: float | None, alpha: float | None) -> list[ActivationSpec]:
    names = sorted(name for name, entry in REGISTRY.items() if entry.is_gated == is_gated)
    layouts = GATE_UP_LAYOUTS if is_gated else GATE_UP_LAYOUTS[:1]
    specs = []
    for layout, name in itertools.product(layouts, names):
        entry = REGISTRY[name]
        if (entry.limit is None or limit is not None) and (entry.alpha is None or alpha is not None):
            given = {"limit": limit if entry.limit else None, "alpha": alpha if entry.alpha else None}
            specs.append(activation_spec(name, layout, **given))
    return specs
