"""The cost model against the real operator, against figures worked out by hand, and against the paper's formula.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · R routed rows
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import saved_tensors, watch_kernels
from ledger import Ledger

from tilemoe.kernels.experts import slicing as slices_module
from tilemoe.kernels.experts.memory import (
    backward_peak_bytes,
    backward_slices,
    forward_peak_bytes,
    forward_slices,
    inference_peak_bytes,
    inference_slices,
    saved_bytes,
)
from tilemoe.ops.moe import moe
from tilemoe.perf.costs import BACKWARD, FORWARD, Cost, kernel_costs, router_costs
from tilemoe.perf.hardware import GPUS, Ceilings, find_gpu
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.shape import MoEShape
from tilemoe.testing import make_inputs

KERNELS = (*FORWARD, "up_proj_act_inference", "down_proj_inference", *BACKWARD, "quantize_h", "dequantize_h")
SMALL = MoEShape(24, 64, 8, 6, 3)
WIDE_EXPERTS = MoEShape(24, 16, 64, 2, 2)
UNGATED_FP32 = MoEShape(40, 48, 24, 5, 2, is_gated=False, element_bytes=4)
KEPT_IN_FP8 = {
    "h in fp8": MoEShape(24, 16, 64, 6, 3, save="fp8"),
    "h in fp8, fp32": MoEShape(40, 48, 256, 5, 2, is_gated=False, element_bytes=4, save="fp8"),
    "h in fp8, wide outputs": MoEShape(3000, 1024, 128, 4, 4, is_gated=False, save="fp8"),
    "h in fp8, pairs": MoEShape(24, 64, 192, 6, 3, rows=70, is_topk=False, save="fp8"),
}


def plan_for(shape: MoEShape) -> RoutingPlan:
    generator = torch.Generator().manual_seed(0)
    if shape.is_topk:
        scores = torch.rand(shape.num_tokens, shape.num_experts, generator=generator)
        return plan_topk(scores.topk(shape.num_experts_per_tok).indices, shape.num_experts)
    token = torch.randint(0, shape.num_tokens, (shape.num_rows,), generator=generator)
    expert = torch.randint(0, shape.num_experts, (shape.num_rows,), generator=generator)
    return plan_pairs(token, expert, shape.num_tokens, shape.num_experts)


def inputs_for(shape: MoEShape, plan: RoutingPlan) -> dict[str, Any]:
    dtype = {2: torch.bfloat16, 4: torch.float32}[shape.element_bytes]
    activation = "swiglu" if shape.is_gated else "relu2"
    tensors = make_inputs(plan, shape.hidden_size, shape.intermediate_size, activation, dtype=dtype)
    leaves: dict[str, Any] = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    return {**leaves, "plan": plan, "activation": activation, "save": shape.save}


@pytest.mark.parametrize(
    "shape", [SMALL, UNGATED_FP32, MoEShape(24, 64, 8, 6, 3, rows=70, is_topk=False), *KEPT_IN_FP8.values()]
)
def test_saved_bytes_are_those_of_the_operator(shape: MoEShape) -> None:
    inputs = inputs_for(shape, plan_for(shape))
    with saved_tensors() as saved:
        moe(**inputs)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    alive_anyway = sum(kept[inputs[name].untyped_storage().data_ptr()] for name in ("x", "w1", "w2"))
    assert sum(kept.values()) - alive_anyway == saved_bytes(shape)


@pytest.fixture
def slices_of_little_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Buffers are made in slices however few tiles these have, so that small tensors do for a test."""
    decisions = (forward_slices, inference_slices, backward_slices)
    monkeypatch.setattr(slices_module, "_MIN_TILES", 1)
    for decide in decisions:
        decide.cache_clear()
    yield
    monkeypatch.undo()
    for decide in decisions:
        decide.cache_clear()


PEAKS = {
    "small": (SMALL, 1, 1),
    "wide experts": (WIDE_EXPERTS, 1, 1),
    "ungated": (UNGATED_FP32, 1, 1),
    "two slices": (MoEShape(300, 528, 16, 4, 4), 2, 2),
    "three slices": (MoEShape(3000, 768, 32, 2, 1), 3, 2),
    "whole below the backward's peak": (MoEShape(300, 768, 512, 2, 2), 1, 1),
    "whole, as slices would read too much": (MoEShape(300, 768, 256, 4, 4), 1, 1),
    "ungated slices": (MoEShape(300, 1024, 96, 4, 4, is_gated=False, element_bytes=4), 2, 2),
    "slices of pairs": (MoEShape(300, 512, 16, 4, 4, rows=1000, is_topk=False), 2, 2),
    "d is no multiple of 16": (MoEShape(300, 520, 16, 4, 4), 1, 1),
    "h in fp8": (KEPT_IN_FP8["h in fp8"], 1, 1),
    "h in fp8, fp32": (KEPT_IN_FP8["h in fp8, fp32"], 1, 1),
    "h in fp8, slices": (KEPT_IN_FP8["h in fp8, wide outputs"], 2, 2),
    "h in fp8, pairs": (KEPT_IN_FP8["h in fp8, pairs"], 1, 1),
}


