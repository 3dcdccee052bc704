"""Operators' operands for the tests of recordings, and what each of them does with them; the fake driver is installed.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · R_max row capacity
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from typing import Any

import fake_driver
import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from tilemoe.activations import activation_spec
from tilemoe.kernels.expert_parallel import triton as triton_exchange  # noqa: F401
from tilemoe.kernels.expert_parallel import triton_window  # noqa: F401
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.plan import triton as triton_plan  # noqa: F401
from tilemoe.kernels.plan import triton_small as plan_small  # noqa: F401
from tilemoe.ops import experts as library
from tilemoe.ops import window
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.runtime import launch
from tilemoe.runtime.launch_cache import LaunchCache
from tilemoe.runtime.operator import Arguments, Operator

DRIVER = fake_driver.install()
BF16, FP32 = torch.bfloat16, torch.float32

Args = tuple[Any, ...]
MakeArgs = Callable[[], Args]


class Case:
    """Operands of a layer; each call of an operator's name gives new ones. ``x`` may be wider than d."""

    def __init__(
        self,
        kernels: str = "hopper",
        activation: str = "swiglu",
        gate_up: str = "concatenated",
        dtype: torch.dtype = BF16,
        bias: bool = False,
        transposed: bool = False,
        extra: int = 0,
        pairs: bool = False,
        tokens: int = 40,
    ) -> None:
        self.kernels, self.dtype, self.bias, self.transposed, self.extra = kernels, dtype, bias, transposed, extra
        self.spec = activation_spec(activation, gate_up, None, None)
        self.pairs, self.tokens, self.d, self.n, self.experts, self.k = pairs, tokens, 128, 64, 4, 2

    def rows(self, width: int, count: int = 0) -> Tensor:
        return torch.zeros(count or self.tokens, width + self.extra, dtype=self.dtype)[:, :width]

    def weight(self, rows: int, columns: int) -> Tensor:
        if self.transposed:
            return torch.zeros(self.experts, columns, rows, dtype=self.dtype).transpose(1, 2)
        return torch.zeros(self.experts, rows, columns, dtype=self.dtype)

    def plan(self) -> RoutingPlan:
        ids = torch.rand(self.tokens, self.experts).topk(self.k, dim=1).indices
        if not self.pairs:
            return plan_topk(ids, self.experts)
        token = torch.arange(self.tokens).repeat_interleave(self.k)
        return plan_pairs(token, ids.reshape(-1), self.tokens, self.experts)

    def args(self, name: str, plan: RoutingPlan | None = None) -> Args:
        """New operands of the operator of this name."""
        plan = plan or self.plan()
        d, n, width = self.d, self.n, self.spec.width_factor * self.n
        tail = (plan, self.spec, backend_named(self.kernels))
        x, w1, w2 = self.rows(d), self.weight(width, d), self.weight(d, n)
        s = torch.zeros(plan.num_pairs)
        b1 = torch.zeros(self.experts, width, dtype=self.dtype) if self.bias else None
        b2 = torch.zeros(self.experts, d, dtype=self.dtype) if self.bias else None
        h, a = (torch.zeros(plan.capacity, columns, dtype=self.dtype) for columns in (width, n))
        do = torch.zeros_like(x, memory_format=torch.contiguous_format)
        return {
            "moe": (x, w1, w2, s, b1, b2, "full", False, *tail),
            "moe_inference": (x, w1, w2, s, b1, b2, "none", False, *tail),
            "moe_h_in_fp8": (x, w1, w2, s, b1, b2, "fp8", False, *tail),
            "dequantize_h": (h.to(torch.float8_e4m3fn), h.float()[:, ::128].contiguous(), self.dtype, *tail),
            "up_proj": (x, w1, b1, *tail),
            "down_proj_dgrad_dact": (do, w2, b2, h, s, *tail),
            "down_proj_wgrad": (do, a, self.transposed, *tail),
            "up_proj_input_grad": (h, w1, *tail),
            "up_proj_wgrad": (x, h, self.transposed, *tail),
            "down_proj_bias_grad": (do, s, *tail),
            "up_proj_bias_grad": (h, *tail),
            "add_down_proj_wgrad": (w2.float(), do, a, *tail),
            "add_up_proj_wgrad": (w1.float(), x, h, *tail),
        }[name]


