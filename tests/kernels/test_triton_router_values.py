"""Checks of the fused top-K selection, on a GPU and in Triton's interpreter.

T tokens · E experts · K experts per token
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_checks import DEVICE, INTERPRETED, normal

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.kernels.router.triton import RouterSpec, select_grad
from tilemoe.ops import router as router_ops
from tilemoe.routing.topk import _select, _select_fused

MANY = 1 if INTERPRETED else 50  # times as many tokens where they are cheap
INF = float("inf")

pytestmark = [
    pytest.mark.process("interpreter"),
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of padding that is computed and not used
]

LOSSES = {"aux_loss_coef": 0.01, "z_loss_coef": 0.001}
ROUTERS = {
    "softmax": RouterConfig(),
    "softmax, losses": RouterConfig(**LOSSES),
    "softmax as it is": RouterConfig(normalize=False, scale=2.5, aux_loss_coef=0.01),
    "softmax, bias": RouterConfig(selection_bias=True, z_loss_coef=0.001),
    "late softmax": RouterConfig(softmax_after_topk=True),
    "late softmax, losses": RouterConfig(softmax_after_topk=True, scale=0.5, selection_bias=True, **LOSSES),
    "sigmoid": RouterConfig(score="sigmoid", normalize=False),
    "sigmoid, losses": RouterConfig(score="sigmoid", scale=2.5, selection_bias=True, **LOSSES),
}


def config(num_experts: int, k: int, router: RouterConfig) -> MoEConfig:
    return MoEConfig(8, 8, num_experts, k, router=router)


def hostile(tokens: int, experts: int) -> Tensor:
    """Logits with ties, masked experts, -0 beside 0, and rows whose scores underflow."""
    logits = normal(tokens, experts)
    logits[::3] = (logits[::3] * 2).round() / 2
    logits[1::4, ::3] = -INF
    logits[2::5] *= 300.0
    logits[3::7, 1::2] = -0.0
    logits[4::9] = 0.0
    logits[:, 0] = logits[:, 0].clamp(min=-4.0)  # never all masked
    return logits


def assert_same(logits: Tensor, cfg: MoEConfig, token_mask: Tensor | None = None) -> None:
    """Ids to the last bit, scores and sums closely, gradients by autograd through the same in fp64."""
    bias = 0.3 * normal(cfg.num_experts, seed=9) if cfg.router.selection_bias else None
    logits = logits.clone().requires_grad_()
    fused, plain = (each(logits, cfg, bias, token_mask) for each in (_select_fused, _select))
    assert fused.expert_ids.dtype == torch.int32
    assert torch.equal(fused.expert_ids, plain.expert_ids.int())
    for name in ("scores", "probability_sums", "z_sum"):
        got, want = getattr(fused, name), getattr(plain, name)
        assert (got is None) == (want is None), name
        if got is not None:
            torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
    exact = logits.detach().double().requires_grad_()
    grads = [
        torch.autograd.grad(objective(chosen, cfg.num_experts), leaf)[0]
        for chosen, leaf in ((fused, logits), (_select(exact, cfg, bias, token_mask), exact))
    ]
    assert torch.equal(grads[0] != grads[0], torch.zeros_like(logits, dtype=torch.bool)), "NaN"
    # Where two values tie in fp32 and not in fp64, another expert may be chosen, of the same score to fp32.
    same = (_select(exact, cfg, bias, token_mask).expert_ids == plain.expert_ids).all(dim=1)
    assert same.float().mean() > 0.7 if same.numel() else True
    torch.testing.assert_close(grads[0][same].double(), grads[1][same], rtol=2e-5, atol=2e-6)


def objective(chosen: Any, num_experts: int) -> Tensor:
    weight = normal(*chosen.scores.shape, seed=3).to(chosen.scores.dtype)
    total = (chosen.scores * weight).sum()
    if chosen.probability_sums is not None:
        total = total + (chosen.probability_sums * torch.linspace(-1, 1, num_experts, device=DEVICE)).sum()
    return total if chosen.z_sum is None else total + 0.01 * chosen.z_sum


@pytest.mark.parametrize("name", ROUTERS)
def test_every_mode_agrees_with_torch(name: str) -> None:
    tokens = 37 * MANY
    for experts, k in ((60, 6), (8, 8)):
        logits, mask = hostile(tokens, experts), torch.arange(tokens, device=DEVICE) % 3 != 0
        for token_mask in (None, mask):
            assert_same(logits, config(experts, k, ROUTERS[name]), token_mask)


@pytest.mark.parametrize(
    "name",
    [
        *("softmax, losses", "late softmax, losses", "sigmoid, losses"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("late softmax", "sigmoid")),
    ],
)
def test_sizes(name: str) -> None:
    for experts, k in ((1, 1), (2, 2), (3, 1), (128, 8), (512, 10), (700, 32), (4096, 3)):
        for tokens in (1, 5 * MANY):
            assert_same(hostile(tokens, experts), config(experts, k, ROUTERS[name]))


@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "k"),
    [(60, 6, 3, 8), (256, 8, 4, 8), (9, 3, 1, 3), (12, 6, 6, 12), (8, 4, 2, 1)],
)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_groups(experts: int, groups: int, top_groups: int, k: int, score: Any) -> None:
    tokens = 31 * MANY
    for bias in (False, True):
        router = RouterConfig(score=score, num_groups=groups, top_groups=top_groups, selection_bias=bias, scale=2.5)
        assert_same(hostile(tokens, experts), config(experts, k, router))


def test_nan_is_not_hidden_and_never_leaves_an_id_unwritten() -> None:
    logits = normal(6, 8)
    logits[1, 3] = float("nan")
    logits[2] = -float("nan")
    logits[3] = -INF
    logits[4, 5] = INF
    for router in ROUTERS.values():
        bias = torch.zeros(8, device=DEVICE) if router.selection_bias else None
        chosen = _select_fused(logits, config(8, 3, router), bias, None)
        ids = chosen.expert_ids.sort(dim=1).values
        assert bool(((ids >= 0) & (ids < 8)).all())
        assert bool((ids[:, 1:] != ids[:, :-1]).all()), "an expert is chosen once"
        assert bool(chosen.scores[1].isnan().any())
        assert bool(chosen.scores[[0, 5]].isfinite().all())


def test_padding_may_hold_anything_and_gets_no_gradient() -> None:
    logits = torch.full((5, 6), float("nan"), device=DEVICE, requires_grad=True)
    mask = torch.zeros(5, dtype=torch.bool, device=DEVICE)
    for router in ROUTERS.values():
        bias = torch.zeros(6, device=DEVICE) if router.selection_bias else None
        chosen = _select_fused(logits, config(6, 2, router), bias, mask)
        assert bool((chosen.expert_ids == 6).all())
        for value in (chosen.scores, chosen.probability_sums, chosen.z_sum):
            assert value is None or not value.any()
        (grad,) = torch.autograd.grad(objective(chosen, 6), logits)
        assert not grad.any()


def test_no_tokens() -> None:
    logits = torch.zeros(0, 6, device=DEVICE, requires_grad=True)
    chosen = _select_fused(logits, config(6, 2, RouterConfig(**LOSSES)), None, None)
    assert chosen.expert_ids.shape == chosen.scores.shape == (0, 2)
    assert chosen.probability_sums is not None
    assert chosen.z_sum is not None
    (grad,) = torch.autograd.grad(chosen.scores.sum() + chosen.probability_sums.sum() + chosen.z_sum, logits)
    assert grad.shape == (0, 6)


def test_strided_operands_and_each_gradient_alone() -> None:
    cfg = config(12, 3, RouterConfig(score="sigmoid", selection_bias=True, **LOSSES))
    wide, bias = normal(12, 20).t().requires_grad_(), normal(12, 5)[:, 2]
    mask = (torch.arange(60, device=DEVICE).view(20, 3) % 4 != 0)[:, 1]
    for name in ("scores", "probability_sums", "z_sum"):
        weight = normal(20, 3) if name == "scores" else normal(12) if name == "probability_sums" else torch.ones(())
        got, want = (
            torch.autograd.grad((getattr(each(wide, cfg, bias, mask), name) * weight).sum(), wide)[0]
            for each in (_select_fused, _select)
        )
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


def test_the_gradient_of_a_gradient_is_refused() -> None:
    logits = normal(4, 6).requires_grad_()
    scores = _select_fused(logits, config(6, 2, RouterConfig()), None, None).scores
    (grad,) = torch.autograd.grad(scores.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


def test_opcheck() -> None:
    cfg = config(12, 3, RouterConfig(selection_bias=True, **LOSSES))
    spec = router_ops.spec_args(cfg)
    logits, bias, mask = normal(9, 12).requires_grad_(), normal(12), torch.arange(9, device=DEVICE) % 4 != 0
    torch.library.opcheck(router_ops.select.registered, (logits, bias, mask, *spec))
    plain = router_ops.spec_args(config(12, 3, RouterConfig()))
    torch.library.opcheck(router_ops.select.registered, (logits, None, None, *plain))
    ids = torch.arange(3, dtype=torch.int32, device=DEVICE).repeat(9, 1)
    grads = (normal(9, 3), normal(12), normal(1)[0])
    torch.library.opcheck(router_ops.select_grad.registered, (logits.detach(), ids, mask, *grads, *spec))
    torch.library.opcheck(router_ops.select_grad.registered, (logits.detach(), ids, None, None, None, grads[2], *spec))
    late = router_ops.spec_args(config(12, 3, RouterConfig(softmax_after_topk=True)))
    torch.library.opcheck(router_ops.select_grad.registered, (logits.detach(), ids, mask, grads[0], None, None, *late))


def test_what_was_not_chosen_has_no_part_in_the_gradient_but_by_sums_over_all() -> None:
    logits = torch.tensor([[0.0, 2.0, float("nan"), 3.0]], device=DEVICE)
    ids = torch.tensor([[3, 1]], dtype=torch.int32, device=DEVICE)  # `select` would have taken the NaN
    d_scores = torch.tensor([[1.0, 0.5]], device=DEVICE)
    for mode, of_all in (("late softmax", False), ("sigmoid", False), ("softmax", True)):
        spec = RouterSpec(2, mode, True, 1.0, 1, 1, False, False)
        grad = select_grad(logits, ids, None, d_scores, None, None, spec)
        assert grad.isnan().tolist() == [[of_all] * 4]
        assert of_all or (grad[0, [0, 2]].tolist() == [0.0, 0.0] and bool(grad[0, [1, 3]].abs().min() > 1e-3))
