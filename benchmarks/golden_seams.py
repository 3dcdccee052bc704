"""All that `golden` takes of the package beneath `tilemoe`'s own names: when files move, this one follows.

`let_triton_serve_the_cpu` alone reaches into internals. The rest is documented, but not exported by the package itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

import tilemoe
from tilemoe.layers.lora import add_lora, merge_lora
from tilemoe.models.generate import generate
from tilemoe.models.loss import chunked_cross_entropy

__all__ = ["add_lora", "chunked_cross_entropy", "generate", "let_triton_serve_the_cpu", "merge_lora", "plan_tensors"]


def plan_tensors(plan: tilemoe.RoutingPlan) -> dict[str, Tensor]:
    """The plan's index arrays by name."""
    values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    found = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return {**found, "rows_per_expert": plan.rows_per_expert}


@contextmanager
def let_triton_serve_the_cpu(by_descriptor: bool = False) -> Iterator[None]:
    """In Triton's interpreter: planning, routing, rounding, the loss and rotary positions take their kernels, too.

    The experts do so by ``kernels="triton"``; these ask whether the tensor is on a GPU, and no argument says otherwise.
    ``by_descriptor``: the experts' GEMMs reach memory as they do on a GPU with TMA, else by pointer.
    """
    from tilemoe.runtime.device import Device

    device = Device(90 if by_descriptor else 0, shared_bytes=1 << 20, multiprocessors=3, interpreted=True)
    serve = {"device_of": lambda t: device}
    anywhere = {"why_no_triton": lambda device: None}
    with (
        mock.patch.multiple("tilemoe.kernels.experts.triton.backend", **serve),
        mock.patch.multiple("tilemoe.kernels.choose", **anywhere),
    ):
        yield
