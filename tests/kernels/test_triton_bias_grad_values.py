"""The gradients of the biases, and b2's share of the scores', in Triton's interpreter.

T tokens · d hidden_size · n intermediate_size · E experts · w = 2n gated, n ungated
"""

import pytest
import torch
from triton_checks import OF_FP32, TOLERANCE, Case, assert_kernels_agree, interpret, normal

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.testing import hostile_routings, make_inputs

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.usefixtures("poisoned_memory")]

D, N = 40, 24
ROUTINGS = {routing.name: routing.plan for routing in hostile_routings(tile=16)}


ACCESSES = ("pointer", "descriptor")


@pytest.fixture(params=ACCESSES, autouse=True)
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    interpret(monkeypatch, 90 if request.param == "descriptor" else 0)
    return str(request.param)


CASES = [
    Case(torch.float16, "relu", bias=True, hidden_size=D, intermediate_size=N),
    Case(torch.float32, "relu", bias=True, transposed=True, hidden_size=D + 8, intermediate_size=N),
]


@pytest.mark.parametrize(
    ("access", "case"),
    [
        pytest.param(access, case, marks=pytest.mark.thorough if i != j else ())
        for i, access in enumerate(ACCESSES)
        for j, case in enumerate(CASES)
    ],
    indirect=["access"],
    ids=str,
)
def test_pairs_that_were_given_several_times(case: Case) -> None:
    """More often than a tile has rows, at the end of one, and beside others; by top-K, too."""
    token = torch.tensor([3] * 37 + [5, 5, 4, 6, 6, 6] + list(range(16)) * 2)
    expert = torch.tensor([1] * 37 + [1, 1, 1, 0, 2, 2] + [2] * 32)
    shuffled = torch.randperm(len(token), generator=torch.Generator().manual_seed(0))
    for plan in (
        plan_pairs(token[shuffled], expert[shuffled], 17, 4),
        plan_topk(torch.tensor([[1, 1, 1], [0, 2, 0], [2, 2, 9], [9, 1, 9]]), 3),
    ):
        assert_kernels_agree(TritonBackend(), plan, case, TOLERANCE[case.dtype])


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.thorough), 1e-3])
def test_many_experts_and_small_scores_in_fp16(scale: float) -> None:
    """The lower of a small score's two parts would be below fp16's least number."""
    plan = plan_topk(torch.stack([torch.arange(40) * 7 % 130, torch.arange(40) * 11 % 130 // 2], dim=1), 130)
    do, dh = normal(plan.num_tokens, D, dtype=torch.float16), normal(plan.capacity, N, dtype=torch.float16, seed=1)
    s, exact = scale * torch.rand(plan.num_pairs), TorchBackend()
    for found, expected in (
        (TritonBackend().down_proj_bias_grad(do, s, plan), exact.down_proj_bias_grad(do.double(), s.double(), plan)),
        (TritonBackend().up_proj_bias_grad(dh, plan), exact.up_proj_bias_grad(dh.double(), plan)),
    ):
        assert found.dtype == torch.float32
        assert float((found.double() - expected).norm()) <= OF_FP32 * float(expected.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_any_strides_give_the_same(dtype: torch.dtype) -> None:
    plan, spec = ROUTINGS["sentinels"], activation_spec("relu", "concatenated", None, None)
    given = make_inputs(plan, D, N, "relu", dtype=dtype, bias=True)
    s, b2, do = given["scores"].reshape(-1), given["b2"], normal(plan.num_tokens, D, dtype=dtype)
    h, dh = torch.zeros(plan.capacity, N, dtype=dtype), normal(plan.capacity, N, dtype=dtype)
    same_rows = b2[:1].expand_as(b2)
    expected = TritonBackend().down_proj_dgrad_dact(do, given["w2"], b2, h, s, plan, spec)[1]
    of_same_rows = TritonBackend().down_proj_dgrad_dact(do, given["w2"], same_rows.contiguous(), h, s, plan, spec)[1]
    db2, db1 = TritonBackend().down_proj_bias_grad(do, s, plan), TritonBackend().up_proj_bias_grad(dh, plan)
    wide = torch.full((plan.num_experts, 2 * D + 1), float("nan"), dtype=dtype)
    wide[:, 1 : D + 1] = b2
    for bias, ds in ((b2.t().contiguous().t(), expected), (wide[:, 1 : D + 1], expected), (same_rows, of_same_rows)):
        assert torch.equal(TritonBackend().down_proj_dgrad_dact(do, given["w2"], bias, h, s, plan, spec)[1], ds)
    for view in (lambda t: t.t().contiguous().t(), lambda t: torch.cat([t, t[:, :3]], dim=1)[:, : t.shape[1]]):
        assert torch.equal(TritonBackend().down_proj_bias_grad(view(do), s, plan), db2)
        assert torch.equal(TritonBackend().up_proj_bias_grad(view(dh), plan), db1)
        assert torch.equal(
            TritonBackend().down_proj_dgrad_dact(view(do), given["w2"], b2, h, s, plan, spec)[1], expected
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_nan_of_dh_reaches_its_column(dtype: torch.dtype) -> None:
    plan = ROUTINGS["random"]
    dh = normal(plan.capacity, N, dtype=dtype)
    dh[0, 5] = float("nan")
    db1 = TritonBackend().up_proj_bias_grad(dh, plan)
    expert = int((plan.row_start_of_expert[1:] > 0).nonzero()[0])  # whose the first row is
    assert db1.isnan().nonzero().tolist() == [[expert, 5]]


def test_scores_of_a_token_that_no_expert_has_change_nothing() -> None:
    plan = ROUTINGS["sentinels"]
    s = torch.ones(plan.num_pairs)
    do = normal(plan.num_tokens, D, dtype=torch.float32)
    expected = TritonBackend().down_proj_bias_grad(do, s, plan)
    num_rows = int(plan.row_start_of_expert[-1])
    used = torch.zeros(plan.num_pairs, dtype=torch.bool)
    used[plan.pair_of_row[:num_rows].long()] = True
    assert not bool(used.all())
    s[~used] = float("nan")
    assert torch.equal(TritonBackend().down_proj_bias_grad(do, s, plan), expected)
