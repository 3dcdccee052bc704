"""PEFT's adapters on transformers' experts that are divided over processes.

E experts · e experts of this process · r rank of an adapter · p, q inputs and outputs of a weight

An adapter of a weight is whole in every process, as PEFT made it: ``lora_A`` (E r, p), of expert after expert, and
``lora_B`` (q, r E), of rank after rank. A process adds its own experts' part to its share of the weight. The adapter's
gradient is zero for the other experts, so that the mean over all processes, which the rest of the model has, is right.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tilemoe.integrations.quantized_weight import weight_names

_ADAPTERS = "_tilemoe_adapters"  # attribute of an experts module: its wrappers, and its first expert of this process


def wrappers_of(model: nn.Module, name: str) -> list[nn.Module]:
    """PEFT's wrappers of the experts module of this name, each of one weight.

    ValueError: there is another, whose adapter is not of single experts.
    """
    experts, found = model.get_submodule(name), []
    while name.endswith("base_layer"):
        name = name.removesuffix("base_layer").removesuffix(".")
        wrapper: Any = model.get_submodule(name)
        if getattr(wrapper, "parameter_name", None) not in weight_names(experts):
            raise ValueError(
                f"module has an adapter of PEFT ({name}) on something else than the experts' two weights, which stays "
                "whole; merge it, or shard the model by fully_shard alone"
            )
        found.append(wrapper)
    return found


def divide_adapters(experts: nn.Module, wrappers: list[nn.Module], first: int) -> None:
    """From now on `with_adapters` adds what these wrappers did; ``first``: this process' first expert."""
    vars(experts)[_ADAPTERS] = (wrappers, first)
    for wrapper in wrappers:
        vars(wrapper)["_activate_lora"] = _leave_to_experts


def _leave_to_experts(active_adapters: list[str]) -> AbstractContextManager[object]:
    """In place of what PEFT's wrapper does around the experts' forward."""
    return nullcontext()


def with_adapters(experts: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The weight (e, q, p), or (e, p, q) where transformers calls it transposed, with what its active adapters add."""
    wrappers, first = vars(experts).get(_ADAPTERS, ((), 0))
    for wrapper in wrappers:
        if wrapper.parameter_name == name and not (wrapper.disable_adapters or wrapper.merged):
            for adapter in filter(wrapper.lora_A.__contains__, wrapper.active_adapters):
                a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
                rank, here = wrapper.r[adapter], slice(first, first + weight.shape[0])
                a = a.unflatten(0, (-1, rank))[here].to(weight.dtype)
                b = b.unflatten(1, (rank, -1))[..., here].permute(2, 0, 1).to(weight.dtype)
                left, right = (a.mT, b.mT) if getattr(experts, "is_transposed", False) else (b, a)
                with torch.autocast(weight.device.type, enabled=False):  # as PEFT: a weight keeps its dtype
                    weight = torch.baddbmm(weight, left, right, alpha=wrapper.scaling[adapter])
    return weight
