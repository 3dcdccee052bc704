"""PEFT's adapters on transformers' experts that are sharded over processes.

E experts · e experts of this process · r rank of an adapter · p, q inputs and outputs of a weight

Every process has each adapter whole, as PEFT made it: ``lora_A`` (E r, p), ordered by expert, and ``lora_B`` (q, r E),
ordered by rank. A process adds its own experts' part to its shard of the weight. The adapter's gradient is zero for the
other experts, so that it is averaged over all processes like the gradients of the rest of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from tilemoe.integrations.quantized_weight import FrozenWeight, weight_names

_ACTIVATE = "_activate_lora"  # method of a wrapper
LENT = "_tilemoe_adapters"  # attribute of an experts module: the adapters that its wrappers lend, in each thread


def wrappers_of(model: nn.Module, name: str) -> list[nn.Module]:
    """PEFT's wrappers of the experts module of this name; each adapts one weight.

    ValueError: a wrapper adapts anything other than the experts' two weights.
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
    """Let `with_adapters` add the adapters of these wrappers instead of PEFT; ``first``: this process' first expert."""
    for wrapper in wrappers:
        vars(wrapper)[_ACTIVATE] = partial(_lend, wrapper, experts, first)


def take_adapters(experts: nn.Module, wrappers: list[nn.Module]) -> None:
    """Do as `divide_adapters` for experts that are not sharded, if each wrapper adapts one of their weights."""
    of_weights = [getattr(each, "parameter_name", None) in weight_names(experts) for each in wrappers]
    if all(of_weights) and not any(_ACTIVATE in vars(wrapper) for wrapper in wrappers):
        divide_adapters(experts, wrappers, 0)


@contextmanager
def _lend(wrapper: Any, experts: nn.Module, first: int, active_adapters: list[str]) -> Iterator[None]:
    """Lend the wrapper's adapters during a forward that tilemoe computes; around any other, do what PEFT does."""
    if torch.compiler.is_compiling() or experts.config._experts_implementation != "tilemoe":  # type: ignore[union-attr]
        with type(wrapper)._activate_lora(wrapper, active_adapters):
            yield
        return
    lent = vars(experts).setdefault(LENT, [])
    mine = (get_ident(), wrapper, first, [adapter for adapter in active_adapters if adapter in wrapper.lora_A])
    lent.append(mine)
    try:
        yield
    finally:
        lent.remove(mine)


def with_adapters(experts: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The weight (e, q, p), or (e, p, q) where transformers calls it transposed, plus its active adapters.

    If the experts are frozen, it keeps the adapters' factors, and the sum is never materialised.
    """
    # Copied, as another thread may change the list meanwhile. Traced, there are none: `experts_forward` sees to it.
    of_threads = () if torch.compiler.is_compiling() else tuple(vars(experts).get(LENT, ()))
    lent = [rest for thread, *rest in of_threads if thread == get_ident() and rest[0].parameter_name == name]
    if lent and not isinstance(weight, FrozenWeight) and not any(p.requires_grad for p in experts.parameters()):
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
