"""What the Triton kernels promise of their code: a table of launches, the GPUs they are compiled for, and what must and
must not be found there. The GEMMs over routed rows, which have layouts besides: test_triton_compiled.py.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · w columns of h
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction
from triton_checks import turn
from triton_compile import KB, NVIDIA, recorded_launches

from tilemoe.activations import activation_spec
from tilemoe.kernels.expert_parallel import triton as exchange
from tilemoe.kernels.expert_parallel import triton_window as window
from tilemoe.kernels.expert_parallel.torch import Routed
from tilemoe.kernels.experts.formats.fp8 import words_of_row
from tilemoe.kernels.experts.formats.nf4 import quantize_nf4_double
from tilemoe.kernels.experts.formats.packed import PackedWeight
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.kernels.experts.triton import bias_grad
from tilemoe.kernels.experts.triton import small_m as few_rows
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton.combine import combine
from tilemoe.kernels.experts.triton.configs import small_m, tile_rows
from tilemoe.kernels.experts.triton.formats.fp8 import weight_for
from tilemoe.kernels.experts.triton.formats.quantize import pack_rows, quantized_blocks, unpack_rows
from tilemoe.kernels.experts.triton.formats.transpose import wgrad_operands
from tilemoe.kernels.experts.triton.tiles import listed_tiles, tile_lists_launch
from tilemoe.kernels.lm.triton_cross_entropy import cross_entropy_
from tilemoe.kernels.lm.triton_rotary import rotate
from tilemoe.kernels.plan import triton as plan_kernels
from tilemoe.kernels.plan import triton_small as plan_small
from tilemoe.kernels.rounding import triton as rounding
from tilemoe.kernels.rounding.triton import RoundingSpec, round_launches, score_grad_launch
from tilemoe.kernels.router import triton as router
from tilemoe.kernels.router.triton import RouterSpec, select_grad_launch, select_launch
from tilemoe.kernels.router.triton_input_grad import input_grad
from tilemoe.layers.attention import rotary_angles
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch
from tilemoe.testing import forward_and_grads, make_inputs

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DEVICES = {**NVIDIA, 89: Device(89, 99 * KB, 142)}
NO_SPILL = 16  # bytes of a thread's stack: two registers, stored once
LOADS, STORES = r"\bld\.global\.v4\.b32", r"\bst\.global\.v4\.b32"
NARROW_LOADS = r"ld\.global\S*\.b(8|16)\s"
MATRIX_UNIT = "the matrix unit"  # stands for its instruction


class Row(NamedTuple):
    """launches: of a device. has: (pattern, how often at least, in which kernel or in all); lacks: a pattern.

    stack: most bytes of a thread's stack; loads_on_120: most loads from it where the newest GPU has more. shared: most
    bytes of shared memory, if not the GPU's. amd: compiled for the MI300, too. kernels: some that have to be launched.
    """

    launches: Callable[[Device], Iterable[Launch]]
    has: tuple[tuple[str, int, str], ...] = ()
    lacks: str = "nothing that is in any code"
    stack: int = 0
    shared: int | None = None
    capabilities: tuple[int, ...] = (80, 90, 100, 120)
    amd: bool = False
    kernels: frozenset[str] = frozenset()
    loads_on_120: int = 0


def name_of(launch: Launch) -> str:
    return str(launch.kernel.fn.__name__)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def topk_plan(tokens: int, k: int, experts: int) -> RoutingPlan:
    return plan_topk(torch.arange(tokens * k).view(tokens, k) % experts, experts)


def recorded(run: Callable[[], Any]) -> Callable[[Device], list[Launch]]:
    """What ``run`` launches on a device."""

    def launches(device: Device) -> list[Launch]:
        with recorded_launches(device) as found:
            run()
        return found

    return launches


def selection(experts: int, *spec: Any) -> Row:
    def launches(device: Device) -> list[Launch]:
        of, logits = RouterSpec(*spec), zeros(64, experts, dtype=FP32)
        forward = select_launch(logits, None, None, of)
        sums = (torch.zeros(experts) if of.balance else None, torch.zeros(()) if of.z else None)
        ids, scores = forward.args["expert_ids"], forward.args["scores"]
        return [forward, select_grad_launch(logits, ids, None, scores, *sums, of)]

    is_dense = "softmax" in spec or any(spec[-2:])  # all logits have a gradient
    of_logits = ("select_kernel", "select_grad_kernel") if is_dense else ("select_kernel",)
    return Row(launches, tuple((LOADS, 1, kernel) for kernel in of_logits), shared=48 * KB, amd=experts <= 512)


def combined(dtype: torch.dtype) -> Row:
    plan, rows = topk_plan(3, 8, 5), zeros(24, 1536, dtype=dtype)

    def run() -> None:
        for s in (torch.zeros(24), None):
            combine(rows, s, plan, rows.new_empty(3, 1536))

    return Row(recorded(run), ((LOADS, 16, ""), (STORES, 1, "")))  # two loads for each row of a token


def combine_pairs() -> None:
    plan = plan_pairs(torch.tensor([2, 0, 2]), torch.tensor([1, 1, 0]), 3, 2)
    rows = zeros(3, 40, dtype=FP16)
    for s in (torch.zeros(3), zeros(3, dtype=FP64), None):
        combine(rows, s, plan, rows.new_empty(3, 40))


def planned(experts: int) -> Row:
    ids = zeros(600, 8, dtype=torch.int64)
    return Row(recorded(lambda: plan_kernels.count_sort(ids, experts)), shared=48 * KB, amd=experts == 128)


def planned_small(experts: int, dtype: torch.dtype) -> Row:
    return Row(recorded(lambda: plan_small.count_sort_small(zeros(64, 8, dtype=dtype), experts)), shared=48 * KB)


def rounded(
    experts: int, k: int, mode: str, score: str, tokens: int = 640, masked: bool = False
) -> Callable[[Device], list[Launch]]:
    def launches(device: Device) -> list[Launch]:
        logits, kept, ids = zeros(tokens, experts, dtype=FP32), zeros(tokens, k, dtype=FP32), torch.zeros(tokens, k)
        spec = RoundingSpec(mode, 128, score, True, 1.0, tokens * k + 128)
        mask = torch.ones(tokens, dtype=torch.bool) if masked else None
        forward, rows = round_launches(logits, ids.int(), kept, torch.zeros(experts), mask, spec)
        saved = (rows.norm, rows.row_of_pair, rows.code_of_pair, rows.pair_start_of_token)
        return [*forward, score_grad_launch(rows.scores, logits, ids.int(), mask, *saved, spec)]

    return launches


ROUNDING = (
    *((r"ld\.global(\.\w+)*\.v4", 1, kernel) for kernel in ("key_kernel", "grad_kernel")),  # logits, by 16 bytes
    *((r"popc\.b32", 1, f"{kernel}_kernel") for kernel in ("count", "place", "row", "token", "pair")),  # bits
)


def sent(ranks: int, dtype: torch.dtype, tokens: int = 48) -> Callable[[], None]:
    """What prepares the exchange of 128 experts' tokens, of top-K and of pairs."""
    ids = torch.arange(tokens * 8).view(tokens, 8) % 128
    plans = [plan_topk(ids, 128), plan_pairs(torch.arange(tokens).repeat_interleave(8), ids.flatten(), tokens, 128)]

    def run() -> None:
        for plan in plans:
            arrays = (plan.row_of_pair, plan.pair_of_row, plan.pair_start_of_token, plan.row_start_of_expert)
            routed = Routed(*arrays, plan.num_tokens, ranks)
            scores, sizes = torch.zeros(plan.num_pairs, dtype=dtype), zeros(ranks, 2, dtype=torch.int32)
            copies, words = sizes.new_empty(ranks * tokens), sizes.new_empty(plan.num_pairs, 1 + dtype.itemsize // 4)
            exchange.place_sent(scores, sizes, exchange.count_sent(routed, sizes), copies, words, routed)
            exchange.plan_received(words, sizes, 128 // ranks, plan.num_tokens)

    return run


def kernels_of(module: Any) -> frozenset[str]:
    is_kernel = {name: isinstance(value, JITFunction) for name, value in vars(module).items() if "_kernel" in name}
    return frozenset(name for name, yes in is_kernel.items() if yes)


def exchanged(ranks: int, dtype: torch.dtype) -> Row:
    """Some words of the kernel that places pairs are on the stack."""
    return Row(recorded(sent(ranks, dtype)), stack=64, shared=48 * KB, amd=ranks == 2, kernels=kernels_of(exchange))


def through_a_window(
    ranks: int, dtype: torch.dtype, width: int = 1536, tokens: int = 48, here: int = 1
) -> Callable[[], None]:
    """Both exchanges of a layer of 128 experts, by a window for 256 tokens. Rows that are packed are int32."""
    words = 2 if dtype == FP64 else 1
    limits = window.Limits(256, 8 * 256, 12 * 256, words, width * dtype.itemsize)
    state, layout = zeros(window.STATE, dtype=torch.int32), window.layout_of(limits, ranks)
    view = window.Window(zeros(ranks, dtype=torch.int64), state, state.new_empty(2), here, limits, layout)
    scores = torch.zeros(limits.capacity, dtype=FP64 if dtype == FP64 else FP32)

    def run() -> None:
        x = zeros(tokens, width, dtype=dtype)
        index = state.new_empty((layout.tokens - layout.sizes) // 4)
        window.put(view, x, window.TOKENS, index, room=limits.capacity)
        agreed, counts, came = window.agree(view, state.new_empty(1))
        places = window.plan_pulled(view, scores, agreed, counts, came, 128 // ranks, limits.capacity)[-1]
        received = window.pull_rows(view, x, agreed, counts, places)
        if dtype != torch.int32:
            for rows in (received, None):
                window.put(view, rows, window.RESULTS, scores, counts)
            window.put(view, None, window.RESULTS, counts=counts)
            window.pull_sums(view, received, agreed, counts, state.new_empty(ranks * tokens))
            window.pull_scores(view, scores, agreed, state.new_empty(8 * tokens))

    return run


def windows(ranks: int, dtype: torch.dtype) -> Row:
    """Rows move by 16 bytes."""
    moving = tuple((f"{kind}.global.v", 1, "pull_rows_kernel") for kind in ("ld", "st"))
    return Row(recorded(through_a_window(ranks, dtype)), moving, stack=64, shared=48 * KB, kernels=kernels_of(window))


def whole_rows(width: int) -> Row:
    """They are held in registers."""
    run = recorded(lambda: quantized_blocks(zeros(256, width), width))
    return Row(run, ((LOADS, 1, ""),), capabilities=(89, 90, 100, 120))


def of_kernels(launches: Callable[[Device], Iterable[Launch]], *names: str) -> Callable[[Device], list[Launch]]:
    """Those of kernels whose names end so."""
    return lambda device: [launch for launch in launches(device) if name_of(launch).endswith(names)]


QUANTIZING = ("quantize_rows_kernel", "quantize_blocks_kernel", "quantize_weight_rows_kernel", "dequantize_rows_kernel")
TRANSPOSING = ("quantize_transposed_kernel", "gather_transposed_kernel", "largest_of_tiles_kernel")


def quantize_all() -> None:
    """What is kept in e4m3 and what GEMMs read: rows, weights and transposed operands."""
    plan, kernels, weight = topk_plan(256, 2, 4), TritonBackend(), zeros(4, 1024, 512)
    h = zeros(plan.capacity, 1024)
    kernels.dequantize_h(kernels.quantize_h(h))
    for gemm in ("up_proj_act", "up_proj_dgrad", "down_proj"):
        weight_for(gemm, weight)
    list(wgrad_operands(zeros(256, 1024), h, plan))


def cross_between_processes(dtype: torch.dtype) -> Row:
    """16 bytes at a time of what the layer has, words of what crosses, whose lines begin at multiples of 4 bytes."""

    def run() -> None:
        pack_rows(zeros(256, 1024, dtype=dtype))
        unpack_rows(zeros(256, words_of_row(1024), dtype=torch.int32), dtype)

    return Row(
        recorded(run),
        ((LOADS, 1, "quantize_rows_kernel"), (STORES, 1, "dequantize_rows_kernel")),
        r"(ld|st)\.global\S*\.b(8|16)\s",
        capabilities=(89, 90, 100, 120),
        kernels=frozenset({"quantize_rows_kernel", "dequantize_rows_kernel"}),
    )


@cache
def frozen_weight(storage: str) -> PackedWeight:
    return STORAGES[storage].quantize(torch.zeros(2, *WIDTHS_OF_PACKED[storage]))


# MXFP4's are gpt-oss's.
WIDTHS_OF_PACKED = {"nf4": (2048, 1024), "mxfp4": (2880, 2880)}


def multiply_packed(storage: str, dtype: torch.dtype) -> Callable[[], None]:
    """up_proj and down_proj_dgrad, gathered, and down_proj and up_proj_dgrad: each once with blocks along the
    contraction and once along the output."""
    plan, spec = topk_plan(64, 2, 2), activation_spec("relu", "concatenated", None, None)
    d, n = WIDTHS_OF_PACKED[storage]
    x, a, do = (zeros(*shape, dtype=dtype) for shape in ((64, d), (128, n), (128, d)))

    def run() -> None:
        w2, kernels = frozen_weight(storage), TritonBackend()
        kernels.up_proj(x, w2.transpose(1, 2), None, plan, spec)
        kernels.down_proj(a, w2, zeros(2, d, dtype=dtype), plan)
        kernels.up_proj(a[:64], w2, None, plan, spec)
        kernels.up_proj_dgrad(do, w2, plan)

    return run


def packed(storage: str, dtype: torch.dtype) -> Row:
    """NF4's scales are copied one at a time, MXFP4's are loaded as bytes; all else goes by 16 bytes, nothing by single
    elements."""
    unit = () if dtype == FP32 else ((MATRIX_UNIT, 1, ""),)
    copies_of_others = r"cp\.async\.c[ga]\.shared\.global \[[^]]*\], \[[^]]*\], 0x(?!4\b|10\b)"
    narrow = NARROW_LOADS if storage == "nf4" else r"ld\.global\S*\.b16\s"
    launches = of_kernels(recorded(multiply_packed(storage, dtype)), "packed_kernel")
    return Row(launches, unit, f"{narrow}|{copies_of_others}", NO_SPILL, amd=dtype != FP16)


def cross_entropy(classes: int, dtype: torch.dtype) -> Row:
    wide = ((LOADS, 8, ""), (STORES, 8, "")) if classes == 100352 else ()  # rows of an odd length begin anywhere
    labels = torch.zeros(3, dtype=torch.int64)
    run = recorded(lambda: cross_entropy_(zeros(3, classes, dtype=dtype), labels, -100))
    return Row(run, wide, amd=classes == 100352)


def rotation(heads: int, width: int, dtype: torch.dtype, back: bool) -> Row:
    wide = ((STORES, 2, ""),) if width == 128 else ()  # narrower ones leave a thread less than 16 bytes
    x, angles = zeros(2, 16, heads, width, dtype=dtype), rotary_angles(torch.arange(16), width, 1e4)
    return Row(recorded(lambda: rotate(x, *angles, dtype, back=back)), wide, amd=not back)


def router_input(experts: int, dtype: torch.dtype) -> Row:
    """Operands come by TMA; shared memory that every GPU has, on Hopper for two programs."""
    given = [zeros(*shape, dtype=dtype) for shape in ((64, experts), (experts, 128), (64, 128))]
    run = recorded(lambda: input_grad(*given))
    return Row(run, ((MATRIX_UNIT, 1, ""),), r"ld\.global", shared=99 * KB, capabilities=(90, 100, 120))


# gpt-oss-20b, Qwen3-30B-A3B, OLMoE, Qwen3-Next: d, w, E, K.
SIZES = {"gpt-oss": (2880, 5760, 32, 4), "qwen3": (2048, 1536, 128, 8), "olmoe": (2048, 2048, 64, 8)}
SIZES |= {"qwen3-next": (2048, 1024, 512, 10)}


def bias_grads(device: Device, size: str, dtype: torch.dtype = BF16, tokens: int = 64) -> dict[str, Launch]:
    d, w, experts, k = SIZES[size]
    plan, do, dh = topk_plan(tokens, k, experts), zeros(tokens, d, dtype=dtype), zeros(tokens * k, w, dtype=dtype)
    tile_m = tile_rows(dtype.itemsize, device)
    _, (plan.tiles[tile_m],) = tile_lists_launch(plan, tile_m)
    scores, dense = bias_grad.dense_scores_launch(do, torch.zeros(tokens * k), plan, device)
    tile_sums, sums = bias_grad.tile_sums_launch(dh, listed_tiles(plan, tile_m), tile_m)
    return {
        "products": bias_grad.products_launch(do, zeros(experts, d, dtype=dtype), device)[0],
        "dense_scores": scores,
        "scores_times_grad": bias_grad.scores_times_grad_launch(do, dense, plan, device)[0],
        "tile_sums": tile_sums,
        "expert_sums": bias_grad.expert_sums_launch(sums, plan, tile_m)[0],
    }


def bias_products(size: str) -> Row:
    def launches(device: Device) -> list[Launch]:
        of = bias_grads(device, size)
        return [of["products"], of["scores_times_grad"]]

    asynchronous = r"cp\.async\.(bulk\.tensor|cg\.shared\.global)"
    return Row(launches, ((MATRIX_UNIT, 1, ""), (asynchronous, 1, "")), loads_on_120=1)


def few_row_gemms(
    tokens: int,
    device: Device,
    activation: str = "swiglu",
    gate_up: str = "concatenated",
    transposed: bool = False,
    dtype: torch.dtype = BF16,
    widths: tuple[int, int] = (2048, 768),
) -> tuple[Launch, Launch]:
    """up_proj and down_proj for few rows, with biases, for 4 experts and 2 per token. ``transposed``: weights of the
    other stride order."""
    (d, n), experts = widths, 4
    spec, plan = activation_spec(activation, gate_up, None, None), topk_plan(tokens, 2, experts)
    w1, w2 = zeros(experts, spec.width_factor * n, d, dtype=dtype), zeros(experts, d, n, dtype=dtype)
    if transposed:
        w1, w2 = turn(w1), turn(w2)
    b1, b2 = w1.new_zeros(w1.shape[:2]), w2.new_zeros(w2.shape[:2])
    block_m = small_m(plan.capacity, experts)
    assert block_m is not None
    up, a = few_rows.up_proj_act_launch(w1.new_zeros(tokens, d), w1, b1, plan, spec, block_m, device)
    down, _ = few_rows.down_proj_launch(a, w2, b2, plan, block_m, device)
    return up, down


def layer_launches(device: Device, dtype: torch.dtype) -> list[Launch]:
    """What the operator launches, forward and backward, with biases, and in inference: for 64 tokens, 2 experts and 2
    per token, d 1536 and n 256."""
    plan = topk_plan(64, 2, 2)
    inputs = make_inputs(plan, 1536, 256, dtype=dtype, bias=True)
    with recorded_launches(device) as launches:
        forward_and_grads(moe, inputs, plan, kernels="triton")
        # Alone, as where w1 is frozen; else up_proj_wgrad gives it in 16 bits.
        bias_grad.up_proj_bias_grad(torch.zeros(128, inputs["b1"].shape[1], dtype=dtype), plan, device)
        with torch.no_grad():
            moe(plan=plan, **inputs, kernels="triton")
    return launches


def uneven_few_rows(dtype: torch.dtype) -> Row:
    def launches(device: Device) -> list[Launch]:
        found = [launch for m in (1, 60) for launch in few_row_gemms(m, device, dtype=dtype, widths=(200, 72))]
        assert not any(launch.constants["EVEN"] for launch in found)
        return found

    return Row(launches, stack=NO_SPILL, capabilities=(80, 90))


def rows_of(kernels: str, make: Callable[..., Row], *arguments: tuple[Any, ...]) -> dict[str, Row]:
    """A row for each list of arguments, which name it."""
    return {" ".join([kernels, *map(str, given)]): make(*given) for given in arguments}


BALANCE_AND_Z, NEITHER = (True, True), (False, False)
ROWS: dict[str, Row] = {
    **rows_of(
        "select",
        selection,
        (128, 8, "late softmax", True, 1.0, 1, 1, *NEITHER),
        (8, 2, "late softmax", True, 1.0, 1, 1, *NEITHER),
        (router.MAX_EXPERTS, 8, "sigmoid", True, 1.0, 1, 1, *NEITHER),
        (512, 10, "softmax", True, 1.0, 1, 1, *BALANCE_AND_Z),
        (router.MAX_EXPERTS, 32, "softmax", False, 2.5, 1, 1, True, False),
        (256, 8, "sigmoid", True, 2.5, 8, 4, *BALANCE_AND_Z),
    ),
    **rows_of("combine", combined, (BF16,), (FP32,)),
    "combine pairs": Row(recorded(combine_pairs)),
    **rows_of("plan", planned, (128,), (plan_kernels.MAX_EXPERTS,)),
    **rows_of("small plan", planned_small, (8, torch.int32), (128, torch.int64), (plan_small.MAX_EXPERTS, torch.int64)),
    "rounding": Row(
        rounded(512, 10, "nearest_score", "softmax", masked=True), ROUNDING, stack=NO_SPILL, shared=48 * KB, amd=True
    ),
    "rounding, balance": Row(rounded(60, 4, "balance", "late softmax"), stack=NO_SPILL, shared=48 * KB),
    "rounding, most": Row(rounded(rounding.MAX_EXPERTS, 32, "up", "sigmoid"), stack=NO_SPILL, shared=48 * KB),
    **rows_of("exchange", exchanged, (2, FP32), (8, FP64), (64, FP32)),
    **rows_of("window", windows, (2, BF16), (8, FP64)),
    "window of packed rows": Row(recorded(through_a_window(4, torch.int32, words_of_row(2048))), (), NARROW_LOADS),
    "operands in fp8": Row(
        of_kernels(recorded(quantize_all), *QUANTIZING, *TRANSPOSING),
        ((LOADS, 1, ""), *((STORES, 1, name) for name in (*QUANTIZING, *TRANSPOSING[:2]))),
        capabilities=(89, 90, 100, 120),
        kernels=frozenset((*QUANTIZING, *TRANSPOSING)),
    ),
    **rows_of("packing", cross_between_processes, (BF16,), (FP16,), (FP32,)),
    **rows_of("whole rows", whole_rows, (1536,), (7168,), (28672,)),
    **rows_of("packed", packed, *((storage, dtype) for storage in WIDTHS_OF_PACKED for dtype in (BF16, FP16, FP32))),
    "nested scales": Row(
        recorded(lambda: TritonBackend().whole_scales(quantize_nf4_double(torch.zeros(2, 64, 2048)))),
        stack=NO_SPILL,
        amd=True,
        kernels=frozenset({"nested_scales_kernel"}),
    ),
    **rows_of("loss", cross_entropy, (100352, BF16), (100352, FP16), (100352, FP32), (50257, BF16), (48, FP32)),
    **rows_of(
        "rotation", rotation, (12, 128, BF16, True), (12, 128, FP32, False), (4, 64, FP16, True), (5, 80, BF16, True)
    ),
    **rows_of("router's dx", router_input, (8, BF16), (128, FP16), (512, BF16)),
    **rows_of("bias gradients", bias_products, *((size,) for size in SIZES)),
    **rows_of("few rows, uneven", uneven_few_rows, (FP16,), (FP32,)),
    "few rows": Row(
        lambda device: (*few_row_gemms(1, device), *few_row_gemms(60, device)),
        stack=NO_SPILL,
        capabilities=(),
        amd=True,
    ),
}
