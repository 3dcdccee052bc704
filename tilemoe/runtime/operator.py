"""`Operator`: an implementation that torch.library knows, that autograd can record, and whose launches are repeated.

A registered operator is what torch.compile, fake tensors, dispatch modes (FLOP counting, selective checkpointing) and
the profiler see. Its bookkeeping costs 50 to 200 microseconds of host time a call, as long as some of the kernels run;
so a call on plain tensors that nothing is watching runs the implementation itself (docs/lab/memory.md).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilemoe.runtime.device import has_triton
from tilemoe.runtime.imports import after_import
from tilemoe.runtime.launch_cache import LaunchCache
from tilemoe.runtime.tensors import PLAIN

Args = tuple[Any, ...]
Save = Callable[[Any, Args, Any], None]
Backward = Callable[..., tuple[Tensor | None, ...]]


class Arguments:
    """What an operator's arguments are made of: tensors, numbers and strings, unless a subclass knows objects."""

    def operands(self, args: Args) -> Args:
        """A tensor, then all other tensors and all else that launches depend on (hashable)."""
        return args

    def flatten(self, args: Args) -> Args:
        """What the operator's schema takes."""
        return args

    def unflatten(self, flat: Args) -> Args:
        """What `flatten` was given, or its equal."""
        return flat


_AS_GIVEN = Arguments()


class Operator:
    """``run(*args)``, positional, called with autograd and autocast off. Its tensors are on one device.

    Args:
        name: of ``tilemoe::name``.
        schema: as torch.library has it, ``(Tensor x, int n) -> Tensor``. None: for what no graph can hold, which is not
            registered.
        fake: gives what ``run`` gives, without values; both may give None for the schema's Tensor.
        arguments: between the arguments and the schema's.
        advise: ``(name, found, arguments by name)`` gives the message of an OutOfMemoryError that said ``found``.
        repeats: whether launches are recorded and repeated; not where PyTorch's operators do the work.
        compiles_first: whether a call may begin by compiling without launching; not where other GPUs wait for
            launches, or where it writes to an operand.
        flops: of `torch.utils.flop_counter`, from the schema's arguments with shapes for tensors; None: none.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        schema: str | None = None,
        fake: Callable[..., Any] | None = None,
        arguments: Arguments = _AS_GIVEN,
        advise: Callable[[str, str, dict[str, Any]], str] | None = None,
        repeats: bool = True,
        compiles_first: bool = True,
        flops: Callable[..., int] | None = None,
    ) -> None:
        self.name, self.run, self._fake, self._arguments, self._advise = name, run, fake, arguments, advise
        self._launches = LaunchCache(compiles_first) if repeats else None
        self.save: Save | None = None
        self._backward: Backward | None = None
        self.registered: Any = None
        if schema is not None:
            self.registered = torch.library.custom_op(
                f"tilemoe::{name}", self._run_seen, mutates_args=(), schema=schema
            )
            self.registered.register_fake(self._run_fake)
            if flops is not None:
                packet = getattr(torch.ops.tilemoe, name)
                # to import the counter is to import Triton, which a CPU does without
                after_import("torch.utils.flop_counter", lambda m: m.register_flop_formula(packet)(flops))

    def register_autograd(self, backward: Backward, save: Save) -> None:
        """``save(ctx, args, output)`` keeps what ``backward(ctx, *grads)`` needs for the gradients of the first args.

        As torch.library's and autograd's; the gradients of the other arguments are None.
        """
        self.save, self._backward = save, backward
        self.registered.register_autograd(
            self.differentiate,
            setup_context=lambda ctx, inputs, output: save(ctx, self._arguments.unflatten(inputs), output),
        )

    def refuse_autograd(self, message: str) -> None:
        """Differentiating this operator is a RuntimeError that says ``message``."""

        def refuse(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            raise RuntimeError(message)

        self.register_autograd(refuse, lambda ctx, args, output: None)

    def __call__(self, *args: Any, seen: bool = False) -> Any:
        """What ``run`` returns. ``seen``: called by the registered operator, for a tracer or a dispatch mode."""
        operands = self._arguments.operands(args)
        first: Tensor = operands[0]
        if not seen and self.registered is not None:
            if not torch.compiler.is_compiling():
                if forward_ad._current_level >= 0:
                    self._refuse_tangents(operands)
                if torch._C._functorch.peek_interpreter_stack() is not None:
                    refuse_transforms(f"tilemoe::{self.name}", *operands)
            if not _is_unwatched(operands):
                return self.registered(*self._arguments.flatten(args))
        is_recorded = self.save is not None and not seen and is_differentiable(*operands)
        casts = torch._C._is_any_autocast_enabled()  # a tenth of the time of asking for a device's
        if casts:
            kind = first.device.type
            casts = torch.is_autocast_enabled(kind)
        if is_recorded:
            torch._C._set_grad_enabled(False)
        if casts:  # the operator has chosen its dtypes: a backward under autocast must not lower the fp32 ones
            torch.set_autocast_enabled(kind, False)
        try:
            trace, watcher = None, None
            if self._launches is not None and is_replayable(first):
                trace, watcher = self._launches.look_up(operands)
            if trace is not None:
                output = trace(operands)
            elif watcher is None:
                output = self.run(*args)
            else:
                output = None
                with watcher:
                    output = self.run(*args)
                    if is_recorded and watcher.withheld:
                        self._compile_backward(args, output)
                if watcher.withheld:
                    output = None  # it has no values
                    output = self.run(*args)
                watcher.keep(output)
            advice = None
        except torch.OutOfMemoryError as error:
            if self._advise is None:
                raise
            advice = self._advise(self.name, str(error), signature(self.run).bind(*args).arguments)
            clear_frames(error.__traceback__)  # which would keep buffers for as long as the error lives
        finally:
            if is_recorded:
                torch._C._set_grad_enabled(True)
            if casts:
                torch.set_autocast_enabled(kind, True)
        if advice is not None:
            raise torch.OutOfMemoryError(advice)
        return EagerFunction.apply(*args, (self, output)) if is_recorded else output

    def differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        assert self._backward is not None, "nothing else is recorded"
        found = self._backward(ctx, *grads)
        return (*found, *[None] * (len(ctx.needs_input_grad) - len(found)))

    def _compile_backward(self, args: Args, output: Any) -> None:
        """Where launches only compile, let the backward compile its kernels beside the forward's."""
        assert self.save is not None, "nothing else is recorded"
        with suppress(Exception):  # memory that is missing, or a refusal: the backward's to raise, if it is ever called
            ctx = _Unrecorded(args)
            self.save(ctx, args, output)
            outputs = output if isinstance(output, tuple) else (output,)
            self.differentiate(ctx, *[None if each is None else each.new_empty(each.shape) for each in outputs])

    def _run_seen(self, *flat: Any) -> Any:
        return _without_none(self(*self._arguments.unflatten(flat), seen=True), flat[0])

    def _run_fake(self, *flat: Any) -> Any:
        assert self._fake is not None, "a schema comes with a fake"
        return _without_none(self._fake(*self._arguments.unflatten(flat)), flat[0])

    def _refuse_tangents(self, operands: Args) -> None:
        """RuntimeError inside forward-mode differentiation, where an operator would drop the tangents in silence."""
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise RuntimeError(
                f"tilemoe::{self.name} has no forward-mode derivative. Use reverse mode, or tilemoe.reference, "
                "which has one."
            )


