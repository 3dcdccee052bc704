"""Operators without PyTorch's dispatcher where nobody would see the difference.

A registered operator is what torch.compile, fake tensors, dispatch modes (FLOP counting, selective checkpointing) and
the profiler see. Its bookkeeping costs 50 to 200 microseconds of host time a call, as long as some of the kernels run;
so a call on plain tensors that nothing is watching runs the implementation itself (docs/notes/memory.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True, eq=False)
class Operator:
    """``registered`` with torch.library, and ``run``, its implementation. A call takes the cheaper that will do."""

    registered: Any
    run: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        if is_unwatched(*args) and not is_differentiable(*args):
            return self.run(*args)
        return self.registered(*args)


def is_differentiable(*args: Any) -> bool:
    """Whether autograd would record an operator of ``args``."""
    return torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def is_unwatched(*args: Any) -> bool:
    """Whether an operator of ``args`` may be replaced by its implementation: plain tensors with data, no observer."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.autograd.profiler._is_profiler_enabled  # torch.profiler sets it, too
        and all(type(arg) in _PLAIN and not arg.is_meta for arg in args if isinstance(arg, Tensor))
    )
