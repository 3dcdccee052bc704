"""The kernels that quantise and dequantise, in Triton's interpreter and on a GPU, against PyTorch's.

The interpreter rounds to e4m3 without a carry into the exponent, where what should become a power of two from below
becomes half of it (7 / 8 of 2^-6, the smallest that is normal), and ties away from zero. There the kernels are held to
all other values.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity
"""

from __future__ import annotations

import pytest
import torch
import triton
from fp8_checks import transposed_by_torch
from torch import Tensor
from triton_checks import turn

import tilemoe
from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.formats import fp8 as by_torch
from tilemoe.kernels.experts.formats.fp8 import BLOCK, WEIGHTS, packed_operand, quantize
from tilemoe.kernels.experts.formats.operand import Operand
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton.formats.quantize import (
    block_weight_launch,
    dequantized_rows,
    pack_rows,
    row_weight_launch,
    rows_launch,
    unpack_rows,
)
from tilemoe.kernels.experts.triton.formats.transpose import (
    PART,
    gather_launch,
    largest_launch,
    quantize_launch,
    wgrad_operands,
)
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.launch import ceil_div
from tilemoe.testing import assert_equal, hostile_routings, make_inputs

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter's bf16 is wrong
D, N = 256, 128
ROUTINGS = [routing.name for routing in hostile_routings(tile=16)]


def plan_named(name: str) -> RoutingPlan:
    return next(routing.plan for routing in hostile_routings(tile=16, device=DEVICE) if routing.name == name)


def assert_quantized(operand: Operand, values: Tensor, block: tuple[int, int]) -> None:
    """To the bit what `quantize` gives; interpreted, but for ties and what should be a power of two."""
    expected, scale = quantize(values, block), operand.scale
    assert_equal(scale, expected.scale)
    scaled = values.float() * (1 / scale).repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    assert_rounded(operand.data, expected.data, scaled)


def assert_rounded(data: Tensor, expected: Tensor, scaled: Tensor) -> None:
    """``data`` is what PyTorch has made of the values ``scaled``; interpreted, but for the same cases."""
    found, right = data.float(), expected.float()
    differs = ~((found == right) | (found.isnan() & right.isnan()))
    if INTERPRETED:
        is_tie = (scaled - found).abs() == (scaled - right).abs()
        is_halved = (found * 2 == right) & (right.abs().frexp()[0] == 0.5)
        is_subnormal = (right.abs() == 2**-6) & (found.abs() == 7 * 2**-9)  # the carry to the least normal value
        differs &= ~is_tie & ~is_halved & ~is_subnormal
    assert not differs.any()


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE], ids=str)
@pytest.mark.parametrize("count", [1, 33, 64])
@pytest.mark.parametrize("block_width", [128, 192, 384])
def test_rows_are_quantized(block_width: int, count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = (torch.randn(count, 392, device=DEVICE) * torch.rand(count, 1, device=DEVICE).exp()).to(dtype)[:, :384]
    values[0, :128] = 0
    launch, found = rows_launch(values, block_width)
    launch.run()
    assert_quantized(found, values, (1, block_width))


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE], ids=str)
@pytest.mark.parametrize("count", [0, 1, 33, 64])
@pytest.mark.parametrize("width", [128, 132, 384])
def test_rows_are_packed(width: int, count: int, dtype: torch.dtype) -> None:
    """As lines of words, of any strides; and what PyTorch has packed is unpacked to the bit."""
    torch.manual_seed(0)
    rows = torch.randn(width, count, device=DEVICE).to(dtype).t()
    rows[:1, :128] = 0
    for values in (rows, rows.contiguous(), torch.randn(count, 1, device=DEVICE).to(dtype).expand(count, width)):
        words, expected = pack_rows(values), by_torch.pack_rows(values)
        assert (words.shape, words.dtype) == (expected.shape, torch.int32)
        assert_quantized(packed_operand(words, dtype), values, (1, width))
        assert_equal(unpack_rows(expected, dtype), by_torch.unpack_rows(expected, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE], ids=str)
