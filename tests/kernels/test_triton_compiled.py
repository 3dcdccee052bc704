"""The Triton kernels compiled for GPUs that are not here: matrix units, TMA, shared memory and spills as promised.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

import re
from pathlib import Path

import pytest
import torch
import triton
from triton_compile import (
    CAPABILITIES,
    MATRIX_UNIT,
    NVIDIA,
    bytes_of_copies,
    compile_launch,
    compiled_key,
    count_spill_loads,
    make_operands,
    row_gemm_launch,
)

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.formats.dense import empty_weight_grad
from tilemoe.kernels.experts.triton import bias_grad, host
from tilemoe.kernels.experts.triton.configs import WEIGHT_GRADS, Kernel, tile_rows
from tilemoe.kernels.experts.triton.tiles import tile_lists_launch
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.launch import Launch

GATHERED = {"up_proj_act", "down_proj_dgrad_dact", "up_proj_wgrad"}
# Beside a TMA load, Triton 3.6 takes this gather through registers where the matrix units are those of 2020.
GATHERED_BY_REGISTER = {("up_proj_wgrad", 120)}
# Spill loads by kernel and capability, all in the epilogue, once per tile of 128 x 256.
SPILLS = {("down_proj_dgrad_dact", 100): 48}
if not triton.__version__.startswith("3.6."):
    SPILLS |= {("up_proj_act", 90): 4, ("down_proj_dgrad_dact", 90): 16}
SPILLS_WITH_SUMS = {120: 3}  # of up_proj_wgrad that gives db1, too
D, N, E, T, K = 1536, 256, 2, 64, 2


def launches(capability: int, dtype: torch.dtype) -> dict[str, Launch]:
    """One launch of each kind of kernel for swiglu, its operands on the CPU."""
    device, of = NVIDIA[capability], make_operands(dtype=dtype)
    gemms = ("up_proj_act", "down_proj", "down_proj_dgrad_dact")
    _, dh, _, partial = host.dgrad_dact_launch(of.x, of.w2, of.h, of.s, of.plan, of.tiles, of.spec, device)
    products_launch, products = bias_grad.products_launch(of.x, torch.zeros(E, D, dtype=dtype), device)
    of.plan.derived[tile_rows(dtype.itemsize, device)] = of.tiles
    dense_scores, dense = bias_grad.dense_scores_launch(of.x, of.s, of.plan, device)
    tile_sums, sums = bias_grad.tile_sums_launch(dh, of.tiles, 128)
    return {
        **{name: row_gemm_launch(host, name, of, device) for name in gemms},
        "up_proj_wgrad": host.wgrad_launch("up_proj_wgrad", of.x, dh, of.w1.transpose(1, 2), of.plan, device),
        "score_grad": host.score_grad_launch(partial, products, of.s, of.plan, of.tiles, 128)[0],
        "bias_products": products_launch,
        "dense_scores": dense_scores,
        "scores_times_grad": bias_grad.scores_times_grad_launch(of.x, dense, of.plan, device)[0],
        "tile_sums": tile_sums,
        "expert_sums": bias_grad.expert_sums_launch(sums, of.plan, 128)[0],
        "tile_lists": tile_lists_launch(of.plan, 128, 192)[0],
    }


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ["up_proj_act", "down_proj", "down_proj_dgrad_dact", "up_proj_wgrad"])
def test_gemm(name: str, capability: int, tmp_path: Path) -> None:
    compiled = compile_launch(launches(capability, torch.bfloat16)[name], capability)
    ptx = compiled.asm["ptx"]
    assert MATRIX_UNIT[capability] in ptx
    assert ("cp.async.bulk.tensor" in ptx) == NVIDIA[capability].has_tma
    by_pointer = name in GATHERED or not NVIDIA[capability].has_tma
    if by_pointer and (name, capability) not in GATHERED_BY_REGISTER:
        assert "cp.async.cg.shared.global" in ptx, "the gather is not loaded asynchronously by 16 bytes"
    assert compiled.metadata.shared <= NVIDIA[capability].shared_bytes
    assert count_spill_loads(compiled, tmp_path) <= SPILLS.get((name, capability), 0)


@pytest.mark.parametrize("adds", [False, True], ids=["stored", "added"])
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("kernel", WEIGHT_GRADS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_weight_gradients_of_either_order_leave_by_wide_stores(
    capability: int, kernel: Kernel, column_major: bool, adds: bool, tmp_path: Path
) -> None:
    device, plan = NVIDIA[capability], plan_topk(torch.arange(T * K).view(T, K) % E, E)
    by_token, by_row = (torch.zeros(rows, width, dtype=torch.bfloat16) for rows, width in ((T, D), (T * K, N)))
    out = empty_weight_grad(by_row, (E, D, N), column_major)
    launch = host.wgrad_launch(kernel, by_token, by_row, out.float() if adds else out, plan, device, adds)
    assert launch.constants["TRANSPOSED"] == column_major
    compiled = compile_launch(launch, capability)
    ptx = compiled.asm["ptx"]
    if device.has_tma:
        assert re.search(rf"cp\.{'reduce.' if adds else ''}async\.bulk\.tensor\.3d\.global", ptx)
        assert "st.global" not in ptx
    else:
        assert set(re.findall(r"\bst\.global\S*", ptx)) == {"st.global.v4.b32"}
        assert not adds or len(re.findall(r"\bld\.global\.v4\.b32", ptx)) >= len(re.findall(r"\bst\.global", ptx))
    assert compiled.metadata.shared <= device.shared_bytes
    assert count_spill_loads(compiled, tmp_path) == 0


@pytest.mark.parametrize("adds", [False, True], ids=["stored", "added"])
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_bias_gradient_beside_a_weight_gradient(
    capability: int, column_major: bool, adds: bool, tmp_path: Path
) -> None:
    """The gather takes the ones as it takes x; without sums the kernel has neither."""
    device, plan = NVIDIA[capability], plan_topk(torch.arange(T * K).view(T, K) % E, E)
    x, dh = (torch.zeros(rows, width, dtype=torch.bfloat16) for rows, width in ((T, D), (T * K, N)))
    out, sums = empty_weight_grad(dh, (E, D, N), column_major), torch.zeros(E, N)
    out = out.float() if adds else out
    with_sums, alone = (
        compile_launch(host.wgrad_launch("up_proj_wgrad", x, dh, out, plan, device, adds, given), capability)
        for given in (sums, None)
    )
    ptx, ptx_alone = with_sums.asm["ptx"], alone.asm["ptx"]
    assert ptx.count("cp.async.cg.shared.global") == ptx_alone.count("cp.async.cg.shared.global")
    assert bytes_of_copies(ptx) == bytes_of_copies(ptx_alone)
    assert with_sums.metadata.shared <= device.shared_bytes
    assert count_spill_loads(with_sums, tmp_path) <= SPILLS_WITH_SUMS.get(capability, 0)


@pytest.mark.parametrize("capability", [80, 90])
def test_fp32_is_not_added_in_one_chain(capability: int) -> None:
    launch = launches(capability, torch.float32)["down_proj"]
    ptx = compile_launch(launch, capability).asm["ptx"]
    tile = launch.constants
    sums = tile["BLOCK_M"] * tile["BLOCK_N"] // (32 * launch.num_warps)  # of a thread
    # A step's products in a chain of their own, then one addition for each sum.
    assert len(re.findall(r"\bfma\.rn\.f32\b", ptx)) >= sums * tile["BLOCK_K"]
    assert len(re.findall(r"\badd\.(?:rn\.)?f32\b", ptx)) == sums


def test_the_number_of_tokens_is_in_no_key() -> None:
    spec = activation_spec("swiglu", "concatenated", None, None)
    keys = set()
    for tokens in (1, 17, 64, 1000):
        plan = plan_topk(torch.arange(tokens * K).view(tokens, K) % E, E)
        _, (tiles,) = tile_lists_launch(plan, 128)
        x, w2, s = torch.zeros(tokens, 64), torch.zeros(E, 64, 32), torch.zeros(tokens * K)
        h = torch.zeros(tokens * K, 64)
        launch, *_ = host.dgrad_dact_launch(x, w2, h, s, plan, tiles, spec, NVIDIA[80])
        keys.add(compiled_key(launch))
    assert len(keys) == 1
