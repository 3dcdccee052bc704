"""Plan building and combine in Triton without a GPU: compiled for four GPUs, and when which builder is chosen."""

from pathlib import Path

import pytest
import torch
from triton_compile import compile_launch, compile_launches, count_spill_loads

from tilemoe.kernels.choose import choose_inference_plan, choose_plan
from tilemoe.kernels.experts.triton.combine import combine_launch
from tilemoe.kernels.plan import triton_small as plan_small
from tilemoe.kernels.plan.torch import plan_topk as torch_plan_topk
from tilemoe.kernels.plan.triton import MAX_EXPERTS, MAX_PAIRS, plan_topk, plan_topk_launches, why_unsupported
from tilemoe.routing.build import plan_pairs
from tilemoe.routing.build import plan_topk as make_plan

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CAPABILITIES = (80, 90, 100, 120)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_combine_compiles_to_wide_loads(dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    ids = torch.arange(24).view(3, 8) % 5
    plan, rows = make_plan(ids, 5), torch.zeros(24, 1536, dtype=dtype)
    for s in (torch.zeros(24), None):
        compiled = compile_launch(combine_launch(rows.new_empty(3, 1536), rows, s, plan), capability)
        assert compiled.asm["ptx"].count("ld.global.v4.b32") >= 16, "two 16-byte loads for each row of the token"
        assert "st.global.v4.b32" in compiled.asm["ptx"]
        assert count_spill_loads(compiled, tmp_path) == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_combine_of_pairs_compiles(capability: int, tmp_path: Path) -> None:
    token, expert = torch.tensor([2, 0, 2]), torch.tensor([1, 1, 0])
    plan, rows = plan_pairs(token, expert, 3, 2), torch.zeros(3, 40, dtype=torch.float16)
    for s in (torch.zeros(3), torch.zeros(3, dtype=torch.float64), None):
        compiled = compile_launch(combine_launch(rows.new_empty(3, 40), rows, s, plan), capability)
        assert count_spill_loads(compiled, tmp_path) == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("experts", [128, MAX_EXPERTS])
def test_plan_kernels_compile(experts: int, capability: int, tmp_path: Path) -> None:
    launches, _ = plan_topk_launches(torch.zeros(600, 8, dtype=torch.int64), experts)
    for launch, compiled in compile_launches(launches, capability):
        assert count_spill_loads(compiled, tmp_path) == 0, f"{launch.kernel} spills"
        assert compiled.metadata.shared <= 48 * 1024


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("experts", [8, 128, plan_small.MAX_EXPERTS])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plan_of_few_pairs_compiles(dtype: torch.dtype, experts: int, capability: int, tmp_path: Path) -> None:
    ids = torch.zeros(64, 8, dtype=dtype)
    launch = plan_small.plan_topk_launch(ids, experts, plan_small.new_index(ids, experts))
    compiled = compile_launch(launch, capability)
    assert count_spill_loads(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= 48 * 1024


def test_what_the_plan_kernels_do_not_take() -> None:
    assert why_unsupported(1, MAX_EXPERTS) is None
    assert why_unsupported(0, 4) is not None
    assert why_unsupported(MAX_PAIRS + 1, 4) is not None
    assert why_unsupported(8, MAX_EXPERTS + 1) is not None


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="need a GPU"):
        plan_topk(torch.zeros(2, 2, dtype=torch.int64), 3)


def test_other_devices_and_sizes_go_to_torch_and_say_why() -> None:
    for case in ((CPU, 8, 4), (GPU, 0, 4), (GPU, 8, 5000)):
        choice = choose_plan(*case)
        assert choice.name == "torch"
        assert choice.impl.build is torch_plan_topk
        assert choice.reason
    assert choose_plan(GPU, 8, 4).impl.build is plan_topk


def test_few_pairs_of_inference_have_a_builder_of_their_own() -> None:
    assert choose_inference_plan(GPU, plan_small.MAX_PAIRS + 1, 4).impl.build is plan_topk
    assert choose_inference_plan(GPU, 8, plan_small.MAX_EXPERTS + 1).impl.build is plan_topk
    assert choose_inference_plan(GPU, 8, 4).impl.build is plan_small.plan_topk
    assert choose_inference_plan(CPU, 8, 4).impl.build is torch_plan_topk
