"""Memory on a GPU as the allocator counts it, against the model's.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · R_max row capacity
"""

import pytest
import torch
from torch import Tensor

from tilemoe.kernels.experts.memory import (
    backward_peak_bytes,
    backward_slices,
    forward_peak_bytes,
    forward_slices,
    inference_peak_bytes,
    saved_bytes,
)
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.shape import MoEShape
from tilemoe.testing import assert_equal

pytestmark = pytest.mark.gpu

# What the model leaves out: lists of tiles, the parts of ds that column tiles add up, and the allocator's rounding.
TOLERANCE = 0.02
SHAPES = {
    "whole below the backward's peak": (MoEShape(24576, 1536, 256, 128, 8), 1, 1),
    "whole, as slices would read too much": (MoEShape(40960, 768, 256, 128, 8), 1, 1),
    "slices in both": (MoEShape(16384, 2048, 128, 64, 16), 2, 2),
    "few tokens": (MoEShape(512, 2048, 512, 64, 8), 1, 1),
    "h in fp8": (MoEShape(16384, 2048, 1024, 64, 8, save="fp8"), 1, 1),
    "h in fp8, slices": (MoEShape(16384, 2048, 128, 64, 16, save="fp8"), 2, 2),
}


def inputs_for(shape: MoEShape) -> tuple[RoutingPlan, dict[str, Tensor]]:
    torch.manual_seed(0)
    tokens, d, n, experts = shape.num_tokens, shape.hidden_size, shape.intermediate_size, shape.num_experts

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_()

    scores, ids = torch.rand(tokens, experts, device="cuda").topk(shape.num_experts_per_tok)
    leaves = {
        "x": normal(tokens, d),
        "w1": normal(experts, 2 * n, d, scale=d**-0.5),
        "w2": normal(experts, d, n, scale=n**-0.5),
        "scores": scores.requires_grad_(),
    }
    return plan_topk(ids, experts), leaves


def used_since(start: int) -> tuple[int, int]:
    """(bytes allocated, the most that were) beyond ``start``."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - start, torch.cuda.max_memory_allocated() - start


def assert_near(measured: int, model: int, what: str) -> None:
    assert model <= measured <= model * (1 + TOLERANCE), f"{what}: {measured} bytes, the model says {model}"


@pytest.mark.parametrize(("shape", "in_forward", "in_backward"), SHAPES.values(), ids=SHAPES)
def test_peaks_are_those_of_the_model(shape: MoEShape, in_forward: int, in_backward: int) -> None:
    assert (len(forward_slices(shape)), len(backward_slices(shape))) == (in_forward, in_backward)
    plan, leaves = inputs_for(shape)
    do = torch.randn_like(leaves["x"])
    # Autograd's own thread may hold the gradients for a while after it has handed them over.
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(moe(plan=plan, save=shape.save, **leaves), list(leaves.values()), do)  # compiles
        for _ in range(3):  # by itself, recorded, and repeated from a recording
            assert_peaks(shape, plan, leaves, do)


def assert_peaks(shape: MoEShape, plan: RoutingPlan, leaves: dict[str, Tensor], do: Tensor) -> None:
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        moe(plan=plan, save=shape.save, **leaves)
    assert_near(used_since(start)[1], inference_peak_bytes(shape), "inference")
    torch.cuda.reset_peak_memory_stats()
    o = moe(plan=plan, save=shape.save, **leaves)
    kept, peak = used_since(start)
    assert_near(peak, forward_peak_bytes(shape), "forward")
    alive_anyway = 16 * shape.num_rows + 4 * (shape.num_experts + 1)  # the plan and the scores
    assert_near(kept - o.nbytes, saved_bytes(shape) - alive_anyway, "kept for the backward")
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(o, list(leaves.values()), do)
    kept, peak = used_since(start)
    assert_near(peak - o.nbytes, backward_peak_bytes(shape), "backward")
    assert_near(kept - o.nbytes, sum(grad.nbytes for grad in grads), "h is gone")


def test_sliced_and_whole_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["slices in both"][0]
    plan, leaves = inputs_for(shape)
    do = torch.randn_like(leaves["x"])

    def run() -> list[Tensor]:
        o = moe(plan=plan, **leaves)
        return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), do)]

    sliced = run()
    whole = [slice(0, shape.hidden_size)]
    monkeypatch.setattr("tilemoe.runtime.operator.is_replayable", lambda first: False)  # it would remember the slices
    for name in ("forward_slices", "backward_slices"):
        monkeypatch.setattr(f"tilemoe.ops.experts.{name}", lambda shape: whole)
    assert_equal(sliced, run())