RUNS: dict[str, Callable[..., Any]] = {
    "moe": library.moe_forward, "moe_inference": library.moe_forward, "up_proj": library.up_proj.run,
    "down_proj_dgrad_dact": library.down_proj_dgrad_dact.run, "down_proj_wgrad": library.down_proj_wgrad.run,
    "up_proj_input_grad": library.up_proj_input_grad.run, "up_proj_wgrad": library.up_proj_wgrad.run,
    "down_proj_bias_grad": library.down_proj_bias_grad.run, "up_proj_bias_grad": library.up_proj_bias_grad.run,
    "add_down_proj_wgrad": library.add_down_proj_wgrad.run, "add_up_proj_wgrad": library.add_up_proj_wgrad.run,
}  # fmt: skip
CASES = {
    "hopper": Case(),
    "hopper, transposed": Case(transposed=True),
    "hopper, x sliced": Case(extra=8),
    "hopper, x to be copied": Case(extra=3),
    "hopper, bias": Case(bias=True),
    "hopper, ungated": Case(activation="relu2"),
    "hopper, pairs": Case(pairs=True),
    "hopper, many rows": Case(tokens=100),  # the others have few, which inference has kernels of its own for
    "triton": Case("triton"),
    "triton, many rows": Case("triton", bias=True, tokens=100),
    "triton, bias, interleaved": Case("triton", "swiglu_oai", "interleaved", bias=True),
    "triton, ungated, transposed": Case("triton", "gelu", transposed=True, bias=True),
    "triton, fp32": Case("triton", dtype=FP32, extra=8, pairs=True),
}


def tensors_of(values: Any) -> list[Tensor]:
    given = values if isinstance(values, tuple) else (values,)
    arrays = [array for value in given if isinstance(value, RoutingPlan) for array in (*value.arrays, value.sums)]
    views = [value.view for value in given if isinstance(value, window.OpenWindow)]
    given = (*given, *arrays, *(tensor for view in views for tensor in (view.addresses, view.state, view.alarm)))
    return [value for value in given if isinstance(value, Tensor)]


def repeating(run: Callable[..., Any], like: Callable[..., Any] | None = None) -> Operator:
    """What repeats the launches of ``run``, whose arguments are those of ``like``."""
    if (like or run).__module__ == window.__name__:
        arguments = window._WindowArguments(puts_results=(like or run) is window._from_experts)
        return Operator("repeating", run, arguments=arguments, compiles_first=False)
    takes_plan = "backend" in signature(like or run).parameters
    return Operator("repeating", run, arguments=library.ROUTED if takes_plan else Arguments())


def watch(run: Callable[..., Any], args: Args, **limits: Any) -> tuple[fake_driver.Tracker, list[Any]]:
    """What ``run(*args)`` does and, by name and layout, what it returns; of tensors without elements the layout."""
    with fake_driver.tracked(tensors_of(args), **limits) as tracker:
        results = tensors_of(run(*args))
        return tracker, [tracker.name_of(t) if t.numel() else fake_driver.layout(t) for t in results]


def recordings(operator: Operator) -> list[Any]:
    """One entry for each layout that ``operator`` knows."""
    assert operator._launches is not None
    return list(operator._launches.known.values())


def assert_repeated(run: Callable[..., Any], make: MakeArgs, in_mode: Callable[[], Any] = nullcontext) -> Operator:
    """Five calls on new operands, each doing what ``run`` does by itself; of the last three, ``run`` knows nothing."""
    calls: list[Args] = []

    def spied(*args: Any) -> Any:
        calls.append(args)
        return run(*args)

    operator = repeating(spied, like=run)
    kept = []
    for index in range(5):
        args = make()
        kept.append(args)  # so that no operand has the address of an earlier one
        with in_mode():
            expected, returned = watch(run, args)
            found, got = watch(operator, args)
        assert found.events == expected.events, f"call {index}"
        assert got == returned, f"call {index}"
        assert len(expected.alive) == len(found.alive)
        for mine, theirs in zip(found.alive, expected.alive, strict=True):
            assert mine <= theirs, f"call {index}: something is given back late"
        assert found.all_expired(), "nothing is kept"
    assert len(calls) == 2, "recorded at the second call, and repeated from then on"
    return operator


def select_args(
    tokens: int = 40, spec: tuple[Any, ...] = (), bias: bool = False, mask: bool = False, transposed: bool = False
) -> Args:
    logits = torch.zeros(8, tokens).t() if transposed else torch.zeros(tokens, 8)
    return (
        logits,
        torch.zeros(8) if bias else None,
        torch.ones(tokens, dtype=torch.bool) if mask else None,
        *(spec or (2, "softmax", True, 1.0, 1, 1, False, False)),
    )


def forget() -> None:
    """All that is compiled or recorded."""
    launch._compiled.cache_clear()
    for found in gc.get_objects():
        if type(found) in (JITFunction, GluonJITFunction):
            found.device_caches.clear()
        elif type(found) is LaunchCache:
            found.known.clear()
