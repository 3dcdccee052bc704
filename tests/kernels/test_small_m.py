"""up_proj and down_proj for few rows without a GPU: compiled for five GPUs, and when they are chosen.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

import random
import re
from itertools import chain
from pathlib import Path

import pytest
import torch
from triton_checks import turn
from triton_compile import CAPABILITIES, GFX942, MATRIX_UNIT, MI300, NVIDIA, compile_launches, stack_bytes

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.triton import small_m as kernels
from tilemoe.kernels.experts.triton.configs import choose_small_m_tile, shared_bytes, small_m
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch

NO_SPILL = 16  # bytes of a thread's stack that erf takes; nothing is moved there in a loop
BF16 = torch.bfloat16
LAYOUTS = [
    ("swiglu", "concatenated", False),
    ("swiglu", "concatenated", True),
    ("geglu", "interleaved", False),
    ("swiglu_oai", "interleaved", True),
    ("gelu_tanh", "concatenated", False),
]


def launches(
    tokens: int,
    device: Device,
    activation: str = "swiglu",
    gate_up: str = "concatenated",
    transposed: bool = False,
    dtype: torch.dtype = BF16,
    widths: tuple[int, int] = (2048, 768),
) -> tuple[Launch, Launch]:
    """up_proj and down_proj, with biases, for 4 experts and 2 per token. ``transposed``: weights of the other stride
    order."""
    (d, n), experts = widths, 4
    spec = activation_spec(activation, gate_up, None, None)
    plan = plan_topk(torch.arange(2 * tokens).view(tokens, 2) % experts, experts)
    w1, w2 = torch.zeros(experts, spec.width_factor * n, d, dtype=dtype), torch.zeros(experts, d, n, dtype=dtype)
    if transposed:
        w1, w2 = turn(w1), turn(w2)
    b1, b2 = w1.new_zeros(w1.shape[:2]), w2.new_zeros(w2.shape[:2])
    block_m = small_m(plan.capacity, experts)
    assert block_m is not None
    up, a = kernels.up_proj_act_launch(w1.new_zeros(tokens, d), w1, b1, plan, spec, block_m, device)
    down, _ = kernels.down_proj_launch(a, w2, b2, plan, block_m, device)
    return up, down


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tokens", [1, 60])
@pytest.mark.parametrize(
    ("activation", "gate_up", "transposed"),
    [pytest.param(*layout, marks=() if i in (0, 3) else pytest.mark.thorough) for i, layout in enumerate(LAYOUTS)],
)
def test_weights_of_every_layout_are_loaded_ahead_and_wide(
    activation: str, gate_up: str, transposed: bool, tokens: int, capability: int, tmp_path: Path
) -> None:
    device = NVIDIA[capability]
    for launch, compiled in compile_launches(launches(tokens, device, activation, gate_up, transposed), capability):
        ptx, tile = compiled.asm["ptx"], launch.constants
        copies = re.findall(r"cp\.async\.\w+\.shared\.global [^;]*, 0x([0-9a-f]+)", ptx)
        assert len(copies) >= 3 * tile["BLOCK_K"] * tile["BLOCK_N"] // (8 * 32 * launch.num_warps), "stages in flight"
        assert set(copies) == {"10"}, "16 bytes each"
        # 16 rows are fewer than the newer instructions take.
        assert (MATRIX_UNIT[capability] if tile["BLOCK_M"] == 64 else "mma.sync") in ptx
        assert stack_bytes(compiled, tmp_path) <= NO_SPILL
        assert compiled.metadata.shared <= device.shared_bytes // 2, "two programs share a multiprocessor"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_and_uneven_widths(dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    both = (launches(tokens, NVIDIA[capability], dtype=dtype, widths=(200, 72)) for tokens in (1, 60))
    for launch, compiled in compile_launches(chain(*both), capability):
        assert not launch.constants["EVEN"]
        assert stack_bytes(compiled, tmp_path) <= NO_SPILL


def test_amd() -> None:
    for _, compiled in compile_launches(chain(*(launches(tokens, MI300) for tokens in (1, 60))), GFX942):
        assert re.search(r"v_mfma_f32_\w+bf16", compiled.asm["amdgcn"])
        assert re.search(r"\.vgpr_spill_count: +0\b", compiled.asm["amdgcn"])
        assert compiled.metadata.shared <= MI300.shared_bytes


def test_the_number_of_tokens_chooses_between_two_tiles_and_is_in_no_other_key() -> None:
    keys: dict[int, set[object]] = {16: set(), 64: set()}
    for tokens in (1, 2, 7, 16, 17, 32, 33, 64):
        for launch in launches(tokens, NVIDIA[90], widths=(64, 32)):
            specialised = tuple((name, value) for name, value in launch.args.items() if isinstance(value, int))
            constants = tuple(launch.constants.items())
            key = (launch.kernel.fn.__name__, specialised, constants, launch.num_warps, launch.num_stages)
            keys[launch.constants["BLOCK_M"]].add(key)
    assert {block_m: len(found) for block_m, found in keys.items()} == {16: 2, 64: 2}


def test_where_rows_are_few() -> None:
    assert [small_m(tokens * 8, 128) for tokens in (0, 1, 128, 129, 512, 513)] == [16, 16, 16, 64, 64, None]
    assert [small_m(tokens * 8, 64) for tokens in (64, 65, 256, 257)] == [16, 64, 64, None]


def test_every_tile_fits_twice() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        device = rng.choice([*NVIDIA.values(), MI300])
        kernel = rng.choice(["up_proj_act", "down_proj"])
        widths = [8 * rng.randint(1, 2 ** rng.randint(0, 11)) for _ in range(2)]
        itemsize, block_m = rng.choice([2, 4]), rng.choice([16, 64])
        gate_up = rng.choice([None, "concatenated", "interleaved"]) if kernel == "up_proj_act" else None
        tile = choose_small_m_tile(kernel, block_m, *widths, itemsize, device, gate_up)  # type: ignore[arg-type]
        assert tile.block_m == block_m
        assert min(tile.block_n, tile.block_k) >= 16
        assert shared_bytes(kernel, tile, itemsize, gate_up) <= device.shared_bytes // 2  # type: ignore[arg-type]
