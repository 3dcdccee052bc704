"""Each method of the torch backend by itself, against its formula, row by row in fp64.

T tokens · d hidden_size · n intermediate_size · E experts · R routed rows · w = 2n gated, n ungated
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec, activation_spec
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats import dense
from tilemoe.kernels.experts.formats.dense import compute_dtype
from tilemoe.kernels.experts.torch import backend as mlp
from tilemoe.kernels.experts.torch import grouped
from tilemoe.kernels.experts.torch.grouped import expert_of_row
from tilemoe.plan import RoutingPlan
from tilemoe.reference import activation
from tilemoe.testing import ERROR_CAPS, hostile_routings, make_inputs, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PLANS = {routing.name: routing.plan for routing in hostile_routings()}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
D, N = 16, 8
NAN = float("nan")


@dataclass
class Case:
    """Inputs of all kernels in one dtype, rows past R and what may not be read NaN; and row-wise views in fp64."""

    plan: RoutingPlan
    spec: ActivationSpec
    given: dict[str, Tensor]
    do: Tensor

    def __post_init__(self) -> None:
        plan = self.plan
        self.num_rows = int(plan.row_start_of_expert[-1])
        self.token = plan.token_of_row[: self.num_rows].long()
        self.expert = expert_of_row(plan)[: self.num_rows].long()
        self.pair = plan.pair_of_row[: self.num_rows].long()
        self.s = self.given["scores"].reshape(-1)

    def row_tensor(self, width: int, dtype: torch.dtype, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(self.plan.capacity, width, generator=generator, dtype=torch.float64).to(dtype)
        rows[self.num_rows :] = NAN
        return rows

    def exact(self, name: str) -> Tensor:
        return self.given[name].double()

    def sum_by(self, index: Tensor, rows: Tensor, size: int) -> Tensor:
        return torch.zeros(size, *rows.shape[1:], dtype=torch.float64).index_add(0, index, rows)


def make_case(name: str, dtype: torch.dtype, act: str = "swiglu", gate_up: str = "concatenated") -> Case:
    plan = PLANS[name]
    do = torch.randn(plan.num_tokens, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)
    inputs = make_inputs(plan, D, N, act, dtype=dtype, bias=True)
    return Case(plan, activation_spec(act, gate_up, None, None), inputs, do)


def assert_close(name: str, actual: Tensor, exact: Tensor, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    assert actual.dtype == out_dtype, name
    assert actual.shape == exact.shape, name
    assert actual.isfinite().all(), name
    if exact.any():
        assert relative_error(actual, exact) < ERROR_CAPS[dtype], name
    else:
        assert not actual.any(), name


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """For every other routing on a CPU whose 16-bit GEMMs are slow."""
    case = request.node.callspec.params
    is_fast = (list(PLANS).index(case["name"]) + DTYPES.index(case["dtype"])) % 2 == 0
    monkeypatch.setattr(grouped, "has_fast_gemm", lambda device_type, dtype: is_fast or dtype.itemsize > 2)
    return mlp.TorchBackend()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_forward_kernels(kernels: Backend, name: str, dtype: torch.dtype) -> None:
    for act, gate_up in (("swiglu", "concatenated"), ("geglu", "interleaved"), ("relu2", "concatenated")):
        c = make_case(name, dtype, act, gate_up)
        x, w1, w2, b1, b2 = (c.given[key] for key in ("x", "w1", "w2", "b1", "b2"))
        for bias in (None, b1):
            a, h = kernels.up_proj_act(x, w1, bias, c.plan, c.spec)
            assert h.shape == (c.plan.capacity, w1.shape[1])
            assert a.shape == (c.plan.capacity, N)
            exact_h = torch.einsum("rd,rwd->rw", c.exact("x")[c.token], c.exact("w1")[c.expert])
            exact_h = exact_h if bias is None else exact_h + c.exact("b1")[c.expert]
            assert_close("h", h[: c.num_rows], exact_h, dtype, dtype)
            exact_a = activation(h[: c.num_rows].double(), act, gate_up)
            assert_close("a", a[: c.num_rows], exact_a, dtype, dtype)
            inference = kernels.up_proj_act_inference(x, w1, bias, c.plan, c.spec)
            assert torch.equal(inference[: c.num_rows], a[: c.num_rows])
        a = c.row_tensor(N, dtype, 1)
        for bias in (None, b2):
            y = kernels.down_proj(a, w2, bias, c.plan)
            exact_y = torch.einsum("rn,rdn->rd", a[: c.num_rows].double(), c.exact("w2")[c.expert])
            exact_y = exact_y if bias is None else exact_y + c.exact("b2")[c.expert]
            assert_close("y", y[: c.num_rows], exact_y, dtype, dtype)
        y = c.row_tensor(D, dtype, 2)
        for s in (c.s, c.s.double()):
            o = torch.empty(c.plan.num_tokens, D, dtype=dtype)
            kernels.combine(y, s, c.plan, o)
            exact_rows = y[: c.num_rows].double() * s.double()[c.pair][:, None]
            assert_close("o", o, c.sum_by(c.token, exact_rows, c.plan.num_tokens), dtype, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_backward_kernels(kernels: Backend, name: str, dtype: torch.dtype) -> None:
    wide = compute_dtype(dtype)
    for act, gate_up in (("swiglu", "interleaved"), ("swiglu_oai", "concatenated"), ("gelu", "concatenated")):
        c = make_case(name, dtype, act, gate_up)
        rows, do_rows = slice(0, c.num_rows), c.do.double()[c.token]
        s_row = c.s.double()[c.pair][:, None]
        h = c.row_tensor(c.given["w1"].shape[1], dtype, 3)
        exact_h = h[rows].double().requires_grad_()
        a = activation(exact_h, act, gate_up)
        da_unscaled = torch.einsum("rd,rdn->rn", do_rows, c.exact("w2")[c.expert])
        (exact_dh,) = torch.autograd.grad(a, exact_h, s_row * da_unscaled)
        for bias in (None, c.given["b2"]):
            dh, ds, a_scaled = kernels.down_proj_dgrad_dact(c.do, c.given["w2"], bias, h, c.s, c.plan, c.spec)
            ds_row = (da_unscaled * a.detach()).sum(1)
            if bias is not None:
                ds_row = ds_row + (do_rows * c.exact("b2")[c.expert]).sum(1)
            exact_ds = torch.zeros(c.plan.num_pairs, dtype=torch.float64).index_put((c.pair,), ds_row)
            assert_close("dh", dh[rows], exact_dh, dtype, dtype)
            assert_close("ds", ds, exact_ds, dtype, wide)
            assert_close("a_scaled", a_scaled[rows], s_row * a.detach(), dtype, dtype)
        experts, a_scaled = c.plan.num_experts, c.row_tensor(N, dtype, 4)
        dw2 = kernels.down_proj_wgrad(c.do, a_scaled, c.plan)
        outer = do_rows[:, :, None] * a_scaled[rows].double()[:, None, :]
        assert_close("dw2", dw2, c.sum_by(c.expert, outer, experts), dtype, dtype)
        transposed = kernels.down_proj_wgrad(c.do, a_scaled, c.plan, column_major=True)
        assert_close("dw2, column-major", transposed, c.sum_by(c.expert, outer, experts), dtype, dtype)
        assert transposed.stride() == (D * N, 1, D)
        dh = h  # any rows will do
        dx_rows = kernels.up_proj_dgrad(dh, c.given["w1"], c.plan)
        exact_rows = torch.einsum("rw,rwd->rd", dh[rows].double(), c.exact("w1")[c.expert])
        assert_close("dx_rows", dx_rows[rows], exact_rows, dtype, dtype)
        dw1 = kernels.up_proj_wgrad(c.given["x"], dh, c.plan)
        outer = dh[rows].double()[:, :, None] * c.exact("x")[c.token][:, None, :]
        assert_close("dw1", dw1, c.sum_by(c.expert, outer, experts), dtype, dtype)
        transposed = kernels.up_proj_wgrad(c.given["x"], dh, c.plan, column_major=True)
        assert_close("dw1, column-major", transposed, c.sum_by(c.expert, outer, experts), dtype, dtype)
        assert transposed.stride() == (dw1.shape[1] * D, 1, dw1.shape[1])
        dx_rows = c.row_tensor(D, dtype, 5)
        dx = torch.empty(c.plan.num_tokens, D, dtype=dtype)
        kernels.combine_grad(dx_rows, c.plan, dx)
        assert_close("dx", dx, c.sum_by(c.token, dx_rows[rows].double(), c.plan.num_tokens), dtype, dtype)
        db2 = kernels.down_proj_bias_grad(c.do, c.s, c.plan)
        assert_close("db2", db2, c.sum_by(c.expert, s_row * do_rows, experts), dtype, wide)
        db1 = kernels.up_proj_bias_grad(dh, c.plan)
        assert_close("db1", db1, c.sum_by(c.expert, dh[rows].double(), experts), dtype, wide)


@pytest.mark.parametrize("block_bytes", [1, 200, 4 * 2 * N * 3])
def test_blocks_of_rows_fit_together(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    c = make_case("random", torch.bfloat16)
    x, w1, w2, b1 = (c.given[key] for key in ("x", "w1", "w2", "b1"))

    def run() -> tuple[Tensor, ...]:
        a, h = mlp.TorchBackend().up_proj_act(x, w1, b1, c.plan, c.spec)
        return (a, h, *mlp.TorchBackend().down_proj_dgrad_dact(c.do, w2, None, h, c.s, c.plan, c.spec))

    whole = run()
    monkeypatch.setattr(dense, "_BLOCK_BYTES", block_bytes)
    for one, other in zip(whole, run(), strict=True):
        torch.testing.assert_close(one, other)  # a sum over n may be split otherwise: not bit-equal


def test_kernels_leave_their_inputs_alone() -> None:
    c = make_case("random", torch.float32)
    h, y = c.row_tensor(2 * N, torch.float32, 0), c.row_tensor(D, torch.float32, 1)
    tensors = {**c.given, "do": c.do, "h": h, "y": y}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    versions = {name: tensor._version for name, tensor in tensors.items()}
    ks, given = mlp.TorchBackend(), c.given
    ks.up_proj_act(given["x"], given["w1"], given["b1"], c.plan, c.spec)
    ks.down_proj_dgrad_dact(c.do, given["w2"], given["b2"], h, c.s, c.plan, c.spec)
    ks.combine(y, c.s, c.plan, torch.empty_like(given["x"]))
    ks.combine_grad(y, c.plan, torch.empty_like(given["x"]))
    ks.up_proj_dgrad(h, given["w1"], c.plan)
    ks.up_proj_wgrad(given["x"], h, c.plan)
    ks.down_proj_bias_grad(c.do, c.s, c.plan)
    ks.up_proj_bias_grad(h, c.plan)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name
        assert tensor._version == versions[name], name