class _Unrecorded:
    """Autograd's context of a call that autograd does not know."""

    next_functions = ((None, 0),)

    def __init__(self, args: Args) -> None:
        self.needs_input_grad = [isinstance(arg, Tensor) and arg.requires_grad for arg in args]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def maybe_clear_saved_tensors(self) -> None:
        self.saved_tensors = ()

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class EagerFunction(torch.autograd.Function):
    """What autograd records of an operator that has run: applied to its arguments, and to it with what it returned."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *args, (ctx.operator, output) = given
        ctx.operator.save(ctx, tuple(args), output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.operator.differentiate(ctx, *grads)


def refuse_transforms(name: str, *args: Any) -> None:
    """RuntimeError where torch.vmap or torch.func gave a tensor that stands for another: kernels cannot read it.

    Functions call it before autograd's fail in other words. Nothing is looked at while torch.compile traces.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return
    if any(torch._C._functorch.is_functorch_wrapped_tensor(arg) for arg in args if isinstance(arg, Tensor)):
        raise RuntimeError(
            f"{name} does not go through torch.vmap or torch.func. Pass a batch as further tokens, (B*T, d), and "
            "differentiate with torch.autograd; or use tilemoe.reference."
        )


def is_replayable(first: Tensor) -> bool:
    """Whether launches for this operand start on the current device, and no dispatch mode sees their allocations.

    Not on AMD's GPUs, whose kernels also depend on the size of the memory that a tensor is part of.
    """
    return (
        first.is_cuda
        and torch.version.hip is None
        and torch._C._len_torch_dispatch_stack() == 0
        and first.device.index == torch.cuda.current_device()
        and has_triton()
    )


def is_differentiable(*args: Any) -> bool:
    """Whether autograd would record an operator of ``args``."""
    if torch.is_grad_enabled():
        for arg in args:  # a generator takes twice the time
            if isinstance(arg, Tensor) and arg.requires_grad:
                return True
    return False


def is_plain(*args: Any) -> bool:
    """Whether operators of ``args`` would run their implementation alone, or with autograd: no tracer, no mode."""
    is_transformed = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    return not is_transformed and _is_unwatched(args)


def _is_unwatched(operands: Args) -> bool:
    """Whether an operator would go unseen: its tensors are plain and have data, no tracer, mode or profiler is on."""
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()  # torch.jit's and ONNX's, which see no kernel that Triton starts
        or torch._C._len_torch_dispatch_stack() != 0
        or torch.autograd.profiler._is_profiler_enabled  # torch.profiler sets it, too
    ):
        return False
    for operand in operands:  # PyTorch negates a negated view
        if isinstance(operand, Tensor) and (type(operand) not in PLAIN or operand.is_meta or operand.is_neg()):
            return False
    return True


def _without_none(output: Any, like: Tensor) -> Any:
    """``output``, with a tensor without elements for None: a schema's Tensor cannot be None."""
    if not isinstance(output, tuple):
        return output
    return tuple([like.new_empty(0) if each is None else each for each in output])
