"""Which implementation is chosen, that it says why, what is refused; and which tiles, which fit the GPU for any T."""

import random
import re
import sys
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from helpers import raises_one_line

from tilemoe.config import MoEConfig
from tilemoe.kernels import choose
from tilemoe.kernels.choose import choose_experts, choose_lm, choose_rounding, choose_router, select_kernels
from tilemoe.kernels.expert_parallel import triton as exchange
from tilemoe.kernels.experts import table
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.triton.configs import KERNELS, Kernel, band_tiles, choose_tile, shared_bytes, tile_rows
from tilemoe.kernels.plan import triton as triton_plan
from tilemoe.kernels.plan import triton_small as plan_small
from tilemoe.kernels.plan.torch import sort_by_expert
from tilemoe.kernels.rounding import triton as rounding
from tilemoe.kernels.router import triton as router
from tilemoe.kernels.router import triton_input_grad as router_input
from tilemoe.runtime import device as device_module
from tilemoe.runtime.device import Device, device_of, has_fast_gemm

CPU, GPU = torch.device("cpu"), torch.device("cuda")


HaveGpu = Callable[[str, tuple[int, int]], None]


@pytest.fixture
def h200(have_gpu: HaveGpu) -> None:
    """The GPU that is asked is an H200."""
    have_gpu(triton.__version__, (9, 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_float_dtype_has_a_backend_and_a_reason(dtype: torch.dtype) -> None:
    cfg = MoEConfig(hidden_size=24, intermediate_size=7, num_experts=4, num_experts_per_tok=2)
    for device in ("cpu", CPU):
        chosen = select_kernels(device, dtype, cfg)
        assert chosen.name == chosen.impl.name == "torch"
        assert chosen.impl.why_unsupported(CPU, dtype, (24, 7)) is None
        assert "\n" not in chosen.reason
        for fact in ("cpu", str(dtype), "d=24", "n=7"):
            assert fact in chosen.reason
        assert chosen.impl is backend_named(chosen.name)
    assert "d=" not in select_kernels("cpu", dtype).reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cpu", torch.int32), "dtype must be one of torch.bfloat16, .*; got torch.int32"),
        (("cpu", torch.float8_e4m3fn), "dtype must be one of .*; got torch.float8_e4m3fn"),
        (("cpu", "float32"), "dtype must be one of .*; got 'float32'"),
        (("gpu", torch.float32), "device must be a torch device such as 'cpu' or 'cuda:0', got 'gpu'"),
    ],
    ids=str,
)
def test_bad_arguments_are_named_in_one_line(arguments: tuple[Any, Any], message: str) -> None:
    with raises_one_line(message):
        select_kernels(*arguments)


@pytest.mark.parametrize(("version", "name"), [("3.6.0", "hopper"), ("3.9.0", "hopper"), ("9.0.0", "triton")])
@pytest.mark.usefixtures("h200")
def test_a_triton_whose_gluon_has_moved_leaves_the_portable_kernels(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    if name == "triton":  # an ImportError for who imports it
        monkeypatch.setitem(sys.modules, "tilemoe.kernels.experts.hopper.backend", None)
    chosen = select_kernels("cuda:0", torch.bfloat16)
    assert chosen.name == name
    assert ("not 9.0.0" in chosen.reason) == (name == "triton")
    why = table.why_not_hopper_gpu(torch.device("cuda:0"))
    assert (why is None) == (name == "hopper")
    assert why is None or why in chosen.reason


@pytest.mark.parametrize("capability", [80, 90, 100, 0], ids=["A100", "H200", "B200", "MI300X"])
@pytest.mark.usefixtures("h200")
def test_the_hopper_kernels_alone_say_what_they_need(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))  # enough for Triton's
    monkeypatch.setattr(device_module, "gpu", lambda index: Device(capability, 227 * 1024, 132))
    chosen = select_kernels("cuda:0", torch.bfloat16)
    if capability == 90:
        assert chosen.name == "hopper"
    else:
        assert chosen.name == "triton"
        assert chosen.reason.endswith(f": {table.why_not_hopper_gpu(torch.device('cuda:0'))}")


