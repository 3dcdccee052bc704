"""The expert MLP and the shared expert, one expert after another.

T tokens · d hidden_size · n expert width · E experts · K experts per token · P pairs
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.plan import RoutingPlan
from tilemoe.reference import fp8
from tilemoe.reference.activations import activation as activate


def moe(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    plan: RoutingPlan,
    scores: Tensor,
    activation: str = "swiglu",
    gate_up: str = "concatenated",
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    recompute: str | None = None,
    kernels: object = None,
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
    precision: str = "bf16",
    accumulate: bool = False,
    save: str = "full",
) -> Tensor:
    """``o_t = sum over t's experts e of score * (w2_e act(w1_e x_t + b1_e) + b2_e)``: (T, d) in x's dtype.

    Arguments as in ``tilemoe.moe``: x (T, d), w1 (E, 2n or n, d), w2 (E, d, n), b1 (E, 2n or n), b2 (E, d), scores
    (T, K) or (P,). Computed in fp32, or fp64 if x is fp64; autocast has no effect. ``recompute``, ``kernels`` and
    ``accumulate`` are accepted so that the two calls are interchangeable, but change nothing. `tilemoe.reference.fp8`
    defines ``precision="fp8"`` and ``save="fp8"``. Arguments are not checked: where `tilemoe.moe` raises ValueError,
    this function may raise another error or none.

    Examples:
        >>> plan = tilemoe.plan_topk(torch.tensor([[0], [1]]), num_experts=2)
        >>> x, w1, w2 = torch.tensor([[2.0], [3.0]]), torch.ones(2, 1, 1), torch.tensor([[[10.0]], [[100.0]]])
        >>> tilemoe.reference.moe(x, w1, w2, plan, torch.ones(2, 1), activation="relu").tolist()
        [[20.0], [300.0]]
    """
    up_proj, down_proj = (fp8.up_proj, fp8.down_proj) if precision == "fp8" else (_up_proj, _down_proj)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    act = (activation, gate_up, activation_limit, activation_alpha)
    score_of_pair = scores.reshape(-1)
    out = x.new_zeros(x.shape, dtype=torch.promote_types(dtype, scores.dtype))
    row_start = plan.row_start_of_expert.tolist()
    with torch.autocast(x.device.type, enabled=False):
        for expert in range(plan.num_experts):
            rows = slice(row_start[expert], row_start[expert + 1])
            token = plan.token_of_row[rows].long()
            h = up_proj(x[token].to(dtype), w1[expert].to(dtype))
            if b1 is not None:
                h = h + b1[expert]
            a = activate(h, *act)
            score = score_of_pair[plan.pair_of_row[rows].long()][:, None]
            y = down_proj(a, w2[expert].to(dtype), score)
            if save == "fp8":
                y = fp8.with_gradients_of(y, down_proj(activate(fp8.kept(h), *act), w2[expert].to(dtype), score))
            if b2 is not None:
                y = y + score * b2[expert]
            out = out.index_add(0, token, y.to(out.dtype))
    return out.to(x.dtype)


def _up_proj(x: Tensor, w1: Tensor) -> Tensor:
    return x @ w1.T


def _down_proj(a: Tensor, w2: Tensor, score: Tensor) -> Tensor:
    return score * (a @ w2.T)


def shared_expert(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: str = "swiglu",
    gate_up: str = "concatenated",
    gate_weight: Tensor | None = None,
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
) -> Tensor:
    """``w2 act(w1 x_t)`` for every token, times ``sigmoid(gate_weight x_t)`` if given: (T, d) in x's dtype.

    x (T, d) · w1 (2n or n, d) · w2 (d, n) · gate_weight (1, d). Computed as in `moe`, in fp32 or fp64.

    Raises:
        ValueError: as `activation` does. Nothing else is checked.

    Examples:
        >>> x, w1, w2 = torch.tensor([[2.0]]), torch.ones(1, 1), torch.tensor([[10.0]])
        >>> tilemoe.reference.shared_expert(x, w1, w2, activation="relu").tolist()
        [[20.0]]
        >>> tilemoe.reference.shared_expert(x, w1, w2, activation="relu", gate_weight=torch.zeros(1, 1)).tolist()
        [[10.0]]
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        h = x.to(dtype) @ w1.to(dtype).T
        y = activate(h, activation, gate_up, activation_limit, activation_alpha) @ w2.to(dtype).T
        if gate_weight is not None:
            y = y / (1 + torch.exp(-(x.to(dtype) @ gate_weight.to(dtype).T)))
    return y.to(x.dtype)
