"""What is wrong with the arguments on a GPU is one clear error before a launch, and the process lives on."""

import pytest
import torch

from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.testing import assert_equal, forward_and_grads, make_inputs

pytestmark = pytest.mark.gpu

IDS = torch.tensor([[0, 1], [2, 1], [0, 2]])


def test_tensors_on_different_devices_are_named() -> None:
    plan = plan_topk(IDS.cuda(), 3)
    good = make_inputs(plan, 16, 8, dtype=torch.bfloat16, bias=True)
    for name in good:
        with pytest.raises(ValueError, match=r"is on \S+ but x is on \S+; move them to one device") as caught:
            moe(plan=plan, **{**good, name: good[name].cpu()})
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="plan is on cpu"):
        moe(plan=plan_topk(IDS, 3), **good)


def test_ids_out_of_range_are_reported_when_asked() -> None:
    for plan in (
        plan_topk(torch.where(IDS == 2, -3, IDS).cuda(), 3),
        plan_pairs(torch.tensor([0, 5]).cuda(), torch.tensor([1, 1]).cuda(), 4, 3),
        plan_pairs(torch.tensor([0, -1]).cuda(), torch.tensor([1, 1]).cuda(), 4, 3),
    ):
        given = make_inputs(plan, 16, 8, dtype=torch.bfloat16)
        out = forward_and_grads(moe, {name: tensor.nan_to_num(0.5) for name, tensor in given.items()}, plan)
        assert all(bool(tensor.isfinite().all()) for tensor in out.values()), "the bad pairs are skipped"
        with pytest.raises(ValueError, match="; found "):
            plan.check()
    plan_topk(IDS.cuda(), 3).check()


def test_what_no_kernel_computes_is_refused() -> None:
    plan = plan_topk(IDS.cuda(), 3)
    with pytest.raises(ValueError, match=r"no Triton kernel computes in torch.float64"):
        moe(plan=plan, kernels="triton", **make_inputs(plan, 16, 8, dtype=torch.float64))
    odd = make_inputs(plan, 12, 20, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiples of 8"):
        moe(plan=plan, kernels="triton", **odd)
    assert bool(moe(plan=plan, **odd).isfinite().all()), "another set takes over"


def test_too_little_memory_is_an_error_and_nothing_is_lost() -> None:
    plan = plan_topk(torch.arange(2 * 4096, device="cuda").view(4096, 2) % 4, 4)
    inputs = make_inputs(plan, 1024, 512, dtype=torch.bfloat16)
    expected = forward_and_grads(moe, inputs, plan)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            forward_and_grads(moe, inputs, plan)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_equal(forward_and_grads(moe, inputs, plan), expected)
