"""Triton's interpreter, where it is on, without what it does in vain, half of its time, and with what it lacks."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from typing import Any


def improve() -> None:
    """Of this process; once is enough."""
    from triton.runtime import interpreter

    tl, patch_lang, patch_tensor = interpreter.tl, interpreter._patch_lang, interpreter._patch_lang_tensor

    def patch_lang_once(fn: Any) -> Any:
        """As `patch_lang`; nothing where the launch of the kernel that calls ``fn`` has patched the language already.

        At each such call Triton walks all of the language, to find there what it has put there.
        """
        langs = [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
        if all(not tl.core.is_builtin(lang.load) for lang in langs):  # what is patched is no builtin
            return interpreter._LangPatchScope()
        return patch_lang(fn)

    def patch_tensor_of_any_numpy(tensor: Any, scope: Any) -> None:
        """As `patch_tensor`; its scalars are arrays of one element, which numpy takes for numbers up to 2.3."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def reduce_by_descriptor(builder: Any, kind: Any, descriptor: Any, value: Any, place: Any) -> None:
        """A tile added to what a tensor has, which 3.6 does not interpret."""
        assert kind == interpreter.tl.semantic.ir.DESCRIPTOR_REDUCE_KIND.ADD
        pointers, inside = descriptor.materialize_pointers(place)
        old = builder.create_masked_load(pointers, inside, None, None, None, False)
        builder.create_masked_store(pointers, builder.create_fadd(old, value), inside, None, None)

    interpreter._patch_lang = patch_lang_once
    interpreter._patch_lang_tensor = patch_tensor_of_any_numpy
    interpreter.InterpreterBuilder.create_descriptor_reduce = reduce_by_descriptor
    # Each sum of integers is made again in 64 bits, for an assertion that is skipped where options.debug is False.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def wait_at_ease(patience: float) -> None:
    """A kernel that looks at a flag again and again leaves the core to others between two looks.

    AssertionError in the kernel: it has done nothing else for ``patience`` seconds.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    update, last = InterpreterBuilder.create_atomic_rmw, time.monotonic()

    def update_or_wait(builder: Any, kind: Any, pointer: Any, value: Any, *rest: Any) -> Any:
        nonlocal last
        if value.data.any():  # one who looks adds 0
            last = time.monotonic()
        else:
            assert time.monotonic() - last < patience, "nobody sets the flag"
            time.sleep(1e-4)
        return update(builder, kind, pointer, value, *rest)

    InterpreterBuilder.create_atomic_rmw = update_or_wait
