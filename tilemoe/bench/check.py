"""The check before the timing: a contestant whose output or gradients are wrong is not timed.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token

The contestant runs on the size that is timed, because autotuning runs for each new size, and because a fault may show
only at that size. The reference is plain PyTorch in fp32, one expert at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tilemoe.bench.cases import MOST_EXPERTS
from tilemoe.bench.peers import Contestant, Weights
from tilemoe.shape import MoEShape


def problem(contestant: Contestant, shape: MoEShape, weights: Weights) -> str | None:
    """None if the output and all four gradients agree with the reference, else which one does not.

    While this runs, another router weight makes each logit an entry of x, and these entries differ by more than bf16's
    rounding: so all contestants choose the same experts, in whatever dtype they compute logits.
    """
    x, router = _inputs(shape, weights)
    do = torch.randn_like(x)
    kept = weights.router.detach().clone()
    with torch.no_grad():
        weights.router.copy_(router)
    try:
        poison(x.device)
        out = contestant.run(x)
        found = (out.detach(), *torch.autograd.grad(out, [x, *contestant.leaves], do))
        errors = _errors(contestant, found, shape, weights, x.detach(), do)
    finally:
        with torch.no_grad():
            weights.router.copy_(kept)
    return first_off(errors, contestant.tolerance)


def first_off(errors: Mapping[str, float], tolerance: float) -> str | None:
    """The name and size of the first error above ``tolerance``; None if there is none."""
    for what, error in errors.items():
        if not error <= tolerance:
            return f"{what} is off by {error:.2e} RMS-relative"
    return None


def _inputs(shape: MoEShape, weights: Weights) -> tuple[Tensor, Tensor]:
    """x (T, d) and a router weight (E, d) that makes the logits x's first E columns: per token a permutation."""
    experts, d = shape.num_experts, shape.hidden_size
    assert experts <= min(MOST_EXPERTS, d), "the logits must be different numbers in bf16"
    like = weights.w1
    x = torch.randn(shape.num_tokens, d, device=like.device, dtype=like.dtype)
    ranks = torch.rand(shape.num_tokens, experts, device=like.device).argsort(dim=1)
    x[:, :experts] = (ranks - experts // 2) / 64
    return x.requires_grad_(), torch.eye(experts, d, device=like.device, dtype=like.dtype)


def poison(device: torch.device) -> None:
    """Leave NaN in the memory that PyTorch allocates next, so that unwritten outputs show."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        torch.full((free // 4,), float("nan"), device=device, dtype=torch.bfloat16)


class Difference:
    """The relative error of tensors given in parts: norm of the error over norm of the reference."""

    def __init__(self) -> None:
        self.error = self.norm = torch.zeros(())

    def add(self, actual: Tensor, expected: Tensor) -> None:
        self.error = self.error.to(expected.device) + (actual.float() - expected).square().sum(dtype=torch.float64)
        self.norm = self.norm.to(expected.device) + expected.square().sum(dtype=torch.float64)

    def relative(self) -> float:
        if not self.error:  # both may be zeros, as the router's gradient is if K = 1
            return 0.0
        return float((self.error / self.norm).sqrt())


def relative(actual: Tensor, expected: Tensor) -> float:
    """The `Difference` of two whole tensors."""
    difference = Difference()
    difference.add(actual, expected.float())
    return difference.relative()


def _errors(
    contestant: Contestant, found: tuple[Tensor, ...], shape: MoEShape, weights: Weights, x: Tensor, do: Tensor
) -> dict[str, float]:
    """RMS-relative errors of output, dx, drouter, dw1 and dw2, by name. It holds one expert's gradients at a time."""
    x, do = x.float(), do.float()
    routed = x.clone().requires_grad_()
    router = weights.router.detach().float().requires_grad_()
    logits, ids = (routed @ router.t()).topk(shape.num_experts_per_tok, dim=-1)
    scores = logits.softmax(dim=-1)
    out, dx, dscores = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(scores)
    differences = {what: Difference() for what in ("output", "dx", "drouter", "dw1", "dw2")}
    for expert in range(shape.num_experts):
        token, place = (ids == expert).nonzero(as_tuple=True)
        one = slice(expert, expert + 1)
        parts = (x[token], weights.w1[expert].detach(), weights.w2[expert].detach(), scores.detach()[token, place])
        inputs = [tensor.float().requires_grad_() for tensor in parts]
        part = expert_rows(*inputs)
        dx_part, dw1, dw2, ds = torch.autograd.grad(part, inputs, do[token])
        out.index_add_(0, token, part.detach())
        dx.index_add_(0, token, dx_part)
        dscores[token, place] = ds
        differences["dw1"].add(contestant.w1_rows(*(grad[one] for grad in found[3:-1]))[0], dw1)
        differences["dw2"].add(found[-1][expert], dw2)
    dx_router, drouter = torch.autograd.grad(scores, [routed, router], dscores)
    differences["output"].add(found[0], out)
    differences["dx"].add(found[1], dx + dx_router)
    differences["drouter"].add(found[2], drouter)
    return {what: difference.relative() for what, difference in differences.items()}


def expert_rows(x: Tensor, w1: Tensor, w2: Tensor, s: Tensor) -> Tensor:
    """An expert's rows (R, d), times their scores s (R,)."""
    gate, up = (x @ w1.t()).chunk(2, dim=-1)
    return ((F.silu(gate) * up) @ w2.t()) * s.unsqueeze(1)