@pytest.mark.parametrize(
    ("version", "capability", "serves_triton"),
    [
        *[(version, (10, 0), False) for version in ("3.6.0", "3.7.0", "3.7.0+git1a2b", "3.7.1rc1", "2.12.3")],
        *[(version, (10, 0), True) for version in ("3.7.1", "3.7.1+git1a2b", "3.8", "3.10.0", "4.0.0")],
        ("3.6.0", (10, 3), False),
        *[("3.6.0", capability, True) for capability in ((8, 0), (8, 9), (9, 0), (12, 0))],
    ],
)
def test_capability_10_waits_for_the_triton_that_fences(
    have_gpu: HaveGpu, version: str, capability: tuple[int, int], serves_triton: bool
) -> None:
    """In one rule for all that is chosen, and for who insists."""
    have_gpu(version, capability)
    device, insisting = torch.device("cuda", 0), SimpleNamespace(device=torch.device("cuda", 0))
    choices = (
        select_kernels(device, torch.bfloat16),
        choose_experts(device, torch.float16, (64, 32), "fp8"),
        choose_router(device, torch.float32, 8, 2),
        choose.choose_plan(device, 8, 4),
        choose.choose_inference_plan(device, 8, 4),
        choose.choose_expert_parallel(device, 4, 8, 4, 2),
    )
    why = choose.why_not_triton(device, torch.bfloat16, (64, 32))  # the router's products ask
    named = backend_named("triton").why_unsupported(device, torch.bfloat16, (64, 32))
    if serves_triton:
        assert all(choice.name != "torch" for choice in choices)
        assert why is named is None
    else:
        advice = f"Triton {version} can be wrong on capability 10.x: pip install 'triton>=3.7.1'"
        assert all(choice.name == "torch" and advice in choice.reason for choice in choices)
        assert why == named == advice
        with raises_one_line(f"cuda:0: {re.escape(advice)}; or pass kernels='torch'"):
            device_of(insisting)  # type: ignore[arg-type]


@pytest.mark.usefixtures("h200")
def test_why_it_is_not_fp8_is_the_layers_own_fault_first(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:0")
    assert choose_experts(device, torch.bfloat16, (128, 128), "fp8").name == "hopper_fp8"
    for dtype, widths, why in (
        (torch.bfloat16, (128, 36), "n is not a multiple of 128"),
        (torch.float32, (128, 128), "FP8 kernels give bfloat16 and float16, not torch.float32"),
        (torch.float64, (128, 128), "fp64 is not quantised"),
    ):
        assert f"not in FP8 ({why}): change that" in choose_experts(device, dtype, widths, "fp8").reason
    monkeypatch.setattr(device_module, "gpu", lambda index: Device(89, 99 * 1024, 128))
    choose._known_experts_on.cache_clear()
    elsewhere = choose_experts(device, torch.bfloat16, (128, 128), "fp8")
    assert elsewhere.name == "triton"
    assert "not in FP8 (the FP8 kernels are for Hopper alone, compute capability 9.0): change" in elsewhere.reason


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("ask", "arguments", "name", "reason"),
    [
        (choose_experts, (GPU, FP64, (64, 32)), "torch", "no Triton kernel computes in torch.float64"),
        (choose_experts, (GPU, FP64, (64, 36)), "torch", "no Triton kernel computes in torch.float64"),
        (choose_experts, (GPU, FP32, (64, 32)), "torch", "cuBLAS's fp32 GEMMs are faster; pass kernels='triton'"),
        (choose_experts, (GPU, BF16, (64, 36)), "torch", "must be multiples of 8"),
        (choose_experts, (GPU, BF16, (60, 32)), "torch", "must be multiples of 8"),
        (choose_experts, (GPU, BF16, (1536, 256)), "triton", ""),
        (choose_experts, (GPU, torch.float16, ()), "triton", ""),
        (choose_router, (GPU, FP32, 128, 8), "triton", ""),
        (choose_router, (GPU, FP32, 1, 1), "triton", ""),
        (choose_router, (GPU, FP32, 4096, 32), "triton", ""),
        (choose_router, (GPU, FP64, 128, 8), "torch", "no Triton kernel computes in torch.float64"),
        (choose_router, (GPU, FP32, 128, 33), "torch", "more than 32 experts per token"),
        (choose_router, (GPU, FP32, 4097, 8), "torch", "more than 4096 experts"),
        (choose_rounding, (GPU, FP32, 8), "triton", ""),
        (choose_rounding, (GPU, FP32, 4097), "torch", "more than 4096 experts"),
        (choose.choose_plan, (GPU, 0, 4), "torch", "the number of pairs is not in"),
        (choose.choose_plan, (GPU, 1, 4096), "triton", ""),
        (choose.choose_plan, (GPU, 8, 4097), "torch", "more than 4096 experts"),
        (choose.choose_plan, (GPU, triton_plan.MAX_PAIRS + 1, 4), "torch", "the number of pairs is not in"),
        (choose.choose_expert_parallel, (GPU, 4, 32, 128, 8), "triton", ""),
        (choose.choose_expert_parallel, (GPU, 0, 0, 128, 8), "torch", exchange.why_unsupported(0, 0, 128, 8)),
        (choose.choose_expert_parallel, (GPU, 4, 32, 130, 65), "torch", exchange.why_unsupported(4, 32, 130, 65)),
        (choose_lm, (torch.nn.Parameter(torch.ones(2)),), "torch", "Parameter is not a plain tensor"),
    ],
)
def test_who_serves_and_why(ask: Callable[..., Any], arguments: tuple[Any, ...], name: str, reason: str) -> None:
    choice = ask(*arguments)
    assert choice.name == name
    assert choice.reason
    assert reason in choice.reason


