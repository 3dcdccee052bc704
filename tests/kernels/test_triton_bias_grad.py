"""The gradients of the biases without a GPU: what they compile to.

T tokens · d hidden_size · E experts · K experts per token · w columns of h
"""

import re
from pathlib import Path

import pytest
import torch
from triton_compile import (
    CAPABILITIES,
    MATRIX_UNIT,
    NVIDIA,
    compile_launch,
    compiled_key,
    count_spill_loads,
    machine_code,
)

from tilemoe.kernels.experts.triton import bias_grad
from tilemoe.kernels.experts.triton.configs import tile_rows
from tilemoe.kernels.experts.triton.tiles import listed_tiles, tile_lists_launch
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.launch import Launch

# gpt-oss-20b, Qwen3-30B-A3B, OLMoE, Qwen3-Next: d, w, E, K.
SIZES = {"gpt-oss": (2880, 5760, 32, 4), "qwen3": (2048, 1536, 128, 8), "olmoe": (2048, 2048, 64, 8)}
SIZES |= {"qwen3-next": (2048, 1024, 512, 10)}
# Spill loads of a thread, once per program.
SPILLS = {("scores_times_grad", 120): 1}


def launches(capability: int, dtype: torch.dtype, size: str, tokens: int = 64) -> dict[str, Launch]:
    d, w, experts, k = SIZES[size]
    device = NVIDIA[capability]
    plan = plan_topk(torch.arange(tokens * k).view(tokens, k) % experts, experts)
    do, b2 = torch.zeros(tokens, d, dtype=dtype), torch.zeros(experts, d, dtype=dtype)
    s, dh = torch.zeros(tokens * k), torch.zeros(tokens * k, w, dtype=dtype)
    tile_m = tile_rows(do.element_size(), device)
    _, (tiles,) = tile_lists_launch(plan, tile_m)
    plan.derived[tile_m] = tiles
    scores, dense = bias_grad.dense_scores_launch(do, s, plan, device)
    tile_sums, sums = bias_grad.tile_sums_launch(dh, listed_tiles(plan, tile_m), tile_m)
    return {
        "products": bias_grad.products_launch(do, b2, device)[0],
        "dense_scores": scores,
        "scores_times_grad": bias_grad.scores_times_grad_launch(do, dense, plan, device)[0],
        "tile_sums": tile_sums,
        "expert_sums": bias_grad.expert_sums_launch(sums, plan, tile_m)[0],
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_are_the_matrix_units(capability: int, size: str, tmp_path: Path) -> None:
    for name in ("products", "scores_times_grad"):
        launch = launches(capability, torch.bfloat16, size)[name]
        compiled = compile_launch(launch, capability)
        ptx = compiled.asm["ptx"]
        assert MATRIX_UNIT[capability] in ptx, name
        assert ("cp.async.bulk.tensor" if NVIDIA[capability].has_tma else "cp.async.cg.shared.global") in ptx, name
        assert compiled.metadata.shared <= NVIDIA[capability].shared_bytes, name
        assert count_spill_loads(compiled, tmp_path) <= SPILLS.get((name, capability), 0), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_sum_of_rows_has_wide_loads_in_flight(capability: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """16 bytes of each thread's, several asked for before the first is added: 64 KB with 8 programs at a time."""
    launch = launches(capability, dtype, "gpt-oss")["tile_sums"]
    compiled = compile_launch(launch, capability)
    code = machine_code(compiled, tmp_path)
    loads = [found.start() for found in re.finditer(r"\bLDG\.E\.128\b", code)]
    first_sum = re.search(r"\bFADD\b", code)
    assert first_sum is not None
    ahead = sum(place < first_sum.start() for place in loads)
    assert 8 * ahead * 16 * 32 * launch.num_warps >= 64 * 1024
    rows, columns = launch.constants["BLOCK_M"], launch.constants["BLOCK_N"]
    assert len(loads) * 16 * 32 * launch.num_warps == rows * columns * dtype.itemsize, "no narrower loads"
    assert count_spill_loads(compiled, tmp_path) == 0


def test_every_program_has_work_on_an_h200() -> None:
    """Of the product that sums over tokens: one wave, and most multiprocessors in it."""
    for size, (d, _, experts, _) in SIZES.items():
        launch = launches(90, torch.bfloat16, size)["scores_times_grad"]
        tiles, splits = launch.grid
        assert tiles == -(-d // 128) * max(1, experts // 128), size
        assert 0.85 * 132 <= tiles * splits <= 2 * 132, size


def test_the_number_of_tokens_is_in_no_key() -> None:
    by_tokens = (launches(90, torch.bfloat16, "gpt-oss", tokens).values() for tokens in (16, 17, 64, 1000))
    assert len({tuple(map(compiled_key, each)) for each in by_tokens}) == 1
