"""What a layer compiles, and what it does not compile again; the driver is a fake.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from replay_cases import forget  # which installs the fake
from triton.runtime.jit import JITFunction

from tilemoe.kernels.choose import PlanBuilder
from tilemoe.kernels.plan import triton as triton_plan
from tilemoe.ops import plan as plan_ops
from tilemoe.ops import router
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk

pytestmark = pytest.mark.process("fake_driver")

BACKWARD = {"gemm_dgrad_dact_kernel", "score_grad_kernel", "gemm_wgrad_kernel"}
SELECTION = ("softmax", True, 1.0, 1, 1, False, False)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that have been compiled, in order; at the start of a test, none is."""
    found: list[str] = []
    compile_fake = JITFunction._do_compile

    def compile_one(kernel: Any, *args: Any) -> Any:
        found.append(kernel.fn.__name__)
        return compile_fake(kernel, *args)

    monkeypatch.setattr(JITFunction, "_do_compile", compile_one)
    builder = PlanBuilder(triton_plan.count_sort, triton_plan.count_sort)
    monkeypatch.setattr(plan_ops, "builder_for", lambda *args: builder)  # a GPU's, for these CPU tensors
    forget()
    yield found
    forget()


class Layer(NamedTuple):
    """Operands of a layer; a call of it launches what the layer does, from logits to the last gradient."""

    tokens: int
    d: int
    n: int
    experts: int
    k: int = 8
    frozen: tuple[str, ...] = ()

    def __call__(self, *, with_gradients: bool = True) -> None:
        shapes = {"w1": (self.experts, 2 * self.n, self.d), "w2": (self.experts, self.d, self.n)}
        leaves = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in shapes.items()}
        leaves |= {"x": torch.empty(self.tokens, self.d, dtype=torch.bfloat16)}
        logits = torch.zeros(self.tokens, self.experts)
        wanted = [leaf.requires_grad_() for name, leaf in leaves.items() if name not in self.frozen]
        with torch.set_grad_enabled(with_gradients):
            logits.requires_grad_(with_gradients)
            scores, ids, _, _ = router.select(logits, None, None, self.k, *SELECTION)
            ids = torch.arange(self.k, dtype=torch.int32).expand(self.tokens, -1).contiguous()  # the fake writes none
            o = moe(leaves["x"], leaves["w1"], leaves["w2"], plan_topk(ids, self.experts), scores, kernels="hopper")
            if with_gradients:
                torch.autograd.grad(o, [*wanted, logits], torch.empty_like(o))


SMALL = Layer(40, 128, 64, 4, 2)


def test_another_number_of_tokens_compiles_nothing(compiled: list[str]) -> None:
    SMALL()
    forward = {"up_proj_act_kernel", "gemm_stationary_kernel", "combine_kernel"}
    assert {*BACKWARD, *forward, "place_kernel"} <= set(compiled)
    assert {"select_kernel", "select_grad_kernel"} <= set(compiled)
    count = len(compiled)
    for tokens in (40, 41, 640):
        SMALL._replace(tokens=tokens)()
    assert len(compiled) == count


def test_what_a_second_shape_compiles(compiled: list[str]) -> None:
    Layer(256, 1536, 256, 128)()
    compiled.clear()
    Layer(256, 2048, 1024, 64)()
    gemms = [name for name in compiled if "gemm" in name or name == "up_proj_act_kernel"]
    assert sorted(name for name in compiled if name not in gemms) == ["select_grad_kernel", "select_kernel"]
    assert len(gemms) <= 6, "no kernel twice"


@pytest.mark.parametrize(
    ("frozen", "gemms"), [(("w1", "w2"), 0), (("w1",), 1), (("x",), 2)], ids=["adapters", "w2 alone", "first layer"]
)
def test_what_needs_no_gradient_is_not_compiled(frozen: tuple[str, ...], gemms: int, compiled: list[str]) -> None:
    SMALL._replace(frozen=frozen)()
    assert compiled.count("gemm_wgrad_kernel") == gemms
    assert compiled.count("gemm_stationary_kernel") == (1 if frozen == ("x",) else 2)