@pytest.mark.parametrize("count", [0, 1, 33])
@pytest.mark.parametrize("block_width", [128, D])
def test_rows_are_made_again(block_width: int, count: int, dtype: torch.dtype) -> None:
    """To the bit; each of e4m3's 256 values is in a row, but the interpreter's NaN is a number."""
    torch.manual_seed(0)
    codes = torch.arange(256).where((torch.arange(256) % 128 < 127) | (not INTERPRETED), 0)
    data = codes.to(torch.uint8).view(torch.float8_e4m3fn).expand(count, D).contiguous()
    scale = torch.rand(count, D // block_width).exp() / 8
    kept = Operand(data.to(DEVICE), scale.to(DEVICE), (1, block_width), dtype)
    found, expected = dequantized_rows(kept), kept.dense(dtype)
    assert found.dtype == dtype
    assert_equal(found.isnan(), expected.isnan())
    assert_equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_quantized(transposed: bool) -> None:
    """In blocks, and by rows and columns: to contiguous data, whatever strides the weight has."""
    torch.manual_seed(0)
    weight = torch.randn(2, D, N, device=DEVICE).to(DTYPE)
    weight[1, :128] = 0
    given = turn(weight) if transposed else weight
    for launch_of, values, block in (
        (block_weight_launch, given, WEIGHTS),
        (row_weight_launch, given, (1, N)),
        (row_weight_launch, given.transpose(1, 2), (1, D)),
        (row_weight_launch, given[:, :, :128].transpose(1, 2)[:, :100], (1, D)),
    ):
        launch, found = launch_of(values)
        launch.run()
        assert found.data.is_contiguous()
        assert_quantized(found, values, block)


def test_what_is_not_finite_stays_visible() -> None:
    """In its block of rows, of a weight, or of a packed row; all else is as `quantize` has it."""
    rows, weight = torch.ones(4, D, device=DEVICE), torch.ones(2, D, N, device=DEVICE, dtype=DTYPE)
    rows[0, 5], rows[1, 130], rows[2, 131] = float("nan"), float("inf"), -float("inf")
    weight[0, 3, 5], weight[1, 130, 7] = float("nan"), -float("inf")
    pairs = [(unpack_rows(words, torch.float32), rows, (1, D)) for words in (by_torch.pack_rows(rows), pack_rows(rows))]
    for launch_of, values, block in (
        (lambda t: rows_launch(t, 128), rows, (1, 128)),
        (lambda t: rows_launch(t, D), rows, (1, D)),
        (block_weight_launch, weight, WEIGHTS),
        (row_weight_launch, weight, (1, N)),
        (row_weight_launch, weight.transpose(1, 2), (1, D)),
    ):
        launch, operand = launch_of(values)
        launch.run()
        pairs.append((operand.dense(torch.float32), values, block))
    for found, values, block in pairs:
        expected = quantize(values, block).dense(torch.float32)
        assert_equal(found.isfinite(), expected.isfinite())
        assert_equal(found[expected.isfinite()], expected[expected.isfinite()])


@pytest.mark.parametrize("name", ROUTINGS)
def test_operands_of_weight_gradients(name: str) -> None:
    """Gathered tokens and quantised rows, transposed; each expert's place along the rows is its own."""
    torch.manual_seed(0)
    plan = plan_named(name)
    by_token, by_row = torch.randn(plan.num_tokens, D, device=DEVICE), torch.rand(plan.capacity, N, device=DEVICE)
    by_token *= 0.1 + torch.rand(plan.num_tokens, 1, device=DEVICE)
    by_row += 0.1  # nothing becomes subnormal, which the interpreter rounds otherwise
    if not plan.capacity:
        return
    tokens, tiles = quantize(by_token, (1, D)), listed_tiles(plan, BLOCK)
    left = tokens.data.new_empty(D, tiles.capacity * BLOCK)
    gather = gather_launch(tokens.data, left, plan, tiles)
    find, largest = largest_launch(by_row, tokens.scale, plan, tiles)
    quantize_rows, right, scale = quantize_launch(by_row, tokens.scale, largest, plan, tiles)
    for launch in (gather, find, quantize_rows):
        launch.run()
    expected, starts = transposed_by_torch(by_token, by_row, plan), plan.row_start_of_expert[:-1].tolist()
    for expert, (start, count) in enumerate(zip(starts, plan.rows_per_expert.tolist(), strict=True)):
        first = (start // BLOCK + expert) * BLOCK
        place = slice(first, first + ceil_div(count, BLOCK) * BLOCK)
        assert_equal(left[:, place].float(), expected.by_token[:, place].float())
        if count:
            assert_equal(scale[expert], expected.scale[expert])
            rows = torch.zeros(place.stop - first, N, device=DEVICE)
            token = plan.token_of_row[start : start + count].long()
            rows[:count] = by_row[start : start + count] * tokens.scale[token] * (1 / scale[expert])
            assert_rounded(right[:, place], expected.by_row[:, place], rows.T)


def test_an_experts_scale_is_of_all_parts_of_its_columns() -> None:
    """Each expert that has rows has its largest magnitude in another part, the last of which is narrower."""
    plan = plan_topk(torch.tensor([0, 1, 3] * 50, device=DEVICE)[:, None], 4)
    by_token, by_row = torch.ones(150, D, device=DEVICE), torch.full((150, 2 * PART + 128), 0.5, device=DEVICE)
    for row, column, value in ((7, PART, -1.0), (99, PART - 1, 2.0), (149, 2 * PART + 127, -4.0)):
        by_row[row, column] = value
    (operands,) = wgrad_operands(by_token, by_row, plan)
    expected = torch.tensor([1.0, 2.0, 4.0], device=DEVICE) / 448 / 448  # a token's scale is 1 / 448
    assert_equal(operands.scale[[0, 1, 3]], expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["token", "row"])
def test_what_is_not_finite_makes_its_experts_scale_nan(where: str, bad: float) -> None:
    plan = plan_topk(torch.arange(8, device=DEVICE)[:, None] % 4, 4)
    by_token, by_row = torch.ones(8, D, device=DEVICE), torch.ones(8, N, device=DEVICE)
    broken = int(plan.token_of_row[3]) if where == "token" else 3
    (by_token if where == "token" else by_row)[broken, 7] = bad
    (operands,) = wgrad_operands(by_token, by_row, plan)
    scale = operands.scale
    assert_equal(scale.isfinite(), torch.tensor([True, False, True, True], device=DEVICE))


def test_a_layer_that_keeps_h_in_fp8() -> None:
    """The same output, and the gradients of the h that is kept."""
    torch.manual_seed(0)
    plan, ks = plan_named("random"), TritonBackend()
    given = {
        name: t.requires_grad_() for name, t in make_inputs(plan, 32, 64, "swiglu", dtype=DTYPE, bias=True).items()
    }
    o = tilemoe.moe(**given, plan=plan, kernels="triton", save="fp8")
    assert_equal(o, tilemoe.moe(**given, plan=plan, kernels="triton"))
    do = torch.randn_like(o)
    dw1, dw2, ds = torch.autograd.grad(o, [given[name] for name in ("w1", "w2", "scores")], do)
    spec = activation_spec("swiglu", "concatenated", None, None)
    x, w1, w2, s, b1, b2 = (given[name].detach() for name in ("x", "w1", "w2", "scores", "b1", "b2"))
    _, h = ks.up_proj_act(x, w1, b1, plan, spec)
    h = ks.dequantize_h(ks.quantize_h(h))
    dh, ds_kept, a_scaled = ks.down_proj_dgrad_dact(do, w2, b2, h, s.reshape(-1), plan, spec)
    assert_equal(ds, ds_kept.view_as(ds))
    assert_equal(dw2, ks.down_proj_wgrad(do, a_scaled, plan))
    assert_equal(dw1, ks.up_proj_wgrad(x, dh, plan))
