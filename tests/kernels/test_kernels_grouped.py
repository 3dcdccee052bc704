"""The torch backend's grouped products against a loop in fp64, on every stride order and alignment; as on CPUs whose
16-bit GEMMs are fast, and as on the others. The whole backend on every routing: tests/ops/test_ops_values.py.

E experts · R_max row capacity · p, q widths
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.formats import dense
from tilemoe.kernels.experts.torch import grouped as grouped_module
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.experts.torch.grouped import expert_of_row, outer_per_expert, rows_times_experts
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.testing import ERROR_CAPS, assert_equal, hostile_routings, make_inputs, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PLANS = {routing.name: routing.plan for routing in hostile_routings()}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True, params=[True, False], ids=["fast in 16 bits", "slow in 16 bits"])
def fast_in_16_bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_fast_gemm(device_type: str, dtype: torch.dtype) -> bool:
        return request.param or dtype.itemsize > 2

    monkeypatch.setattr(grouped_module, "has_fast_gemm", has_fast_gemm)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spans(plan: RoutingPlan) -> Iterator[tuple[int, slice]]:
    starts = plan.row_start_of_expert.tolist()
    return ((expert, slice(starts[expert], starts[expert + 1])) for expert in range(plan.num_experts))


def rows_of(plan: RoutingPlan, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """(R_max, width), NaN past R."""
    rows = normal(plan.capacity, width, dtype=dtype, seed=seed)
    rows[int(plan.row_start_of_expert[-1]) :] = float("nan")
    return rows


def weights_of_every_stride(dtype: torch.dtype, p: int, q: int) -> dict[str, Tensor]:
    experts = PLANS["random"].num_experts
    plain = normal(experts, p, q, dtype=dtype)
    padded = torch.full((experts, p + 3, q + 1), float("nan"), dtype=dtype)
    padded[:, :p, :q] = plain
    shifted = torch.full((plain.numel() + 1,), float("nan"), dtype=dtype)
    shifted[1:] = plain.flatten()
    last = torch.full((p, q, experts), float("nan"), dtype=dtype)
    last.copy_(plain.permute(1, 2, 0))
    return {
        "contiguous": plain, "transposed": plain.transpose(1, 2).contiguous().transpose(1, 2),
        "padded": padded[:, :p, :q], "misaligned": shifted[1:].view(experts, p, q),
        "experts last": last.permute(2, 0, 1),
        "every second": torch.stack([plain, plain.new_full(plain.shape, float("nan"))], 1).flatten(0, 1)[::2],
        "backed by one expert": plain[:1].expand(experts, p, q),
        "backed by one row": plain[:, :1].expand(experts, p, q),
        "backed by one column": plain[:, :, :1].expand(experts, p, q),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("p", "q"), [(16, 8), (8, 24), (5, 3), (1, 8), (8, 1)])
def test_weights_of_any_strides(dtype: torch.dtype, p: int, q: int) -> None:
    plan = PLANS["random"]
    rows = rows_of(plan, p, dtype)
    for name, weight in weights_of_every_stride(dtype, p, q).items():
        out = rows_times_experts(rows, weight, None, plan)
        for expert, span in spans(plan):
            exact = rows[span].double() @ weight[expert].double()
            assert relative_error(out[span], exact) < ERROR_CAPS[dtype], f"{name}, expert {expert}"


@pytest.mark.parametrize(
    ("dtype", "p", "q", "grouped"),
    [
        (torch.bfloat16, 8, 8, True),
        (torch.bfloat16, 8, 5, False),
        (torch.bfloat16, 4, 8, False),
        (torch.float32, 4, 4, True),
        (torch.float16, 16, 24, True),
        (torch.float64, 8, 8, False),
    ],
    ids=str,
)
def test_grouped_mm_serves_what_it_can(
    dtype: torch.dtype, p: int, q: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    grouped_mm = F.grouped_mm

    def count(*args: Tensor, **kwargs: Tensor) -> Tensor:
        calls.append(args)
        return grouped_mm(*args, **kwargs)

    monkeypatch.setattr(F, "grouped_mm", count)
    monkeypatch.setattr(grouped_module, "_GROUPED_DTYPES_OF_CPU", grouped_module._GROUPED_DTYPES)  # as on a GPU
    plan = PLANS["random"]
    weight = normal(plan.num_experts, p, q, dtype=dtype)
    for strided in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        calls.clear()
        rows_times_experts(rows_of(plan, p, dtype), strided, None, plan)
        if strided.is_contiguous() or p == q:
            assert len(calls) == grouped
        assert all(args[1].data_ptr() == strided.data_ptr() for args in calls), "weights are used where they are"
    calls.clear()
    for name in ("misaligned", "backed by one row", "backed by one column"):
        rows_times_experts(rows_of(plan, p, dtype), weights_of_every_stride(dtype, p, q)[name], None, plan)
    assert not calls, "what a GPU's grouped_mm refuses is left to the loop"


def test_expert_of_row() -> None:
    for name, plan in PLANS.items():
        expected = [expert for expert, span in spans(plan) for _ in range(span.stop - span.start)]
        got = expert_of_row(plan)
        assert got.dtype == torch.int32
        assert got[: len(expected)].tolist() == expected, name
        assert ((got >= 0) & (got < plan.num_experts)).all(), f"{name}: rows past R must stay in range"


@pytest.mark.parametrize("fast_in_16_bits", [False], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_slow_products_are_made_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    for plan in PLANS.values():
        num_rows, index = int(plan.row_start_of_expert[-1]), torch.arange(plan.capacity).flip(0)
        rows, other = rows_of(plan, 48, dtype), rows_of(plan, 40, dtype, seed=1)
        weight, bias = normal(plan.num_experts, 48, 40, dtype=dtype), normal(plan.num_experts, 40, dtype=dtype)
        start = normal(plan.num_experts, 48, 40, dtype=torch.float32)
        product, outer = torch.zeros(num_rows, 40), torch.zeros(plan.num_experts, 48, 40)
        for expert, span in spans(plan):
            product[span] = rows[span].float() @ weight[expert].float()
            outer[expert] = rows[span].float().T @ other[span].float()
        biased = product + bias.float()[expert_of_row(plan)[:num_rows].long()]
        assert torch.equal(rows_times_experts(rows, weight, None, plan)[:num_rows], product.to(dtype))
        assert torch.equal(rows_times_experts(rows, weight, bias, plan)[:num_rows], biased.to(dtype))
        assert torch.equal(rows_times_experts(rows[index], weight, None, plan, index)[:num_rows], product.to(dtype))
        assert torch.equal(outer_per_expert(rows, other, plan), outer.to(dtype))
        assert torch.equal(outer_per_expert(rows[index], other, plan, left_index=index), outer.to(dtype))
        assert torch.equal(outer_per_expert(rows, other, plan, out=start.clone()), start + outer)


@pytest.mark.parametrize("fast_in_16_bits", [True], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_cpu_gemms_of_16_bit_meet_few_shapes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN compiles a kernel for every shape it has not met: whatever the routing, the row counts must recur."""
    shapes = set()
    mm = torch.mm

    def record(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        shapes.add((tuple(left.shape), tuple(right.shape)))
        return mm(left, right, out=out)

    monkeypatch.setattr(torch, "mm", record)
    for count in range(1, 700):
        plan = plan_topk(torch.tensor([0] * count + [1] * 16)[:, None], 2)  # the last expert's rows end the buffer
        rows, weight = normal(count + 16, 8, dtype=dtype, seed=count), normal(2, 8, 8, dtype=dtype)
        out, outer = rows_times_experts(rows, weight, None, plan), outer_per_expert(rows, rows, plan)
        for expert, span in spans(plan):
            assert relative_error(out[span], rows[span].double() @ weight[expert].double()) < ERROR_CAPS[dtype]
            assert relative_error(outer[expert], rows[span].double().T @ rows[span].double()) < ERROR_CAPS[dtype]
    assert len(shapes) <= 2 * -(-700 // 16), "one per multiple of 16 rows and kind of product"


def run_all(dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Operands, and what each method of the backend makes of them."""
    ks, plan, spec = TorchBackend(), PLANS["random"], activation_spec("swiglu", "concatenated", None, None)
    given = make_inputs(plan, 16, 8, dtype=dtype, bias=True)
    given = {**given, "do": normal(*given["x"].shape, dtype=dtype, seed=9), "s": given["scores"].reshape(-1)}
    x, w1, w2, do, s = (given[name] for name in ("x", "w1", "w2", "do", "s"))
    before = {name: tensor.clone() for name, tensor in given.items()}
    a, h = ks.up_proj_act(x, w1, given["b1"], plan, spec)
    y, o, dx = ks.down_proj(a, w2, given["b2"], plan), torch.empty_like(x), torch.empty_like(x)
    kept = {"h": h.clone(), "y": y.clone()}
    ks.combine(y, s, plan, o)
    dh, ds, a_scaled = ks.down_proj_dgrad_dact(do, w2, given["b2"], h, s, plan, spec)
    ks.combine_grad(ks.up_proj_dgrad(dh, w1, plan), plan, dx)
    found = {"a": a, "h": h, "y": y, "o": o, "dh": dh, "ds": ds, "a_scaled": a_scaled, "dx": dx}
    found |= {"dw2": ks.down_proj_wgrad(do, a_scaled, plan), "dw1": ks.up_proj_wgrad(x, dh, plan)}
    found |= {"db2": ks.down_proj_bias_grad(do, s, plan), "db1": ks.up_proj_bias_grad(dh, plan)}
    assert_equal({**given, "h": h, "y": y}, {**before, **kept}, "operands stay as they are")
    return given, found


@pytest.mark.parametrize("block_bytes", [1, 200, 4 * 2 * 8 * 3])
def test_blocks_of_rows_fit_together_and_operands_stay(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_all(torch.bfloat16)
    monkeypatch.setattr(dense, "_BLOCK_BYTES", block_bytes)
    torch.testing.assert_close(run_all(torch.bfloat16), whole)  # a sum over n may be split otherwise: not bit-equal
