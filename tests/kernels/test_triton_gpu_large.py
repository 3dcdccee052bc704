"""Tensors of more than 2^31 elements: an offset that is kept in 32 bits would wrap around.

Rows, tokens and columns are sampled, and computed again in fp32 from what the kernel read.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · R routed rows
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tilemoe.activations import activation_spec
from tilemoe.kernels.choose import choose_experts
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.testing import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

BF16 = torch.bfloat16
TOLERANCE = 4e-3
LIMIT = 2**31
T, D, N, E, K = 1_100_000, 2048, 512, 6, 4
SMALL = 300  # rows of the last expert, which lie at the end of everything
COLUMNS = torch.tensor([0, 1, 7, 300, 511])  # of n, and so of d


@pytest.fixture(autouse=True)
def _all_memory() -> Iterator[None]:
    """What other tests left cached is needed here, and the other way round."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture(params=["triton", "chosen"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The portable kernels, and those that are chosen on this GPU: Hopper's wherever they can compute."""
    if request.param == "triton":
        return backend_named("triton")
    chosen = choose_experts(torch.device("cuda"), BF16, (D, N)).impl
    if chosen.name == "hopper":
        monkeypatch.setattr("tilemoe.kernels.experts.hopper.configs.why_slower", lambda *widths: None)
    return chosen


def experts_of(token: Tensor) -> Tensor:
    """(S, K): K neighbours of all experts but the last, which has the last SMALL tokens instead of their last one."""
    ids = (token[:, None] + torch.arange(K, device="cuda")) % (E - 1)
    ids[token >= T - SMALL, -1] = E - 1
    return ids


def make_plan() -> RoutingPlan:
    return plan_topk(experts_of(torch.arange(T, device="cuda")), E)


