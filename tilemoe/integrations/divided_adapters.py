"""PEFT's adapters on transformers' experts that are divided over processes.

E experts · e experts of this process · r rank of an adapter · p, q inputs and outputs of a weight

An adapter of a weight is whole in every process, as PEFT made it: ``lora_A`` (E r, p), of expert after expert, and
``lora_B`` (q, r E), of rank after rank. A process adds its own experts' part to its share of the weight. The adapter's
gradient is zero for the other experts, so that the mean over all processes, which the rest of the model has, is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilemoe.integrations.quantized_weight import FrozenWeight, weight_names

_ACTIVATE = "_activate_lora"  # method of a wrapper
_LENT = "_tilemoe_adapters"  # attribute of an experts module in its forward: what its wrappers have lent it


def wrappers_of(model: nn.Module, name: str) -> list[nn.Module]:
    """PEFT's wrappers of the experts module of this name, each of one weight.

    ValueError: there is another, whose adapter is not of single experts.
    """
    experts, found = model.get_submodule(name), []
    while name.endswith("base_layer"):
        name = name.removesuffix("base_layer").removesuffix(".")
        found.append(wrapper := model.get_submodule(name))
        if getattr(wrapper, "parameter_name", None) not in weight_names(experts):
            raise ValueError(
                f"module has an adapter of PEFT ({name}) on something else than the experts' two weights, which stays "
                "whole; merge it, or shard the model by fully_shard alone"
            )
    return found


def divide_adapters(experts: nn.Module, wrappers: list[nn.Module], first: int) -> None:
    """From now on `with_adapters` adds what these wrappers did; ``first``: this process' first expert."""
    for wrapper in wrappers:
        vars(wrapper)[_ACTIVATE] = partial(_lend, wrapper, experts, first)


def take_adapters(experts: nn.Module, wrappers: list[nn.Module]) -> None:
    """As `divide_adapters`, of experts that are whole, if each wrapper is of a weight of theirs."""
    of_weights = [getattr(each, "parameter_name", None) in weight_names(experts) for each in wrappers]
    if all(of_weights) and not any(_ACTIVATE in vars(wrapper) for wrapper in wrappers):
        divide_adapters(experts, wrappers, 0)


@contextmanager
def _lend(wrapper: Any, experts: nn.Module, first: int, active_adapters: list[str]) -> Iterator[None]:
    """In place of what PEFT's wrapper does around the experts' forward, where tilemoe computes it."""
    if torch.compiler.is_compiling() or experts.config._experts_implementation != "tilemoe":  # type: ignore[union-attr]
        with type(wrapper)._activate_lora(wrapper, active_adapters):
            yield
        return
    lent = vars(experts).setdefault(_LENT, [])
    lent.append((wrapper, first, [adapter for adapter in active_adapters if adapter in wrapper.lora_A]))
    try:
        yield
    finally:
        lent.pop()


def with_adapters(experts: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The weight (e, q, p), or (e, p, q) where transformers calls it transposed, with what its active adapters add.

    To a frozen weight they are added by their factors, so that none is made whole.
    """
    lent = [(wrapper, *rest) for wrapper, *rest in vars(experts).get(_LENT, ()) if wrapper.parameter_name == name]
    is_frozen = not any(parameter.requires_grad for parameter in experts.parameters(recurse=False))
    if lent and is_frozen and not isinstance(weight, FrozenWeight):
        weight = FrozenWeight(weight, weight.dtype)
    for wrapper, first, adapters in lent:
        for adapter in adapters:
            a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
            rank, here = wrapper.r[adapter], slice(first, first + weight.shape[0])
            a = a.unflatten(0, (-1, rank))[here].to(weight.dtype)
            b = b.unflatten(1, (rank, -1))[..., here].permute(2, 0, 1).to(weight.dtype)
            left, right = (a.mT, b.mT) if getattr(experts, "is_transposed", False) else (b, a)
            with torch.autocast(weight.device.type, enabled=False):  # as PEFT: a weight keeps its dtype
                weight = torch.baddbmm(weight, left, right, alpha=wrapper.scaling[adapter])
    return weight
