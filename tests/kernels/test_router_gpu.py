"""The router on a GPU beyond its kernels' values: logits, both uses of x, offsets beyond 32 bits.

T tokens · d hidden_size · E experts · K experts per token
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton_checks import normal

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.layers.router import Router
from tilemoe.plan import experts_of_rows
from tilemoe.routing.topk import Routing, route
from tilemoe.testing import assert_equal, relative_error

pytestmark = pytest.mark.gpu

CFG = MoEConfig(256, 64, 56, 6)
DTYPES = [torch.bfloat16, torch.float16]


def make(cfg: MoEConfig = CFG, dtype: torch.dtype = torch.bfloat16) -> Router:
    torch.manual_seed(0)
    router = Router(cfg, device="cuda", dtype=dtype)
    torch.nn.init.normal_(router.weight, 0.0, cfg.hidden_size**-0.5)
    if router.bias is not None:
        torch.nn.init.normal_(router.bias)
    return router


def inputs(tokens: int, cfg: MoEConfig = CFG, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return normal(tokens, cfg.hidden_size, seed=tokens).to(dtype).requires_grad_()


@pytest.mark.parametrize(("dtype", "of_weight"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("experts", [8, 128, 512])
def test_logits_have_the_quality_of_fp32(experts: int, dtype: torch.dtype, of_weight: torch.dtype) -> None:
    """bf16 tokens beside fp32 weights: as under autocast."""
    cfg = MoEConfig(1536, 64, experts, 4, router=RouterConfig(bias=True))
    router = make(cfg, of_weight)
    x = inputs(3000, cfg, dtype)
    logits = router(x).logits
    leaves = (x, router.weight, router.bias)
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.nn.functional.linear(*exact_leaves)
    assert logits.dtype == torch.float32
    # The matrix units add in fp32, but not with its rounding: 1.5e-6 was seen. In bf16 it would be 1.7e-3.
    assert relative_error(logits.detach(), exact.detach()) < 4e-6
    d_logits = normal(3000, experts)
    with torch.autocast("cuda", dtype):
        plain = torch.autograd.grad(torch.nn.functional.linear(*leaves).float(), leaves, d_logits)
    wanted = torch.autograd.grad(exact, exact_leaves, d_logits.double())
    found = torch.autograd.grad(logits, leaves, d_logits)
    assert [got.dtype for got in found] == [leaf.dtype for leaf in leaves]
    for got, other, want in zip(found, plain, wanted, strict=True):
        allowed = 2 * max(relative_error(other, want), torch.finfo(dtype).eps / 2)
        assert relative_error(got, want) <= allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_fp32_weights_stay_in_fp32_and_keep_no_copy_of_x(dtype: torch.dtype) -> None:
    router = make(dtype=torch.float32)
    x = inputs(500, dtype=dtype)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        logits = router(x).logits
    assert relative_error(logits.detach(), x.detach().double() @ router.weight.detach().double().t()) < 1e-6
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), router.weight.data_ptr()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_under_autocast_are_the_same_bits(dtype: torch.dtype) -> None:
    router = make(dtype=dtype)
    x = inputs(300, dtype=dtype)
    expected = router(x).logits
    d_logits = normal(300, 56)
    grads = torch.autograd.grad(expected, [x, router.weight], d_logits)
    for other in DTYPES:
        with torch.autocast("cuda", other):
            logits = router(x).logits
            again = torch.autograd.grad(logits, [x, router.weight], d_logits)
        assert torch.equal(logits, expected)
        assert_equal(again, grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("used", ["both", "logits", "handed on"])
def test_both_uses_of_x_reach_its_gradient(used: str, dtype: torch.dtype) -> None:
    router = make(dtype=dtype)
    x = inputs(301, dtype=dtype)
    logits, handed_on = router(x)
    outputs = {"logits": (logits, normal(301, 56)), "handed on": (handed_on, normal(301, 256, seed=2).to(dtype))}
    chosen = [pair for name, pair in outputs.items() if used in (name, "both")]
    tensors, grads = zip(*chosen, strict=True)
    (dx,) = torch.autograd.grad(tensors, [x], grads)
    want = torch.zeros(301, 256, dtype=torch.float64, device="cuda")
    if used != "handed on":
        want += outputs["logits"][1].to(dtype).double() @ router.weight.detach().double()
    if used != "logits":
        want += outputs["handed on"][1].double()
    assert relative_error(dx, want) < torch.finfo(dtype).eps / 2


def test_gradients_that_were_given_are_left_as_they_are() -> None:
    """A hook may have kept them."""
    router = make()
    x = inputs(301)
    logits, handed_on = router(x)
    kept: list[Tensor] = []
    handed_on.register_hook(kept.append)
    given = normal(301, 256, seed=2).bfloat16()
    torch.autograd.grad((logits, handed_on), [x], (normal(301, 56), given))
    assert torch.equal(kept[0], normal(301, 256, seed=2).bfloat16())


def test_of_an_input_without_gradient_the_experts_make_none() -> None:
    logits, handed_on = make()(inputs(301).detach())
    assert logits.requires_grad
    assert not handed_on.requires_grad


@pytest.mark.parametrize("late", [False, True])
def test_offsets_beyond_int32(late: bool) -> None:
    tokens, experts = 2**31 // 4096 + 300, 4096
    cfg = MoEConfig(8, 8, experts, 2, router=RouterConfig(softmax_after_topk=late))
    logits = torch.zeros(tokens, experts, device="cuda")
    best = torch.arange(tokens, device="cuda") % (experts - 7)
    logits.scatter_(1, best[:, None], 4.0)
    logits.scatter_(1, best[:, None] + 7, 2.0)
    logits.requires_grad_()
    scores, ids = routed(lambda: route(logits, cfg))
    assert torch.equal(ids, torch.stack([best, best + 7], dim=1))
    (grad,) = torch.autograd.grad(scores[:, 0].sum(), logits)
    at = grad.gather(1, ids)
    torch.testing.assert_close(at[:, 0], -at[:, 1])
    assert float(at.abs().min()) > 0.05
    # An expert that was not chosen gets what rounding leaves of zero: 1.8e-12 was seen.
    assert int((grad.abs() > 1e-8).count_nonzero()) == 2 * tokens


def routed(call: Callable[[], Routing]) -> tuple[Tensor, Tensor]:
    """(scores (T, K), ids (T, K)) of a routing."""
    routing = call()
    plan = routing.plan
    rows = torch.arange(plan.capacity, dtype=torch.int32, device=plan.device)
    expert_of_row = experts_of_rows(plan.row_start_of_expert, rows)
    return routing.scores, expert_of_row[plan.row_of_pair.long()].view(plan.num_tokens, -1)
