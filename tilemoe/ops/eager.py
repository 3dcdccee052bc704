"""Operators of torch.library that run without PyTorch's dispatcher where nobody would see the difference.

A registered operator is what torch.compile, fake tensors, dispatch modes (FLOP counting, selective checkpointing) and
the profiler see. Its bookkeeping costs 50 to 200 microseconds of host time a call, as long as some of the kernels run;
so a call on plain tensors that nothing is watching runs the implementation itself (docs/notes/memory.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_PLAIN = (Tensor, nn.Parameter)


class Operator:
    """``tilemoe::name``: ``run`` is its implementation on any device, ``fake`` gives its outputs' shapes.

    ``schema`` as torch.library has it: ``(Tensor x, int n) -> Tensor``. Arguments are positional.
    """

    def __init__(self, name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
        self.name, self.run = name, run
        self.registered: Any = torch.library.custom_op(f"tilemoe::{name}", run, mutates_args=(), schema=schema)
        self.registered.register_fake(fake)
        self._recorded: Any = self.registered

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        """As torch.library's: setup_context(ctx, inputs, output) and backward(ctx, *grads)."""
        self.registered.register_autograd(backward, setup_context=setup_context)
        run = self.run

        class Recorded(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                output = run(*args)
                setup_context(ctx, args, output)
                return output

        Recorded.backward = staticmethod(backward)  # type: ignore[method-assign]
        self._recorded = Recorded.apply

    def refuse_autograd(self, message: str) -> None:
        """Differentiating this operator is a RuntimeError that says ``message``."""

        def refuse(ctx: Any, *grads: Tensor | None) -> None:
            raise RuntimeError(message)

        self.registered.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)

    def __call__(self, *args: Any) -> Any:
        if not torch.compiler.is_compiling():
            if forward_ad._current_level >= 0:
                self._refuse_tangents(args)
            if torch._C._functorch.peek_interpreter_stack() is not None:
                self._refuse_transforms(args)
        if not _is_unwatched(args):
            return self.registered(*args)
        return self._recorded(*args) if is_differentiable(*args) else self.run(*args)

    def _refuse_tangents(self, args: tuple[Any, ...]) -> None:
        """RuntimeError inside forward-mode differentiation, where an operator would drop the tangents in silence."""
        if any(forward_ad.unpack_dual(arg).tangent is not None for arg in args if isinstance(arg, Tensor)):
            raise RuntimeError(
                f"tilemoe::{self.name} has no forward-mode derivative. Use reverse mode, or tilemoe.reference, "
                "which has one."
            )

    def _refuse_transforms(self, args: tuple[Any, ...]) -> None:
        """RuntimeError where torch.vmap or torch.func gave a tensor that stands for another: kernels cannot read it."""
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        if any(wrapped(arg) for arg in args if isinstance(arg, Tensor)):
            raise RuntimeError(
                f"tilemoe::{self.name} does not go through torch.vmap or torch.func. Pass a batch as further tokens, "
                "(B*T, d), and differentiate with torch.autograd; or use tilemoe.reference."
            )


def is_differentiable(*args: Any) -> bool:
    """Whether autograd would record an operator of ``args``."""
    return torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def is_plain(*args: Any) -> bool:
    """Whether operators of ``args`` would run their implementation alone, or with autograd: nobody watches."""
    return (
        _is_unwatched(args) and forward_ad._current_level < 0 and torch._C._functorch.peek_interpreter_stack() is None
    )


def _is_unwatched(args: tuple[Any, ...]) -> bool:
    """Whether nobody would see the operator itself: plain tensors that have data, no tracing, no mode, no profiler."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()  # torch.jit's and ONNX's, which see no kernel that Triton starts
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.autograd.profiler._is_profiler_enabled  # torch.profiler sets it, too
        and all(type(arg) in _PLAIN and not arg.is_meta for arg in args if isinstance(arg, Tensor))
    )
