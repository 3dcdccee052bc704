"""The self-test that a backend must pass before it serves on a kind of GPU where it has never run.

It compares all kernels, forward and backward, with the reference on hostile routings; each case must repeat its bits.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilemoe.config import ACTIVATIONS
from tilemoe.kernels.experts.base import Backend
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.testing.compare import ERROR_CAPS, assert_equal, assert_moe_matches_reference, relative_error
from tilemoe.testing.inputs import forward_and_grads, make_inputs, output_grad, poisoned_memory
from tilemoe.testing.routings import hostile_routings


class _Sizes(NamedTuple):
    """For hostile routings: ``tile`` rows; (d, n) that are whole tiles (``widths``) or not (``ragged``). For a layer
    that fills the device: (T, E, K) (``routed``) and (d, n) (``larger``).
    """

    tile: int
    widths: tuple[int, int]
    ragged: tuple[int, int]
    routed: tuple[int, int, int]
    larger: tuple[int, int]
    repeats: int


_GPU = _Sizes(128, (256, 128), (328, 136), (4096, 32, 4), (1024, 512), repeats=20)
_CPU = _Sizes(8, (16, 8), (17, 9), (64, 8, 2), (32, 16), repeats=3)  # to test this file


@dataclass(frozen=True)
class _Case:
    """A layer on a routing. ``transposed``: dimension p of the weights (E, p, q) is contiguous."""

    routing: str
    plan: RoutingPlan
    widths: tuple[int, int]
    dtype: torch.dtype
    activation: str = "swiglu"
    gate_up: str = "concatenated"
    bias: bool = False
    transposed: bool = False

    def __str__(self) -> str:
        options = [self.activation, self.gate_up, *["biases"] * self.bias, *["transposed weights"] * self.transposed]
        return f"{self.routing} (d, n {self.widths}, {self.dtype}, {', '.join(options)})"

    def check(self, backend: Backend, repeats: int) -> None:
        """AssertionError: a result is off, or a repeat differs from the first run."""
        run = partial(moe, kernels=backend)
        inputs = make_inputs(self.plan, *self.widths, self.activation, dtype=self.dtype, bias=self.bias)
        if self.transposed:
            inputs |= {name: inputs[name].mT.contiguous().mT for name in ("w1", "w2")}
        options = {"activation": self.activation, "gate_up": self.gate_up}
        first = assert_moe_matches_reference(inputs, self.plan, run, **options)
        for repeat in range(1, repeats):
            assert_equal(forward_and_grads(run, inputs, self.plan, **options), first, f"not repeatable, run {repeat}")
        if self.routing == "large":
            _check_accumulation(partial(run, plan=self.plan, **options), inputs, first)


def _check_accumulation(run: Callable[..., Tensor], inputs: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """AssertionError: weight gradients that the kernels add over two backwards are not twice those of one."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    dtype = inputs["x"].dtype
    for _ in range(2):
        o = run(accumulate=True, **leaves)
        o.backward(output_grad(o))
    for name in ("w1", "w2"):
        grad = leaves[name].grad
        assert grad is not None, f"{name} has no gradient"
        error = relative_error(grad, 2 * found[f"d{name}"].double())
        assert error < ERROR_CAPS[dtype], f"accumulated d{name} is off by {error:.2e}"


def problem(backend: Backend, device: torch.device) -> str | None:
    """What is wrong with ``backend`` on ``device``, in one line; None: nothing.

    torch.OutOfMemoryError: there is too little memory to test.
    """
    sizes, case = _GPU if device.type == "cuda" else _CPU, None
    try:
        for case in _cases(sizes, device):
            with poisoned_memory():
                case.check(backend, sizes.repeats)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # from a compiler, a driver or the comparison
        return " ".join(f"{case}: {type(error).__name__}: {error}".split())[:400]
    return None


def _cases(sizes: _Sizes, device: torch.device) -> Iterator[_Case]:
    widths, larger, (tokens, experts, k) = sizes.widths, sizes.larger, sizes.routed
    routings = {routing.name: routing.plan for routing in hostile_routings(sizes.tile, device)}
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(k).indices
    large = plan_topk(ids.to(device), experts)
    for dtype in (torch.bfloat16, torch.float16):
        for name, plan in routings.items():
            yield _Case(name, plan, widths, dtype)
            yield _Case(name, plan, sizes.ragged, dtype, "swiglu_oai", "interleaved", bias=True)
        yield _Case("large", large, larger, dtype)
        yield _Case("large", large, larger, dtype, bias=True, transposed=True)
    for activation in sorted(ACTIVATIONS):
        yield _Case("ragged tiles", routings["ragged tiles"], widths, torch.bfloat16, activation)