def test_each_plan_has_its_builder() -> None:
    """Of few pairs, in inference, one of its own."""
    most, experts = plan_small.MAX_PAIRS, plan_small.MAX_EXPERTS
    for ask, arguments, builder in (
        (choose.choose_plan, (CPU, 8, 4), sort_by_expert),
        (choose.choose_plan, (GPU, 8, 4), triton_plan.count_sort),
        (choose.choose_inference_plan, (CPU, 8, 4), sort_by_expert),
        (choose.choose_inference_plan, (GPU, 8, 4), plan_small.count_sort_small),
        (choose.choose_inference_plan, (GPU, most + 1, 4), triton_plan.count_sort),
        (choose.choose_inference_plan, (GPU, 8, experts + 1), triton_plan.count_sort),
    ):
        assert ask(*arguments).impl.build is builder


def test_cpu_tensors_are_refused() -> None:
    x, ids = torch.zeros(32, 2), torch.zeros(32, 1, dtype=torch.int32)
    of_rounding = rounding.RoundingSpec("nearest", 16, "softmax", True, 1.0, 64)
    for refused in (
        lambda: device_of(x),
        lambda: router.select(x, None, None, router.RouterSpec(1, "softmax", True, 1.0, 1, 1, False, False)),
        lambda: triton_plan.count_sort(ids, 3),
        lambda: rounding.round_rows(x, ids, x[:, :1], None, None, of_rounding),
        lambda: router_input.why_unsupported(x, torch.zeros(2, 3), torch.zeros(32, 3)),
    ):
        with pytest.raises(ValueError, match="need a GPU but x is on cpu"):
            refused()