def sample_rows(num_rows: int) -> Tensor:
    """(S,) int64: both ends, both sides of the element 2^31 for widths d, n and 2n, and some in between."""
    edges = [LIMIT // width + offset for width in (D, N, 2 * N) for offset in range(-3, 3)]
    fixed = torch.tensor([0, 1, *(edge for edge in edges if edge < num_rows), num_rows - 2, num_rows - 1])
    return torch.cat([fixed, torch.randint(0, num_rows, (200,), generator=torch.Generator().manual_seed(0))]).cuda()


def times_weight(rows: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """(S, q) fp32: rows (S, p) times weight (E, p, q), each by its expert (S,)."""
    out = rows.new_empty(rows.shape[0], weight.shape[2], dtype=torch.float32)
    for each in expert.unique().tolist():
        out[expert == each] = rows[expert == each].float() @ weight[each].float()
    return out


def assert_close(actual: Tensor, exact: Tensor) -> None:
    assert actual.shape == exact.shape
    assert relative_error(actual, exact.double()) <= TOLERANCE


def assert_written(*tensors: Tensor) -> None:
    """No element is NaN, as unwritten memory is."""
    for tensor in tensors:
        assert all(bool(part.isfinite().all()) for part in tensor.split(1 << 18))


def test_rows_and_tokens_beyond_32_bits(kernels: Backend) -> None:
    assert T * D > LIMIT
    assert T * K * N > LIMIT
    torch.manual_seed(0)
    plan, spec = make_plan(), activation_spec("swiglu", "concatenated", None, None)
    starts = plan.row_start_of_expert
    assert int(starts[-1]) == T * K
    assert int(starts[-1] - starts[-2]) == SMALL
    x = torch.randn(T, D, device="cuda", dtype=BF16)
    do = torch.randn(T, D, device="cuda", dtype=BF16)
    w1 = torch.randn(E, 2 * N, D, device="cuda", dtype=BF16) * D**-0.5
    w2 = torch.randn(E, D, N, device="cuda", dtype=BF16) * N**-0.5
    s = torch.rand(T * K, device="cuda") + 0.25
    row = sample_rows(T * K)
    expert = torch.bucketize(row, starts[1:].long(), right=True)
    token, pair = plan.token_of_row[row].long(), plan.pair_of_row[row].long()
    some_token = torch.cat([token[:100], torch.arange(T - 3, T, device="cuda")])

    a, h = kernels.up_proj_act(x, w1, None, plan, spec)
    assert isinstance(a, Tensor)
    assert_written(a, h)
    assert_close(h[row], times_weight(x[token], w1.transpose(1, 2), expert))
    gate, up = h[row].float().chunk(2, dim=1)
    assert_close(a[row], torch.nn.functional.silu(gate) * up)
    y = kernels.down_proj(a, w2, None, plan)
    del a
    assert_written(y)
    rows_of_token = plan.row_of_pair.view(T, K)[some_token].long()
    o = torch.empty_like(x)
    kernels.combine(y, s, plan, o)
    assert_written(o)
    assert_close(o[some_token], (y[rows_of_token].float() * s.view(T, K)[some_token][..., None]).sum(1))
    fresh = kernels.up_proj_act_inference(x, w1, None, plan, spec)
    assert isinstance(fresh, Tensor)
    assert_close(y[row], times_weight(fresh[row], w2.transpose(1, 2), expert))
    del y, o, fresh

    dh, ds, a_scaled = kernels.down_proj_dgrad_dact(do, w2, None, h, s, plan, spec)
    assert_written(dh, ds, a_scaled)
    da = times_weight(do[token], w2, expert)
    sigmoid = torch.sigmoid(gate)
    value = gate * sigmoid
    assert_close(ds[pair], (da * value * up).sum(1))
    assert_close(a_scaled[row], s[pair][:, None] * value * up)
    dgate, dup = da * up * (sigmoid + value * (1 - sigmoid)), da * value
    assert_close(dh[row], s[pair][:, None] * torch.cat([dgate, dup], dim=1))
    del h
    dw2 = kernels.down_proj_wgrad(do, a_scaled, plan)
    dw1 = kernels.up_proj_wgrad(x, dh, plan)
    for each in (0, E - 1):  # a large expert, and the one at the end
        rows = slice(int(starts[each]), int(starts[each + 1]))
        tokens = plan.token_of_row[rows].long()
        columns = COLUMNS.cuda()
        assert_close(dw2[each][:, columns], do[tokens].float().T @ a_scaled[rows][:, columns].float())
        assert_close(dw1[each][:, columns], dh[rows].float().T @ x[tokens][:, columns].float())
    del a_scaled
    dx_rows = kernels.up_proj_dgrad(dh, w1, plan)
    assert_written(dx_rows)
    assert_close(dx_rows[row], times_weight(dh[row], w1, expert))
    dx = torch.empty_like(x)
    kernels.combine_grad(dx_rows, plan, dx)
    assert_written(dx)
    assert_close(dx[some_token], dx_rows[rows_of_token].float().sum(1))


def test_weights_beyond_32_bits(kernels: Backend) -> None:
    d, n, experts, tokens = 2048, 512, 2080, 4000
    assert experts * n * d > LIMIT
    torch.manual_seed(0)
    ids = torch.stack([torch.arange(tokens) % 3 + experts - 3, torch.arange(tokens) % experts], dim=1).cuda()
    plan, spec = plan_topk(ids, experts), activation_spec("swiglu", "concatenated", None, None)
    x = torch.randn(tokens, d, device="cuda", dtype=BF16)
    w1 = torch.randn(experts, 2 * n, d, device="cuda", dtype=BF16).mul_(d**-0.5)
    w2 = torch.randn(experts, d, n, device="cuda", dtype=BF16).mul_(n**-0.5)
    row = torch.arange(0, plan.capacity, 37, device="cuda")
    expert = torch.bucketize(row, plan.row_start_of_expert[1:].long(), right=True)
    token = plan.token_of_row[row].long()
    a, h = kernels.up_proj_act(x, w1, None, plan, spec)
    assert isinstance(a, Tensor)
    assert_close(h[row], times_weight(x[token], w1.transpose(1, 2), expert))
    assert_close(kernels.down_proj(a, w2, None, plan)[row], times_weight(a[row], w2.transpose(1, 2), expert))
    assert_close(kernels.up_proj_dgrad(h, w1, plan)[row], times_weight(h[row], w1, expert))
    dw1, dw2 = kernels.up_proj_wgrad(x, h, plan), kernels.down_proj_wgrad(x, a, plan)
    assert_written(dw1, dw2)
    for each in (0, experts - 4, experts - 1):
        rows = slice(*plan.row_start_of_expert[each : each + 2].tolist())
        tokens_of_expert = plan.token_of_row[rows].long()
        assert_close(dw1[each], h[rows].float().T @ x[tokens_of_expert].float())
        assert_close(dw2[each], x[tokens_of_expert].float().T @ a[rows].float())
