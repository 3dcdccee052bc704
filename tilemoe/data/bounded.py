"""Chat templates, which anybody may have written, rendered as transformers does but in bounded time and memory.

Jinja's sandbox keeps a template from the process, not from looping or growing. Here each turn of a loop, call of a
macro and piece of output, and each operation by which a text or a list grows, is paid from a budget before it is done.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Macro
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _cached_compile_jinja_template, render_jinja_template

_SECONDS, _BUDGET = 1.0, 1 << 27  # of a rendering: of the processor's time, and of characters
_LONGEST = 1 << 17  # characters of a template: the known ones have up to 30,000
_GROWING = frozenset(  # operators, filters and methods of texts whose results may be larger than what they are given
    {
        "%", "*", "**", "batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace",
        "rjust", "round", "slice", "to_bytes", "tojson", "translate", "truncate", "urlize", "wordwrap", "xmlattr",
        "zfill",
    }
)  # fmt: skip
_OPERATORS = frozenset({"+", "*", "**", "%"})
_FORMATS = frozenset({"format", "format_map", "%"})
_GIVEN_WIDTH = re.compile(r"%[-+ #0]*\*|\{[^{}]+\{")  # a width that is not in the format but among what it is given


class Renderer:
    """A template, compiled. Its errors are those of any program; TemplateError: it takes too much."""

    def __init__(self, source: str) -> None:
        if len(source) > _LONGEST:
            raise TemplateError(f"it has more than {_LONGEST:,} characters")
        self._begin()
        # transformers' own, with its filters, functions and {% generation %}, made of another template than `source`,
        # for Jinja computes what is constant while it compiles.
        env = _cached_compile_jinja_template("").environment
        del env.globals["lipsum"]
        env.finalize = self._output
        env.filters = {name: self._paid(name, apply) for name, apply in env.filters.items()}
        env.filters |= {"step": self._step, "made": self._output}
        env.intercepted_binops = _OPERATORS
        env.binop_table = {sign: self._paid(sign, apply) for sign, apply in env.binop_table.items()}
        self._call, env.call = env.call, self._called
        self._env = env
        self._template = env.from_string(_Paying().visit(env.parse(source)))

    def render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False, **tokens: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and which of its characters ``{% generation %}`` marks."""
        (plain,), _ = render_jinja_template([messages], chat_template="{{ messages | tojson }}")  # as it gives them
        given = {"messages": json.loads(plain), "add_generation_prompt": add_generation_prompt, **tokens}
        self._begin()
        pieces: list[str] = []
        marked: list[tuple[int, int]] = []
        with self._env.activate_tracker(pieces, marked):
            for piece in self._template.generate(**given, tools=None, documents=None):
                pieces.append(piece)  # noqa: PERF402 (one by one: what marks looks at them)
        return "".join(pieces), marked

    def _begin(self) -> None:
        self._deadline, self._left = time.thread_time() + _SECONDS, _BUDGET

    def _pay(self, work: int) -> None:
        self._left -= work
        if self._left < 0 or time.thread_time() > self._deadline:
            raise TemplateError("it takes more steps, or makes longer texts, than any should")

    @pass_context  # or Jinja would apply it to a constant once for all
    def _step(self, _: Any, characters: int) -> None:
        self._pay(1 + characters)

    def _output(self, value: Any) -> Any:
        self._pay(self._size(value))
        return value

    def _paid(self, name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        """``apply``, a filter or an operator, paid."""

        @wraps(apply)
        def paid(*given: Any, **options: Any) -> Any:
            if name in _GROWING:
                given = tuple([*value] if isinstance(value, Iterator) else value for value in given)
            self._pay(self._work(name, [*given, *options.values()]))
            return apply(*given, **options)

        return paid

    def _called(self, context: Any, called: Any, /, *given: Any, **options: Any) -> Any:
        method = getattr(called, "__wrapped__", called)  # Jinja replaces the texts' method format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            given = tuple([*value] if isinstance(value, Iterator) else value for value in given)
            self._pay(self._work(method.__name__, [owner, *given, *options.values()]))
        else:  # of macros the body is paid; tables and namespaces hold what they are given
            self._output([] if isinstance(called, Macro) else [*given, *options.values()])
        return self._call(context, called, *given, **options)

    def _work(self, name: str, given: list[Any]) -> int:
        """The most characters and items, or bits of a number, that an operation makes."""
        if name in _OPERATORS and all(isinstance(value, (int, float)) for value in given):
            bits = [int(value).bit_length() for value in given]
            return bits[0] * abs(int(given[1])) if name == "**" else math.prod(bits)
        if name == "+":
            return sum(len(value) for value in given if isinstance(value, Collection))
        if name not in _GROWING:
            return 0
        given = [value for value in given if isinstance(value, (int, Collection))]  # no context of Jinja's
        if name in _FORMATS:
            form = str(given[0])
            widest = max(map(int, re.findall(r"\d+", form)), default=0)
            return _BUDGET + 1 if _GIVEN_WIDTH.search(form) else len(form) * (widest + self._size(given[1:]))
        if name == "replace":
            del given[1]  # what is replaced
        return math.prod(abs(value) or 1 if isinstance(value, int) else self._size(value) or 1 for value in given)

    def _size(self, value: Any) -> int:
        """Characters in it, and 64 for each item, which takes as long; no more are counted than are left."""
        size, left = 0, [value]
        while left and size <= self._left:
            value = left.pop()
            size += len(value) if isinstance(value, (str, bytes)) else 64
            if isinstance(value, Namespace):
                value = value._Namespace__attrs
            if isinstance(value, Mapping):
                left += [*value.keys(), *value.values()]
            elif isinstance(value, Collection) and not isinstance(value, (str, bytes)):
                left += value
        return size


class _Paying(NodeTransformer):
    """Rewrites a template, so that it pays where Jinja calls nothing that could be replaced."""

    def visit_For(self, node: Any) -> Any:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(text), "step")))
        return node

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), "join")

    def visit_List(self, node: Any) -> Any:
        self.generic_visit(node)
        return _filtered(node, "made")

    visit_Dict = visit_List

    def visit_Tuple(self, node: Any) -> Any:
        return self.visit_List(node) if node.ctx == "load" else self.generic_visit(node)


def _filtered(node: Any, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None)
