"""Backends for the self-test: one that is right, and one for each way to be not."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor

from tilemoe.kernels.experts.torch.backend import TorchBackend


class Right(TorchBackend):
    name = "right"


class Wrong(TorchBackend):
    name = "wrong"

    def up_proj_wgrad(self, *args: Any) -> Tensor:
        return 1.02 * super().up_proj_wgrad(*args)


class NotAdding(TorchBackend):
    """Overwrites the gradient that it is to add to."""

    name = "not_adding"

    def down_proj_wgrad(self, do: Tensor, a: Tensor, plan: Any, column_major: bool = False, out: Any = None) -> Tensor:
        grad = super().down_proj_wgrad(do, a, plan, column_major)
        return grad if out is None else out.copy_(grad)


class NotRepeatable(TorchBackend):
    """Now and then the last bit of one element is another."""

    name = "not_repeatable"
    calls = count()

    def combine(self, y: Tensor, s: Tensor, plan: Any, o: Tensor) -> None:
        super().combine(y, s, plan, o)
        if o.numel() and next(self.calls) % 19 == 18:
            o[0, 0] = torch.nextafter(o[0, 0], torch.full_like(o[0, 0], torch.inf))


class OutOfMemory(TorchBackend):
    name = "out_of_memory"

    def down_proj(self, *args: Any) -> Tensor:
        raise torch.OutOfMemoryError("none is left")