def test_every_chooser_asks_one_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Triton runs here is decided in one place for the experts, the router, the plan and all others."""
    choose._known_experts_on.cache_clear()
    for module in (choose, table):
        monkeypatch.setattr(module, "why_no_triton", lambda device: "none today")
    choices = (
        choose_experts(GPU, torch.bfloat16, (64, 32)),
        choose_router(GPU, torch.float32, 8, 2),
        choose_rounding(GPU, torch.float32, 8),
        choose.choose_plan(GPU, 8, 4),
        choose.choose_inference_plan(GPU, 8, 4),
        choose.choose_expert_parallel(GPU, 4, 8, 4, 2),
        choose.choose_packing(GPU, torch.bfloat16),
        choose_lm(torch.ones(2)),
    )
    choose._known_experts_on.cache_clear()
    assert {(choice.name, choice.reason) for choice in choices} == {("torch", "none today")}


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        (89, torch.bfloat16, "one kernel packs, one unpacks"),
        (80, torch.bfloat16, "e4m3 needs compute capability 8.9"),
        (90, torch.float64, "no Triton kernel computes in torch.float64"),
    ],
)
def test_rows_are_packed_by_triton_where_it_has_e4m3(
    capability: int, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gpus = {0: Device(75, 0, 0), 1: Device(capability, 0, 0)}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(device_module, "gpu", of_gpus.__getitem__)
    choice = choose.choose_packing(GPU, dtype)
    assert choice.name == ("triton" if capability == 89 else "torch")
    assert reason in choice.reason


KB = 1024
GPUS = {
    "T4": Device(75, 64 * KB, 40),
    "A100": Device(80, 163 * KB, 108),
    "RTX 4090": Device(89, 99 * KB, 128),
    "H200": Device(90, 227 * KB, 132),
    "B200": Device(100, 227 * KB, 148),
    "RTX 5090": Device(120, 99 * KB, 170),
    "MI300X": Device(0, 64 * KB, 304),
}


@pytest.mark.parametrize("gpu", GPUS)
def test_every_tile_fits(gpu: str) -> None:
    device, rng = GPUS[gpu], random.Random(0)
    for _ in range(10_000 // len(GPUS) + 1):
        kernel = rng.choice(KERNELS)
        widths = [8 * rng.randint(1, 2 ** rng.randint(0, 11)) for _ in range(2)]
        itemsize, gate_up = rng.choice([2, 4]), rng.choice([None, "concatenated", "interleaved"])
        tile = choose_tile(kernel, *widths, itemsize, device, gate_up)
        where = (kernel, widths, itemsize, gate_up, tile)
        assert shared_bytes(kernel, tile, itemsize, gate_up) <= device.shared_bytes, where
        blocks = (tile.block_m, tile.block_n, tile.block_k)
        assert all(block >= 16 and block & (block - 1) == 0 for block in blocks), where
        assert tile.block_m * tile.block_n <= 128 * tile.num_warps * 32, where  # at most 128 accumulators a thread
        assert tile.block_n % tile.slices == 0, where
        assert tile.block_n // tile.slices >= 16, where
        assert 1 <= tile.num_stages <= 7, where
        assert tile.num_warps in (4, 8), where


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_row_gemms_share_one_list_of_tiles(gpu: str, itemsize: int) -> None:
    rows = tile_rows(itemsize, GPUS[gpu])
    for kernel in ("up_proj_act", "down_proj", "down_proj_dgrad_dact", "up_proj_dgrad"):
        for widths in [(8, 8), (1536, 256), (4096, 14336)]:
            assert choose_tile(kernel, *widths, itemsize, GPUS[gpu]).block_m == rows


@pytest.mark.parametrize(
    ("kernel", "column_tiles", "width_in", "expected"),
    [
        ("down_proj", 16, 1024, 0),  # OLMoE: its contraction is short
        ("down_proj", 32, 1536, 8),  # Qwen3-235B
        ("down_proj", 23, 2880, 4),  # gpt-oss
        ("down_proj", 32, 2047, 8),
        ("down_proj", 32, 2048, 4),
        ("up_proj_dgrad", 12, 2048, 4),  # 7B-n1024
        ("up_proj_dgrad", 8, 4096, 0),
        ("up_proj_dgrad", 0, 4096, 0),
        ("up_proj_act", 8, 2048, 0),  # OLMoE
        ("up_proj_act", 12, 4096, 6),  # Qwen3-235B
        ("up_proj_act", 112, 4096, 6),  # Mixtral
        ("down_proj_dgrad_dact", 12, 2880, 0),  # gpt-oss
        ("down_proj_dgrad_dact", 32, 4096, 0),
        ("down_proj_dgrad_dact", 33, 4096, 6),
        ("down_proj_dgrad_dact", 56, 4096, 6),  # Mixtral
    ],
)
def test_bands_are_about_equally_wide(kernel: Kernel, column_tiles: int, width_in: int, expected: int) -> None:
    assert band_tiles(kernel, column_tiles, width_in) == expected


def test_small_widths_and_the_interpreter_take_small_tiles() -> None:
    tile = choose_tile("down_proj", 40, 24, 2, GPUS["H200"])
    assert (tile.block_n, tile.block_k) == (32, 64)
    device = Device(90, 1 << 20, 3, interpreted=True)
    assert tile_rows(2, device) == tile_rows(4, device) == 16


@pytest.mark.parametrize(("onednn", "bf16", "fp16"), product([True, False], repeat=3))
def test_only_gemms_in_16_bits_on_a_cpu_may_be_slow(
    monkeypatch: pytest.MonkeyPatch, onednn: bool, bf16: bool, fp16: bool
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: fp16)
    is_fast = has_fast_gemm.__wrapped__  # what is cached was asked before
    fast = {dtype for dtype in FLOAT_DTYPES if is_fast("cpu", dtype)}
    assert (torch.bfloat16 in fast) == (onednn and bf16)
    assert (torch.float16 in fast) == (onednn and fp16)
    assert fast >= {torch.float32, torch.float64}
    assert all(is_fast("cuda", dtype) for dtype in FLOAT_DTYPES)
