"""`Operator`: an implementation that is registered with torch.library and autograd, and whose launches are replayed.

torch.compile, fake tensors, dispatch modes (FLOP counting, selective checkpointing) and the profiler see a registered
operator. Its bookkeeping costs 50 to 200 microseconds of host time per call, as long as some kernels run. So a call on
plain tensors that none of these observes runs the implementation directly (docs/lab/memory.md).
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
_BATCHED = torch._C._dispatch_key_parse("VmapMode")  # set in a backward with is_grads_batched=True


class Arguments:
    """How an operator's arguments map to its schema. Here they are tensors, numbers and strings, as in the schema; a
    subclass converts objects."""

    def operands(self, args: Args) -> Args:
        """A tensor, then all other tensors and (hashable) values that launches depend on."""
        return args

    def flatten(self, args: Args) -> Args:
        """The arguments that the operator's schema takes."""
        return args

    def unflatten(self, flat: Args) -> Args:
        """The inverse of `flatten`: arguments equal to those that it was given."""
        return flat


_AS_GIVEN = Arguments()


class Operator:
    """An operator that calls ``run(*args)``, with autograd and autocast off. All its tensors are on one device.

    Args:
        name: the operator is ``tilemoe::name``.
        schema: torch.library's, ``(Tensor x, int n) -> Tensor``. None: it is not registered, since no graph can hold
            it.
        fake: returns ``run``'s results without values; both may return None in place of the schema's Tensor.
        arguments: converts between ``run``'s arguments and the schema's.
        advise: ``(name, found, arguments by name)`` returns the message for an OutOfMemoryError that said ``found``.
        repeats: whether launches are recorded and replayed; False if PyTorch's operators do the work.
        compiles_first: whether the first call may compile without launching; False if other GPUs wait for its
            launches, or if it writes to an operand.
        flops: a formula for `torch.utils.flop_counter`; it gets the schema's arguments, shapes in place of tensors.
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
                # importing the counter imports Triton, which a CPU does not need
                after_import("torch.utils.flop_counter", lambda m: m.register_flop_formula(packet)(flops))

    def register_autograd(self, backward: Backward, save: Save) -> None:
        """Differentiate by ``save(ctx, args, output)`` and ``backward(ctx, *grads)``, as in torch.library and autograd.

        backward returns the gradients of the first arguments; those of the others are None.
        """
        self.save, self._backward = save, backward
        self.registered.register_autograd(
            self.differentiate,
            setup_context=lambda ctx, inputs, output: save(ctx, self._arguments.unflatten(inputs), output),
        )

    def refuse_autograd(self, message: str) -> None:
        """Make differentiating this operator a RuntimeError with this ``message``."""

        def refuse(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            raise RuntimeError(message)

        self.register_autograd(refuse, lambda ctx, args, output: None)

    def __call__(self, *args: Any, seen: bool = False) -> Any:
        """``run``'s result. ``seen``: the registered operator makes this call, for a tracer, a mode or a profiler."""
        operands = self._arguments.operands(args)
        first: Tensor = operands[0]
        if not seen and self.registered is not None:
            if forward_ad._current_level >= 0 or (
                not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
            ):
                refuse_transforms(f"tilemoe::{self.name}", *operands)
            if not _is_unwatched(operands):
                return self.registered(*self._arguments.flatten(args))
        is_recorded = self.save is not None and not seen and is_differentiable(*operands)
        casts = torch._C._is_any_autocast_enabled()  # takes a tenth of the time of the question for one device
        if casts:
            kind = first.device.type
            casts = torch.is_autocast_enabled(kind)
        if is_recorded:
            torch._C._set_grad_enabled(False)
        if casts:  # the operator has chosen its dtypes: autocast must not lower the fp32 ones in a backward
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
            clear_frames(error.__traceback__)  # whose frames would keep buffers alive with the error
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
        """While launches only compile, run the backward, so that its kernels compile together with the forward's."""
        assert self.save is not None, "nothing else is recorded"
        with suppress(Exception):  # the backward itself raises, if it is called: out of memory, or a refusal
            ctx = _Unrecorded(args)
            self.save(ctx, args, output)
            outputs = output if isinstance(output, tuple) else (output,)
            self.differentiate(ctx, *[None if each is None else each.new_empty(each.shape) for each in outputs])

    def _run_seen(self, *flat: Any) -> Any:
        return _without_none(self(*self._arguments.unflatten(flat), seen=True), flat[0])

    def _run_fake(self, *flat: Any) -> Any:
        assert self._fake is not None, "a schema comes with a fake"
        return _without_none(self._fake(*self._arguments.unflatten(flat)), flat[0])


class _Unrecorded:
    """A stand-in for autograd's context, for a call that autograd does not record."""

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
    """The node that autograd records for an operator that has run. Arguments: its own, then (operator, output)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *args, (ctx.operator, output) = given
        ctx.operator.save(ctx, tuple(args), output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.operator.differentiate(ctx, *grads)


def refuse_transforms(name: str, *args: Any) -> None:
    """RuntimeError if an argument has a forward-mode tangent, which would silently be dropped, or is a wrapper tensor
    of torch.vmap or torch.func, which kernels cannot read; torch.compile's tracing finds the former only.

    Autograd functions call it first, since their own error would be less clear.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(each).tangent is not None for each in tensors):
        raise RuntimeError(
            f"{name} has no forward-mode derivative. Use reverse mode, or tilemoe.reference, which has one."
        )
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        raise RuntimeError(
            f"{name} does not go through torch.vmap or torch.func. Pass a batch as further tokens, (B*T, d), and "
            "differentiate with torch.autograd; or use tilemoe.reference."
        )


def is_replayable(first: Tensor) -> bool:
    """Whether launches for this operand may be replayed: it is on the current GPU, and no dispatch mode is active.

    Never on AMD's GPUs, whose kernels also depend on the size of a tensor's storage.
    """
    return (
        first.is_cuda
        and torch.version.hip is None
        and torch._C._len_torch_dispatch_stack() == 0
        and first.device.index == torch.cuda.current_device()
        and has_triton()
    )


def is_differentiable(*args: Any) -> bool:
    """Whether autograd would record an operator with these arguments."""
    if torch.is_grad_enabled():
        for arg in args:  # any() with a generator takes twice the time
            if isinstance(arg, Tensor) and arg.requires_grad:
                return True
    return False


def is_plain(*args: Any) -> bool:
    """Whether operators would run their implementation directly for ``args``: no transform, tracer or mode is on."""
    is_transformed = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    return not is_transformed and _is_unwatched(args)


def _is_unwatched(operands: Args) -> bool:
    """Whether nothing observes an operator: its tensors are plain and have data; no tracer, mode or profiler is on."""
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()  # torch.jit's and ONNX's tracers do not see Triton's kernels
        or torch._C._len_torch_dispatch_stack() != 0
        or torch.autograd.profiler._is_profiler_enabled  # torch.profiler sets it, too
        or torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED)  # which the dispatcher takes apart
    ):
        return False
    for operand in operands:  # a lazily negated view (is_neg) needs PyTorch's dispatch
        if isinstance(operand, Tensor) and (type(operand) not in PLAIN or operand.is_meta or operand.is_neg()):
            return False
    return True


def _without_none(output: Any, like: Tensor) -> Any:
    """``output`` with an empty tensor in place of each None, since a schema's Tensor cannot be None."""
    if not isinstance(output, tuple):
        return output
    return tuple([like.new_empty(0) if each is None else each for each in output])
