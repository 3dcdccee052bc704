"""Triton's interpreter without what it does in vain, where it is on: that is half of its time."""

import inspect
import os
from dataclasses import replace
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    tl, patch_lang = interpreter.tl, interpreter._patch_lang

    def patch_lang_once(fn: Any) -> Any:
        """As `patch_lang`; nothing where the launch of the kernel that calls ``fn`` has patched the language already.

        At each such call Triton walks all of the language, to find there what it has put there.
        """
        langs = [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
        if all(not tl.core.is_builtin(lang.load) for lang in langs):  # what is patched is no builtin
            return interpreter._LangPatchScope()
        return patch_lang(fn)

    interpreter._patch_lang = patch_lang_once
    # Each sum of integers is made again in 64 bits, for an assertion that is skipped where options.debug is False.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
