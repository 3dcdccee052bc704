"""What the tests of the Triton kernels share, on a GPU and in the interpreter: one case against the torch set in fp64.

T tokens · d hidden_size · n intermediate_size · E experts · R routed rows · w = 2n gated, n ungated
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from tilemoe.activations import ActivationSpec, activation_spec
from tilemoe.config import GATED_ACTIVATIONS, UNGATED_ACTIVATIONS
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.dense import compute_dtype, is_column_major
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.experts.triton import backend as triton_backend
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device
from tilemoe.testing import make_inputs

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# Arithmetic of bf16 is wrong in the interpreter.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
ADDED = 2e-5  # of a sum in fp32 of what no 16-bit type has rounded
OF_FP32 = 3e-6 if INTERPRETED else 1.0  # likewise; a GPU's are bounded as all else is


@dataclass(frozen=True)
class Case:
    """How one run of all kernels is set up; ``transposed``: the weights are stored in the other stride order.

    limit: of swiglu_oai.
    """

    dtype: torch.dtype
    activation: str = "swiglu"
    gate_up: str = "concatenated"
    bias: bool = False
    transposed: bool = False
    hidden_size: int = 40
    intermediate_size: int = 24
    limit: float | None = None

    @property
    def spec(self) -> ActivationSpec:
        return activation_spec(self.activation, self.gate_up, self.limit, None)


# Activation and order of gate and up; an ungated activation has no gate to interleave.
LAYOUTS = [(name, layout) for name in sorted(GATED_ACTIVATIONS) for layout in ("concatenated", "interleaved")]
LAYOUTS += [(name, "concatenated") for name in sorted(UNGATED_ACTIVATIONS)]
# By venue; on a GPU by backend.
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {FP16: 1e-3, FP32: 3e-6} if INTERPRETED else {BF16: 4e-3, FP16: 6e-4, FP32: 1e-5}
CASES = {
    "interpreted": (
        Case(FP32, "swiglu", bias=True),
        Case(FP16, "swiglu_oai", "interleaved", bias=True, transposed=True),
        Case(FP32, "gelu", transposed=True),
        Case(FP16, "geglu", "interleaved", hidden_size=48),
        Case(FP32, "reglu", transposed=True, hidden_size=32, intermediate_size=64),
    ),
    "triton": (
        Case(BF16, hidden_size=320, intermediate_size=264),
        Case(BF16, "swiglu", "interleaved", bias=True, hidden_size=136, intermediate_size=72),
        Case(BF16, "swiglu_oai", bias=True, transposed=True, hidden_size=192, intermediate_size=128),
        Case(FP16, "geglu", "interleaved", bias=True, transposed=True, hidden_size=328, intermediate_size=256),
        Case(FP16, "relu2", hidden_size=128, intermediate_size=512),
        Case(FP32, "reglu", bias=True, hidden_size=264, intermediate_size=136),
        Case(FP32, "gelu_tanh", transposed=True, hidden_size=72, intermediate_size=264),
    ),
    "hopper": (
        Case(BF16, hidden_size=320, intermediate_size=264),
        Case(BF16, hidden_size=256, intermediate_size=512),
        Case(FP16, "geglu", hidden_size=328, intermediate_size=136),
        Case(FP16, "reglu", hidden_size=128, intermediate_size=64),
        Case(BF16, transposed=True, hidden_size=192, intermediate_size=128),
        Case(BF16, "swiglu_oai", bias=True, hidden_size=192, intermediate_size=128),
        Case(BF16, gate_up="interleaved", hidden_size=136, intermediate_size=128),
        Case(FP16, "relu2", hidden_size=128, intermediate_size=512),
    ),
}
CASES["blackwell"] = CASES["hopper"]
SMALL_CASES = (
    CASES["interpreted"]
    if INTERPRETED
    else (
        Case(BF16, hidden_size=512, intermediate_size=256),
        Case(BF16, "swiglu", "interleaved", bias=True, hidden_size=136, intermediate_size=72),
        Case(
            BF16, "swiglu_oai", "interleaved", bias=True, transposed=True, hidden_size=320, intermediate_size=320
        ),  # as gpt-oss
        Case(FP16, "relu2", transposed=True, hidden_size=328, intermediate_size=512),
        Case(FP32, "reglu", bias=True, hidden_size=264, intermediate_size=136),
    )
)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same on each device, and in each dtype the same values, rounded."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def interpret(patch: pytest.MonkeyPatch, capability: int = 0) -> None:
    """From now on Triton's backend takes tensors for those of an interpreted GPU, and few rows for many."""
    device = Device(capability, shared_bytes=1 << 20, multiprocessors=3, interpreted=True)
    patch.setattr(triton_backend, "device_of", lambda t: device)
    patch.setattr(triton_backend, "small_m", lambda rows, experts: None)  # whose kernels have tests of their own


