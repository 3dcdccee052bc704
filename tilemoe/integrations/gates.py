"""Recognise which of tilemoe's activations a function or an experts module computes, by its outputs, not its name.

n expert width
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tilemoe.activations import REGISTRY, ActivationSpec, activation_spec
from tilemoe.config import GATE_UP_LAYOUTS
from tilemoe.kernels.experts.torch.activations import activation_rows
from tilemoe.ops.inference import Activation
from tilemoe.runtime.tracing import constant_when_traced

_ROWS, _WIDTH = 128, 32
# The largest are beyond any model's clamp; values around a limit that is known are added.
_MAGNITUDES = (0.0, 1e-3, 0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 30.0, 100.0, 1e3, 1e4, 6e4)
# A model may compute in fp32; the two most similar activations, erf and tanh GELU, are 100 times further apart.
_RTOL = _ATOL = 1e-5
# Attributes in which models keep the bound and the slope of a clamped gate.
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
_INSTEAD = "use experts_implementation='grouped_mm' or 'eager' for it"


def recognised_activation(
    function: Callable[[Tensor], Tensor], *, is_gated: bool, limit: float | None = None, alpha: float | None = None
) -> ActivationSpec | None:
    """The activation that ``function`` computes, with its gate/up layout; None if tilemoe does not have it.

    ``function`` maps (rows, 2n) to (rows, n) if gated, else (rows, n) to (rows, n). ``limit`` and ``alpha`` are those
    of a clamped gate, if it has any. ``function`` is called once, on the CPU, with values of every size and sign, so
    that a clamp, a shift or another split of gate and up shows. Its exceptions are passed on.
    """
    # A fixed random order pairs every gate with many ups.
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
        if torch.allclose(given.to(h.dtype), activation_rows(h, spec), rtol=_RTOL, atol=_ATOL):
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


# Attribute of a module whose activation is known: all that the activation depends on, then the activation itself,
# (act_fn, its gate's function, limit, alpha, act_fn's own numbers, *activation).
_TRIED = "_tilemoe_activation"


def activation_of(module: nn.Module) -> Activation:
    """The module's activation. It is tried out once, and again after something that it depends on was replaced.

    torch.compile reads the result of an earlier trial and guards its values, so that one graph serves all layers.
    Without one, the graph is for this module alone, and PyTorch keeps few graphs of one function (8 by default).
    """
    function = getattr(module, "act_fn", None)
    limit, alpha = _limit_and_alpha(module)
    tried: tuple[Any, ...] | None = vars(module).get(_TRIED)
    if (
        tried is not None
        and (tried[0] is function and tried[1] is _gate(module) and tried[2:4] == (limit, alpha))
        and all(getattr(function, name, None) == value for name, value in tried[4])
    ):
        return Activation(*tried[5:])
    if torch.compiler.is_compiling():
        return _activation_at(id(module))
    activation = _try(module, limit, alpha)
    # Plain values and the module's own attributes: unpickling them imports no tilemoe.
    vars(module)[_TRIED] = (function, _gate(module), limit, alpha, _settings(function), *activation)
    return activation


def _gate(module: nn.Module) -> Any:
    """The gate's function that the module itself has, or else its class; None if ungated."""
    own = vars(module)
    return own["_apply_gate"] if "_apply_gate" in own else getattr(type(module), "_apply_gate", None)


def _settings(function: Any) -> tuple[tuple[str, Any], ...]:
    """An activation's own numbers by name, such as a slope. `training` is left out: `_try` computes in both modes."""
    if not isinstance(function, nn.Module):
        return ()
    kinds = (bool, int, float, str)
    return tuple((k, v) for k, v in vars(function).items() if isinstance(v, kinds) and k[0] != "_" and k != "training")


@constant_when_traced
def _activation_at(address: int) -> Activation:
    """The activation of the module at this address. PyTorch 2.11 passes no modules to a function that a trace runs.

    The module is alive, and PyTorch guards the address, so that the graph is for this module alone.
    """
    module = ctypes.cast(address, ctypes.py_object).value
    return _try(module, *_limit_and_alpha(module))


def _try(module: nn.Module, limit: float | None, alpha: float | None) -> Activation:
    is_gated = getattr(module, "has_gate", True)
    function: Any = module._apply_gate if is_gated else module.act_fn
    inner = getattr(module, "act_fn", None)
    if isinstance(inner, nn.Module) and any(True for _ in inner.parameters()):
        raise refusal(module, f"its activation {type(inner).__name__} has parameters, which tilemoe would not train")
    if isinstance(inner, nn.Module) and any(True for _ in inner.buffers()):
        raise refusal(module, f"its activation {type(inner).__name__} has buffers, which could change unseen")

    reason = "its gate is none of tilemoe's activations" if is_gated else "its activation is none of tilemoe's"
    try:
        with _disable_current_modes():  # fake tensors have no values to try, and torch.export would record the trial
            spec = recognised_activation(_in_both_modes(module, function), is_gated=is_gated, limit=limit, alpha=alpha)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise refusal(module, f"{reason}: trying it out failed with {error!r}") from error
    if spec is None:
        raise refusal(module, reason)
    entry = REGISTRY[spec.name]
    return Activation(spec.name, spec.gate_up, spec.limit if entry.limit else None, spec.alpha if entry.alpha else None)


def _in_both_modes(module: nn.Module, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function`` of the module, computed in training and in evaluation mode. ValueError: the results differ."""
    inner = getattr(module, "act_fn", None)
    parts = [module, *(inner.modules() if isinstance(inner, nn.Module) else ())]

    def compute(h: Tensor) -> Tensor:
        modes, given = [part.training for part in parts], []
        try:
            for mode in (True, False):
                for part in parts:
                    part.training = mode
                given.append(function(h.clone()))
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode
        if not torch.equal(*given):
            raise ValueError("it computes something else in training than in evaluation")
        return given[0]

    return compute


def _limit_and_alpha(module: nn.Module) -> tuple[float | None, float | None]:
    """The limit and the alpha of a clamped gate, None where it has none."""
    return _number(module, _LIMITS), _number(module, _ALPHAS)


def _number(module: nn.Module, names: tuple[str, ...]) -> float | None:
    """The first of these attributes that is a positive number, which is what a limit or an alpha is."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"):
            return float(value)
    return None


def refusal(module: nn.Module, reason: str) -> ValueError:
    return ValueError(f"experts_implementation='tilemoe' cannot compute {name_of(module)}: {reason}; {_INSTEAD}")


def name_of(module: nn.Module) -> str:
    kind = getattr(getattr(module, "config", None), "model_type", "a model of unknown type")
    return f"{type(module).__name__} ({kind})"
