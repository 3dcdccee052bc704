"""NaN, infinity and 3e38 in each weight, gradient and module of a model, each put there by a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from writes import little

from tilemoe.layers.router import RouterOutput
from tilemoe.models.decoder import DecoderLM

VALUES = {"nan": float("nan"), "inf": float("inf"), "overflow": 3e38}
MODEL = little("bytes", Path()).model
WHOLE = DecoderLM(MODEL, device="meta")
MODULES = [  # but the head, whose weight the loss takes
    name for name, module in WHOLE.named_modules() if name not in ("", "head") and not isinstance(module, nn.ModuleList)
]
WEIGHTS = [name for name, _ in WHOLE.named_parameters()]
EXPERTS, ROUTERS = ([name for name in MODULES if name.endswith(end)] for end in (".experts", ".router"))

Where = Callable[[DecoderLM, str, float], None]  # puts the value there, in a model that is to compute


def spoilt(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(tensor: Tensor) -> Tensor:
        return tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), value)

    return spoil


def in_weight(model: DecoderLM, name: str, value: float) -> None:
    with torch.no_grad():
        _own(model.get_parameter(name)).fill_(value)


def in_gradient(model: DecoderLM, name: str, value: float) -> None:
    """As the optimiser gets it: of this process' part."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        _own(parameter.grad).fill_(value)

    model.get_parameter(name).register_post_accumulate_grad_hook(hook)


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_activation(model: DecoderLM, name: str, value: float) -> None:
    """In what the module gives, or is given where that is no tensor alone."""
    _change(model, name, spoilt(value))


def in_cotangent(model: DecoderLM, name: str, value: float) -> None:
    """In the gradient of that, before processes add theirs."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(spoilt(value))
        return tensor

    _change(model, name, change)


def _change(model: DecoderLM, name: str, change: Callable[[Tensor], Tensor]) -> None:
    def hook(module: nn.Module, given: Any, output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) else output

    def before(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(given[0]), *given[1:])

    module = model.get_submodule(name)
    if name.endswith(("router", "mlp")) or name.count(".") == 1:
        module.register_forward_pre_hook(before)
    else:
        module.register_forward_hook(hook)


def in_logits(model: DecoderLM, name: str, value: float) -> None:
    """What the router gives."""

    def hook(module: nn.Module, given: Any, output: RouterOutput) -> RouterOutput:
        return output._replace(logits=spoilt(value)(output.logits))

    model.get_submodule(name).register_forward_hook(hook)


def in_scores(model: DecoderLM, name: str, value: float) -> None:
    """What the experts get beside tokens and plan: the routing is as ever."""

    def before(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, plan, scores = given
        return x, plan, spoilt(value)(scores)

    model.get_submodule(name).register_forward_pre_hook(before)


PLACES: dict[Where, list[str]] = {
    in_weight: WEIGHTS, in_gradient: WEIGHTS, in_activation: MODULES, in_logits: ROUTERS, in_scores: EXPERTS,
}  # fmt: skip
