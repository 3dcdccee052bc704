"""Inputs for the expert MLP, scaled as in training; functions that run it; and poisoned memory.

T tokens · d hidden_size · n intermediate_size · E experts · P pairs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tilemoe.checks import require_choice
from tilemoe.config import ACTIVATIONS, GATED_ACTIVATIONS
from tilemoe.plan import RoutingPlan
from tilemoe.reference import activation as activate
from tilemoe.runtime.deterministic import deterministic_algorithms
from tilemoe.testing.routings import used_pairs

MoE = Callable[..., Tensor]


def make_inputs(
    plan: RoutingPlan,
    hidden_size: int,
    intermediate_size: int,
    activation: str = "swiglu",
    *,
    dtype: torch.dtype = torch.float32,
    score_dtype: torch.dtype | None = None,
    bias: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """x (T, d), w1, w2, scores and, with ``bias``, b1, b2, on the plan's device: x, h and y are all O(1).

    Scores (T, K) or (P,) have both signs; ``score_dtype`` None: fp32, or fp64 if dtype is fp64. Values that must not be
    read are NaN: the score of a skipped pair, and x of a token without a row.

    Raises:
        ValueError: there is no such activation.

    Examples:
        >>> from tilemoe.testing import make_inputs
        >>> plan = tilemoe.plan_topk(torch.tensor([[0, 1], [2, 0]]), num_experts=3)
        >>> {name: tuple(t.shape) for name, t in make_inputs(plan, 16, 8, dtype=torch.bfloat16).items()}
        {'x': (2, 16), 'w1': (3, 16, 16), 'w2': (3, 16, 8), 'scores': (2, 2)}
    """
    require_choice("activation", activation, ACTIVATIONS)
    d, n, experts = hidden_size, intermediate_size, plan.num_experts
    width = n * (2 if activation in GATED_ACTIVATIONS else 1)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        value = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return value.to(device=plan.device, dtype=dtype)

    used = used_pairs(plan)
    routed = torch.zeros(plan.num_tokens, dtype=torch.bool, device=plan.device)
    num_rows = int(plan.row_start_of_expert[-1])
    routed[plan.token_of_row[:num_rows].long()] = True
    inputs = {
        "x": normal(plan.num_tokens, d).masked_fill(~routed[:, None], float("nan")),
        "w1": normal(experts, width, d, scale=d**-0.5),
        "w2": normal(experts, d, n, scale=2 * n**-0.5),
    }
    magnitude = 0.25 + torch.rand(plan.num_pairs, generator=generator, dtype=torch.float64)
    sign = torch.where(torch.rand(plan.num_pairs, generator=generator) < 0.2, -1.0, 1.0)
    score_dtype = score_dtype or torch.promote_types(dtype, torch.float32)
    scores = (magnitude * sign).to(device=plan.device, dtype=score_dtype).masked_fill(~used, float("nan"))
    if plan.pair_start_of_token is None:
        scores = scores.view(plan.num_tokens, plan.num_pairs // max(plan.num_tokens, 1))
    inputs["scores"] = scores
    if bias:
        inputs |= {"b1": normal(experts, width, scale=0.5), "b2": normal(experts, d, scale=0.5)}
    return inputs


def forward_and_grads(moe: MoE, inputs: Mapping[str, Tensor], plan: RoutingPlan, **options: Any) -> dict[str, Tensor]:
    """Run ``moe`` once and differentiate it in all its inputs: ``o`` (T, d) and the gradients, named dx, dw1, ...

    o's gradient is drawn from normal(0, 1), the same for every dtype up to rounding. The inputs keep their strides.
    ValueError: arguments of ``moe`` are wrong.

    Examples:
        >>> from tilemoe.testing import forward_and_grads, make_inputs
        >>> plan = tilemoe.plan_topk(torch.tensor([[0, 1], [2, 0]]), num_experts=3)
        >>> found = forward_and_grads(tilemoe.moe, make_inputs(plan, 16, 8), plan)
        >>> found["dw1"].shape
        torch.Size([3, 16, 16])
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    o = moe(plan=plan, **leaves, **options)
    grads = torch.autograd.grad(o, list(leaves.values()), output_grad(o))
    return {"o": o.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def output_grad(o: Tensor) -> Tensor:
    """The gradient of o (T, d), drawn from normal(0, 1): the same for every dtype up to rounding."""
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return do.to(device=o.device, dtype=o.dtype)


def plain_moe(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    plan: RoutingPlan,
    scores: Tensor,
    activation: str = "swiglu",
    gate_up: str = "concatenated",
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
) -> Tensor:
    """The layer as ordinary PyTorch computes it: every matrix product's result is stored in the inputs' dtype.

    x (T, d), weights, scores and biases are those of `tilemoe.moe`, in any float dtype. A backend's error is compared
    with this function's. The activation and the sum over experts are computed in fp32.

    Raises:
        ValueError: there is no such activation or ``gate_up``.

    Examples:
        >>> from tilemoe.testing import make_inputs, plain_moe
        >>> plan = tilemoe.plan_topk(torch.tensor([[0, 1], [2, 0]]), num_experts=3)
        >>> plain_moe(**make_inputs(plan, 16, 8, dtype=torch.bfloat16), plan=plan).dtype
        torch.bfloat16
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    starts = plan.row_start_of_expert.tolist()
    for expert in range(plan.num_experts):
        rows = slice(starts[expert], starts[expert + 1])
        token = plan.token_of_row[rows].long()
        h = x[token] @ w1[expert].T
        h = h if b1 is None else h + b1[expert]
        a = activate(h.to(wide), activation, gate_up, activation_limit, activation_alpha).to(x.dtype)
        y = a @ w2[expert].T
        y = y if b2 is None else y + b2[expert]
        score = scores.reshape(-1)[plan.pair_of_row[rows].long()].to(wide)
        out = out.index_add(0, token, score[:, None] * y.to(wide))
    return out.to(x.dtype)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what ``torch.empty`` and its relatives return with NaN, and with the largest value for integers.

    If a kernel reads a row that was never written, the results show it. PyTorch fills memory in its deterministic mode,
    which is on inside the block, with operators that have no deterministic form allowed. Nothing is checked, so no
    ValueError is raised.

    Examples:
        >>> from tilemoe.testing import poisoned_memory
        >>> with poisoned_memory():
        ...     torch.empty(2), torch.empty(1, dtype=torch.int32)
        (tensor([nan, nan]), tensor([2147483647], dtype=torch.int32))
    """
    with deterministic_algorithms(warn_only=True, fill_memory=True):
        yield