def every_third(names: Iterable[str]) -> list[Any]:
    """Parameters: every third, and the others for `make thorough`."""
    return [pytest.param(name, marks=pytest.mark.thorough if i % 3 else ()) for i, name in enumerate(names)]


def turn(weight: Tensor) -> Tensor:
    """The same (E, p, q) weight with its middle dimension contiguous."""
    return weight.transpose(1, 2).contiguous().transpose(1, 2)


def random_ids(tokens: int, experts: int, k: int, seed: int = 0, device: torch.device | str = "cuda") -> Tensor:
    """(T, K), without sentinels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(k, dim=1).indices.to(device)


def random_plan(tokens: int, experts: int, k: int, seed: int = 0, device: torch.device | str = "cuda") -> RoutingPlan:
    return plan_topk(random_ids(tokens, experts, k, seed, device), experts)


def choose_bands(
    monkeypatch: pytest.MonkeyPatch, host: ModuleType, band_of_tiles: dict[int, int]
) -> dict[str, tuple[int, int]]:
    """From now on ``host`` has outputs walked in bands of ``band_of_tiles``, by their number of column tiles.

    Returns what is asked: the kernel to its column tiles and its contraction.
    """
    asked: dict[str, tuple[int, int]] = {}

    def band_tiles(kernel: str, column_tiles: int, width_in: int) -> int:
        asked[kernel] = column_tiles, width_in
        return band_of_tiles[column_tiles]

    monkeypatch.setattr(host, "band_tiles", band_tiles)
    return asked


def operands_of(case: Case, plan: RoutingPlan) -> tuple[Any, ...]:
    """x, w1, w2, b1, b2 (None without biases) and the scores (P,)."""
    sizes = (case.hidden_size, case.intermediate_size)
    given = make_inputs(plan, *sizes, case.activation, dtype=case.dtype, bias=case.bias)
    w1, w2 = (turn(given[name]) if case.transposed else given[name] for name in ("w1", "w2"))
    return given["x"], w1, w2, given.get("b1"), given.get("b2"), given["scores"].reshape(-1)


def run_kernels(kernels: Backend, plan: RoutingPlan, case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """Every GEMM and bias gradient of ``kernels`` by itself: name to (its result, the same by the torch set in fp64).

    Each kernel reads what the one before it wrote, so that errors do not add up. Rows past R are cut off.
    """
    spec, (x, w1, w2, b1, b2, s) = case.spec, operands_of(case, plan)
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(plan.num_tokens, case.hidden_size, generator=generator).to(plan.device, case.dtype)
    exact, num_rows = TorchBackend(), int(plan.row_start_of_expert[-1])
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def add(name: str, actual: Tensor, expected: Tensor, per_row: bool = False) -> None:
        found[name] = (actual[:num_rows], expected[:num_rows]) if per_row else (actual, expected)

    a, h = kernels.up_proj_act(x, w1, b1, plan, spec)
    exact_a, exact_h = exact.up_proj_act(x.double(), w1.double(), _double(b1), plan, spec)
    add("a", a, exact_a, per_row=True)
    add("h", h, exact_h, per_row=True)
    add("a, inference", kernels.up_proj_act_inference(x, w1, b1, plan, spec), exact_a, per_row=True)
    y = kernels.down_proj(a, w2, b2, plan)
    add("y", y, exact.down_proj(a.double(), w2.double(), _double(b2), plan), per_row=True)
    dh, ds, a_scaled = kernels.down_proj_dgrad_dact(do, w2, b2, h, s, plan, spec)
    exact_dh, exact_ds, exact_a_scaled = exact.down_proj_dgrad_dact(
        do.double(), w2.double(), _double(b2), h.double(), s.double(), plan, spec
    )
    add("dh", dh, exact_dh, per_row=True)
    add("ds", ds, exact_ds)
    add("a_scaled", a_scaled, exact_a_scaled, per_row=True)
    dw2 = kernels.down_proj_wgrad(do, a_scaled, plan, is_column_major(w2))
    assert dw2.stride() == w2.stride(), "stored as the weight is"
    exact_dw2 = exact.down_proj_wgrad(do.double(), a_scaled.double(), plan)
    add("dw2", dw2, exact_dw2)
    add(
        "dw2, added",
        *added(dw2, exact_dw2, lambda out: kernels.down_proj_wgrad(do, a_scaled, plan, case.transposed, out)),
    )
    add("dx_rows", kernels.up_proj_dgrad(dh, w1, plan), exact.up_proj_dgrad(dh.double(), w1.double(), plan), True)
    dw1 = kernels.up_proj_wgrad(x, dh, plan, is_column_major(w1))
    assert dw1.stride() == w1.stride(), "stored as the weight is"
    exact_dw1 = exact.up_proj_wgrad(x.double(), dh.double(), plan)
    add("dw1", dw1, exact_dw1)
    add("dw1, added", *added(dw1, exact_dw1, lambda out: kernels.up_proj_wgrad(x, dh, plan, case.transposed, out)))
    add("db2", kernels.down_proj_bias_grad(do, s, plan), exact.down_proj_bias_grad(do.double(), s.double(), plan))
    add("db1", kernels.up_proj_bias_grad(dh, plan), exact.up_proj_bias_grad(dh.double(), plan))
    return found


def some_sums(like: Tensor) -> Tensor:
    """Always the same, of both signs."""
    values = torch.arange(like.numel(), device=like.device, dtype=torch.float32).sin()
    return torch.empty_like(like, dtype=compute_dtype(like.dtype)).copy_(values.view(like.shape))


def assert_added_exactly(kernels: Backend, plan: RoutingPlan, case: Case) -> None:
    """What the kernels leave in a sum is, to the last bit, what it had plus what they make alone in fp32; twice."""
    given = make_inputs(plan, case.hidden_size, case.intermediate_size, case.activation, dtype=case.dtype)
    generator = torch.Generator().manual_seed(1)
    do, h, a = (
        torch.randn(rows, width, generator=generator).to(plan.device, case.dtype)
        for rows, width in (
            (plan.num_tokens, case.hidden_size),
            (plan.capacity, given["w1"].shape[1]),
            (plan.capacity, case.intermediate_size),
        )
    )
    x = given["x"].nan_to_num()
    for weight, add in (
        (given["w2"], lambda out: kernels.down_proj_wgrad(do, a, plan, is_column_major(out), out)),
        (given["w1"], lambda out: kernels.up_proj_wgrad(x, h, plan, is_column_major(out), out)),
    ):
        like = turn(weight) if case.transposed else weight
        alone = add(torch.zeros_like(like, dtype=torch.float32))
        total = some_sums(like)
        for _ in range(2):
            expected = total + alone
            add(total)
            assert torch.equal(total, expected), case
        is_empty = plan.row_start_of_expert.diff() == 0
        assert torch.equal(total[is_empty], some_sums(like)[is_empty])


def added(like: Tensor, exact: Tensor, add_to: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Sums, stored like a weight gradient, after ``add_to`` them, and what they should be then."""
    total = some_sums(like)
    expected = total.double() + exact
    assert add_to(total) is total
    return total, expected


