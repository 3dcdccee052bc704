"""The FP8 kernels in Triton's interpreter and on a GPU, against the torch backend of the same precision.

The interpreter rounds to e4m3 without a carry into the exponent, where what should become a power of two from below
becomes half of it, and ties away from zero. So there the GEMMs read what PyTorch has quantised, and the kernels that
quantise are held to all other values.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity
"""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor
from triton_checks import turn

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.quantize import ROWS, WEIGHTS, quantize
from tilemoe.kernels.experts.torch.fp8 import TorchFp8Backend
from tilemoe.kernels.experts.triton_fp8 import backend as fp8_backend
from tilemoe.kernels.experts.triton_fp8.backend import TritonFp8Backend
from tilemoe.kernels.experts.triton_fp8.quantize import Rows, Weight, rows_launch, weight_launch
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.testing import assert_equal, hostile_routings, make_inputs, relative_error

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter's bf16 is wrong
D, N = 256, 128
ROUTINGS = [routing.name for routing in hostile_routings(tile=16)]
# activation, gate_up, bias, turned weights, dtype
CASES = [
    ("swiglu", "concatenated", False, False, DTYPE),
    ("swiglu_oai", "interleaved", True, True, torch.float32),
    ("relu2", "concatenated", True, False, DTYPE),
    ("geglu", "interleaved", False, False, torch.float32),
]