@pytest.mark.usefixtures("slices_of_little_work")
@pytest.mark.parametrize(("shape", "in_forward", "in_backward"), PEAKS.values(), ids=PEAKS)
def test_peaks_are_those_of_the_operator(
    shape: MoEShape, in_forward: int, in_backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger()
    watch_kernels(monkeypatch, KERNELS, ledger.run)
    inputs = {**inputs_for(shape, plan_for(shape)), "kernels": "torch"}  # this instance, whichever was chosen before
    with torch.no_grad():
        moe(**inputs)
    assert ledger.most == inference_peak_bytes(shape)
    assert ledger.calls["combine"] == len(inference_slices(shape))
    ledger.start()
    o = moe(**inputs)
    assert ledger.most == forward_peak_bytes(shape)
    assert ledger.calls["down_proj"] == ledger.calls["combine"] == len(forward_slices(shape)) == in_forward
    do = torch.ones_like(o)
    ledger.most = 0
    grads = torch.autograd.grad(o, [inputs[name] for name in ("x", "w1", "w2", "scores")], do)
    # The output is the caller's: it stays alive in this test, and is no part of the backward.
    assert ledger.most - o.nbytes == backward_peak_bytes(shape)
    assert ledger.calls["up_proj_dgrad"] == ledger.calls["combine_grad"] == in_backward
    assert len(grads) == 4


def test_costs_by_hand() -> None:
    costs = kernel_costs(MoEShape(2, 4, 3, 5, 2))
    assert (*costs,) == FORWARD + BACKWARD
    rows, x, w1, w2, h, a, y = 4, 16, 240, 120, 48, 24, 32
    assert costs["up_proj_act"] == Cost(2 * rows * 4 * 6, x + w1 + 16, h + a)
    assert costs["down_proj"] == Cost(2 * rows * 4 * 3, a + w2, y)
    assert costs["combine"] == Cost(0, y + 32, x)
    assert costs["down_proj_dgrad_dact"] == Cost(2 * rows * 4 * 3, x + w2 + h + 48, h + a + 16)
    assert costs["down_proj_wgrad"] == Cost(2 * rows * 4 * 3, x + a + 16, w2)
    assert costs["up_proj_dgrad"] == Cost(2 * rows * 4 * 6, h + w1, y)
    assert costs["up_proj_wgrad"] == Cost(2 * rows * 4 * 6, x + h + 16, w1)
    assert costs["combine_grad"] == Cost(0, y + 16, x)
    assert sum(cost.flops for cost in costs.values()) == 18 * rows * 4 * 3
    assert router_costs(MoEShape(2, 4, 3, 5, 2)) == (Cost(80, 16 + 40, 40), Cost(160, 80 + 56, 56))


@pytest.mark.parametrize(
    ("flops", "bound"),
    [(89, "memory"), (90, "balanced"), (100, "balanced"), (110, "balanced"), (111, "arithmetic"), (0, "memory")],
)
def test_a_kernel_within_a_tenth_of_the_ridge_is_balanced(flops: int, bound: str) -> None:
    assert Cost(flops, 1, 0).bound(Ceilings(200, 2, is_measured=False)) == bound


def test_gpus() -> None:
    assert find_gpu("NVIDIA H200").name == "H200"
    assert {find_gpu(name).name for name in ("NVIDIA GeForce RTX 4090", "rtx-4090", "rtx4090")} == {"RTX 4090"}
    assert list(GPUS) == ["A100", "H100", "H200", "B200", "B300", "RTX 4090", "RTX 5090", "MI300X"]
    for unknown in ("Voodoo 2", "NVIDIA RTX A1000"):
        with pytest.raises(ValueError, match=f"no figures for GPU '{unknown}'; known are A100, H100"):
            find_gpu(unknown)
    assert GPUS["H200"].ceilings() == Ceilings(778, 4.295, is_measured=True)
    assert GPUS["H200"].ceilings("fp32") == Ceilings(66.9, 4.8, is_measured=False)
    assert GPUS["A100"].ceilings("tf32") == Ceilings(156, 2.039, is_measured=False)
    with pytest.raises(ValueError, match="dtype must be one of bf16"):
        GPUS["A100"].ceilings("int8")
    with pytest.raises(ValueError, match="dtype 'fp8': the A100 has no such matrix unit; choose bf16"):
        GPUS["A100"].ceilings("fp8")
    for gpu in GPUS.values():
        best = gpu.ceilings()
        assert best.tflops <= gpu.bf16_tflops
        assert best.tbps <= gpu.tbps
        assert gpu.fp32_tflops <= gpu.tf32_tflops < gpu.bf16_tflops