def assert_kernels_agree(kernels: Backend, plan: RoutingPlan, case: Case, tolerance: float) -> None:
    """RMS-relative error of every result at most ``tolerance``; zero throughout where the exact value is."""
    for name, (actual, expected) in run_kernels(kernels, plan, case).items():
        where = f"{name} of {case}"
        fp32 = {"ds", "db1", "db2", "dw1, added", "dw2, added"}
        assert actual.dtype == (torch.float32 if name in fp32 else case.dtype), where
        assert actual.shape == expected.shape, where
        assert bool(actual.isfinite().all()), f"{where}: not finite"
        scale = float(expected.norm())
        error = float((actual.double() - expected).norm())
        is_unrounded = name.endswith("added") and case.dtype != torch.float32
        bound = min(tolerance, ADDED if is_unrounded else OF_FP32 if name in ("db1", "db2", "ds") else tolerance)
        assert error <= bound * scale, f"{where}: RMS-relative error {error / max(scale, 1e-30):.2e}"
        if scale > 0:
            assert bool(actual.any()), f"{where}: all zero"


def assert_inference_agrees(kernels: Backend, plan: RoutingPlan, case: Case, tolerance: float) -> None:
    """up_proj and down_proj as inference runs them against the torch set in fp64, RMS-relative, each given what the
    other wrote."""
    spec, (x, w1, w2, b1, b2, _) = case.spec, operands_of(case, plan)
    a = kernels.up_proj_act_inference(x, w1, b1, plan, spec)
    y = kernels.down_proj_inference(a, w2, b2, plan)
    exact_a = TorchBackend().up_proj_act_inference(x.double(), w1.double(), _double(b1), plan, spec)
    assert isinstance(a, Tensor)
    assert isinstance(exact_a, Tensor)
    exact_y = TorchBackend().down_proj(a.double(), w2.double(), _double(b2), plan)
    num_rows = int(plan.row_start_of_expert[-1])
    for name, actual, exact in (("a", a, exact_a), ("y", y, exact_y)):
        where = f"{name} of {case}"
        assert actual.shape == exact.shape, where
        assert actual.dtype == case.dtype, where
        actual, exact = actual[:num_rows], exact[:num_rows]
        assert bool(actual.isfinite().all()), f"{where}: not finite"
        assert float((actual.double() - exact).norm()) <= tolerance * float(exact.norm()), where
        assert bool(actual.any()) == bool(exact.any()), f"{where}: all zero"


def _double(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()