@pytest.fixture
def quantized_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, PyTorch quantises."""
    if INTERPRETED:
        monkeypatch.setattr(fp8_backend, "_quantized_rows", _rows)
        monkeypatch.setattr(fp8_backend, "_quantized_weight", _weight)


def _rows(values: Tensor) -> Rows:
    found = quantize(values, ROWS)
    assert found.scale is not None
    return Rows(found.data, found.scale)


def _weight(weight: Tensor) -> tuple[Weight, Weight]:
    found = quantize(weight, WEIGHTS)
    assert found.scale is not None
    turned = found.data.transpose(1, 2).contiguous()
    return Weight(found.data, found.scale), Weight(turned, found.scale.transpose(1, 2))


def plan_named(name: str) -> RoutingPlan:
    return next(routing.plan for routing in hostile_routings(tile=16, device=DEVICE) if routing.name == name)


def assert_quantized(data: Tensor, scale: Tensor, values: Tensor, block: tuple[int, int]) -> None:
    """To the bit what `quantize` gives; interpreted, but for ties and what should be a power of two."""
    expected = quantize(values, block)
    assert_equal(scale, expected.scale)
    found, right = data.float(), expected.data.float()
    differs = ~((found == right) | (found.isnan() & right.isnan()))
    if INTERPRETED:
        divided = values.float() / scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        is_tie = (divided - found).abs() == (divided - right).abs()
        differs &= ~is_tie & ~((found * 2 == right) & (right.abs().frexp()[0] == 0.5))
    assert not differs.any()


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE], ids=str)
@pytest.mark.parametrize("count", [1, 33, 64])
def test_rows_are_quantized(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = (torch.randn(count, D + 8, device=DEVICE) * torch.rand(count, 1, device=DEVICE).exp()).to(dtype)[:, :D]
    values[0, :128] = 0
    launch, found = rows_launch(values)
    launch.run()
    assert_quantized(*found, values, ROWS)


def test_rows_that_are_not_finite() -> None:
    values = torch.ones(3, D, device=DEVICE)
    values[0, 5], values[1, 130], values[2, 131] = float("nan"), float("inf"), -float("inf")
    launch, found = rows_launch(values)
    launch.run()
    found_values = found.data.float() * found.scale.repeat_interleave(128, 1)
    expected = quantize(values, ROWS).dense(torch.float32)
    assert_equal(found_values.isfinite(), expected.isfinite())
    assert_equal(found_values[expected.isfinite()], expected[expected.isfinite()])


@pytest.mark.parametrize("turned", [False, True])
def test_weights_are_quantized_once_for_both_contractions(turned: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, D, N, device=DEVICE).to(DTYPE)
    weight[1, :128] = 0
    launch, data, other = weight_launch(turn(weight) if turned else weight)
    launch.run()
    assert_quantized(data.data, data.scale, weight, WEIGHTS)
    assert_equal(other.data.float(), data.data.float().transpose(1, 2))
    assert_equal(other.scale, data.scale.transpose(1, 2))


def assert_backends_agree(
    plan: RoutingPlan, activation: str, gate_up: str, bias: bool, turned: bool, dtype: torch.dtype
) -> None:
    """Each GEMM by itself, on the same operands."""
    spec = activation_spec(activation, gate_up, None, None)
    given = make_inputs(plan, D, N, activation, dtype=dtype, bias=bias)
    x, w1, w2, b1, b2 = given["x"], given["w1"], given["w2"], given.get("b1"), given.get("b2")
    s, do = given["scores"].reshape(-1), torch.randn_like(given["x"])
    w1, w2 = (turn(w1), turn(w2)) if turned else (w1, w2)
    rows = slice(0, int(plan.row_start_of_expert[-1]))
    ours, exact = TritonFp8Backend(), TorchFp8Backend()
    limit = 3e-6 if dtype == torch.float32 else 1e-3 if dtype == torch.float16 else 6e-3

    def compare(name: str, found: Tensor, expected: Tensor) -> None:
        assert found.shape == expected.shape, name
        assert rows.stop == 0 or relative_error(found[rows], expected[rows]) < limit, name

    (a, h), (a_expected, h_expected) = (each.up_proj_act(x, w1, b1, plan, spec) for each in (ours, exact))
    compare("h", h, h_expected)
    compare("a", a, a_expected)
    compare("a of inference", ours.up_proj_act_inference(x, w1, b1, plan, spec), a_expected)
    a = a_expected.nan_to_num()  # past R, anything
    compare("y", ours.down_proj(a, w2, b2, plan), exact.down_proj(a, w2, b2, plan))
    half = slice(128, 256)
    bias_half = None if b2 is None else b2[:, half]
    compare("columns of y", ours.down_proj_inference(a, w2[:, half], bias_half, plan),
            exact.down_proj(a, w2[:, half], bias_half, plan))  # fmt: skip
    found, expected = (each.down_proj_dgrad_dact(do, w2, b2, h_expected, s, plan, spec) for each in (ours, exact))
    compare("dh", found[0], expected[0])
    assert rows.stop == 0 or relative_error(found[1], expected[1]) < max(limit, 1e-5)
    compare("a_scaled", found[2], expected[2])
    dh = expected[0].nan_to_num()
    compare("dx_rows", ours.up_proj_dgrad(dh, w1, plan), exact.up_proj_dgrad(dh, w1, plan))


@pytest.mark.usefixtures("quantized_by_torch")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gemms_are_those_of_the_torch_backend(case: tuple[str, str, bool, bool, torch.dtype]) -> None:
    torch.manual_seed(0)
    ids = torch.rand(24, 4, device=DEVICE).topk(2, 1).indices
    assert_backends_agree(plan_topk(ids, 4), *case)


@pytest.mark.usefixtures("quantized_by_torch")
@pytest.mark.parametrize("name", ROUTINGS)
def test_hostile_routings(name: str) -> None:
    assert_backends_agree(plan_named(name), *CASES[ROUTINGS.index(name) % len(CASES)])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter computes the same way each time")
def test_twice_the_same_bits() -> None:
    torch.manual_seed(0)
    plan, spec = plan_named("random"), activation_spec("swiglu", "concatenated", None, None)
    given = make_inputs(plan, D, N, "swiglu", dtype=DTYPE)
    first, again = (TritonFp8Backend().up_proj_act(given["x"], given["w1"], None, plan, spec) for _ in range(2))
    rows = int(plan.row_start_of_expert[-1])
    assert_equal([t[:rows] for t in first], [t[:rows] for t in again])
