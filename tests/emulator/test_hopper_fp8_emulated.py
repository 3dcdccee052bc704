"""The FP8 kernels for Hopper without a GPU: their sources in the emulator (README.md), held to the torch backend's.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · w = 2n gated, n ungated
"""

from functools import cache
from itertools import product

import pytest
import torch
from emulated_layer import (
    Recorded,
    each_layout_once,
    emulated,
    errors_with,
    functions_of,
    gluon_kernels,
    plan_of,
    with_outputs,
)
from fp8_checks import assert_wgrads_agree
from gluon_values import Buffer, Product
from hopper_faults import Fault
from hopper_fp8_faults import FAULTS, OF_STATIONARY, OF_WGRAD, SWIGLU
from torch import Tensor
from triton_checks import Case, choose_bands, every_third, turn

from tilemoe.activations import activation_spec
from tilemoe.config import GATED_ACTIVATIONS, UNGATED_ACTIVATIONS
from tilemoe.kernels.experts.formats.fp8 import ROWS, quantize
from tilemoe.kernels.experts.formats.operand import Operand
from tilemoe.kernels.experts.hopper import host
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.plan import RoutingPlan
from tilemoe.testing import hostile_routings, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")

LIMIT = 3e-4  # RMS-relative: fp16 rounds by 2.1e-4
LIMIT_OF_QUANTIZED = 2e-3  # one value of 10 000 that is rounded the other way, by a step, is 7e-4


class WithoutBiasGrads(type(backend_named("hopper_fp8"))):
    """The bias gradients are the portable kernels', which other tests have."""

    up_proj_bias_grad = TorchBackend.up_proj_bias_grad


KERNELS, EXACT = WithoutBiasGrads(), backend_named("torch_fp8")
ROUTINGS = {routing.name: routing.plan for routing in hostile_routings(tile=128)}
# Widths, multiples of 128, not all of 256: half a tile of columns to three; from one step to more than stages.
SIZES = ((256, 128), (384, 256), (640, 640), (128, 384))
LAYOUTS = [(name, layout) for name in sorted(GATED_ACTIVATIONS) for layout in ("concatenated", "interleaved")]
LAYOUTS += [(name, "concatenated") for name in sorted(UNGATED_ACTIVATIONS)]
CASES = [
    Case(torch.float16, name, gate_up, bias, (i + bias) % 2 == 0, *SIZES[(i + 2 * bias) % len(SIZES)])
    for i, (name, gate_up) in enumerate(LAYOUTS)
    for bias in (False, True)
]
# Rows of the experts, and tokens without one: at the ends of a consumer's 64 rows and of a tile's 128.
ENDS = [(63, 64, 65, 0, 7), (0, 129, 1, 3), (192, 0, 128, 2), (193, 1, 0)]
OF_FAULTS = (130, 0, 66, 2, 5)
OF_STATIONARY_FAULTS = (66, 0, 1100, 194, 130, 2, 0)  # two work items of one expert; no row past the last
OF_WGRAD_FAULTS = (130, 0, 580, 66, 5)  # of one expert, more steps than stages
HOST_CHUNK = "tilemoe.kernels.experts.hopper.configs.CHUNK"


def kernels_of(case: Case) -> set[str]:
    n = case.intermediate_size
    contractions = (n, 2 * n if case.activation in GATED_ACTIVATIONS else n)
    rows = {"gemm_stationary_kernel" if p in (128, 256, 512) else "gemm_cooperative_kernel" for p in contractions}
    return {"up_proj_act_kernel", "gemm_dgrad_dact_kernel"} | rows


def assert_gemms_agree(plan: RoutingPlan, case: Case, seed: int = 0) -> None:
    """Each GEMM by itself against the torch backend, which computes in fp32, on the same operands."""
    spec = activation_spec(case.activation, case.gate_up, case.limit, None)
    given = make_inputs(
        plan, case.hidden_size, case.intermediate_size, case.activation, dtype=case.dtype, bias=case.bias, seed=seed
    )
    x, w1, w2, b1, b2 = given["x"], given["w1"], given["w2"], given.get("b1"), given.get("b2")
    if case.transposed:
        w1, w2 = turn(w1), turn(w2)
    s, do = given["scores"].reshape(-1), torch.randn_like(x)
    rows = int(plan.row_start_of_expert[-1])

    def compare(name: str, actual: Tensor, exact: Tensor) -> None:
        assert actual.shape == exact.shape, f"{name} of {case}"
        assert actual.dtype in (case.dtype, torch.float32), f"{name} of {case}"
        assert_close(f"{name} of {case}", actual[:rows].float(), exact[:rows])

    a, h = KERNELS.up_proj_act(x, w1, b1, plan, spec)
    exact_a, exact_h = EXACT.up_proj_act(x.float(), w1.float(), _float(b1), plan, spec)
    compare("h", h, exact_h)
    a_alone = KERNELS.up_proj_act_inference(x, w1, b1, plan, spec)
    for found in (a, a_alone) if plan.capacity else ():
        assert_quantized(found[slice(rows),], exact_a[:rows])
    known_a = a.dense(torch.float32) if isinstance(a, Operand) else a.float()
    compare("y", KERNELS.down_proj(a, w2, b2, plan), EXACT.down_proj(known_a, w2.float(), _float(b2), plan))
    dh, ds, a_scaled = KERNELS.down_proj_dgrad_dact(do, w2, b2, h, s, plan, spec)
    exact_dh, exact_ds, exact_a_scaled = EXACT.down_proj_dgrad_dact(
        do.float(), w2.float(), _float(b2), h.float(), s, plan, spec
    )
    compare("dh", dh, exact_dh)
    compare("a_scaled", a_scaled, exact_a_scaled)
    assert_close(f"ds of {case}", ds, exact_ds)
    compare("dx_rows", KERNELS.up_proj_dgrad(dh, w1, plan), EXACT.up_proj_dgrad(dh.float(), w1.float(), plan))


def assert_close(where: str, actual: Tensor, exact: Tensor, tolerance: float = LIMIT) -> None:
    assert bool(actual.isfinite().all()), f"{where}: not finite"
    scale, error = float(exact.norm()), float((actual - exact).norm())
    assert error <= tolerance * scale, f"{where}: RMS-relative error {error / max(scale, 1e-30):.2e}"
    assert bool(actual.any()) == (scale > 0), f"{where}: all zero"


def assert_quantized(found: Operand, values: Tensor) -> None:
    """As `quantize` has it, but for a few values next to the middle of two of e4m3, which may go to the other."""
    expected = quantize(values, ROWS)
    assert found.data.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-5, atol=0)
    actual, exact = found.data.float(), expected.data.float()
    step = (exact.abs() / 8).clamp(min=2.0**-9)
    assert bool(((actual - exact).abs() <= step).all())
    assert_close("a", found.dense(torch.float32), expected.dense(torch.float32), LIMIT_OF_QUANTIZED)


def _float(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.float()


@pytest.mark.parametrize("name", every_third(ROUTINGS))
def test_hostile_routings(name: str) -> None:
    index = list(ROUTINGS).index(name)
    plan, case = ROUTINGS[name], CASES[5 * index % len(CASES)]
    with emulated(ctas=1 + index % 3, seed=index, late=(0.3, 0.9, 1.0)[index // 3 % 3]) as launches:
        assert_gemms_agree(plan, case)
    assert gluon_kernels(launches) == (kernels_of(case) if plan.capacity else set())


@pytest.mark.parametrize("index", each_layout_once(CASES, 2))
def test_every_layout_bias_and_activation(index: int) -> None:
    with emulated(ctas=1 + index % 3, seed=index) as launches:
        assert_gemms_agree(plan_of(*ENDS[(index + index // 4) % len(ENDS)]), CASES[index])
    assert gluon_kernels(launches) == kernels_of(CASES[index])


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_clamped_gates(gate_up: str) -> None:
    """With a limit that half of them pass."""
    case = Case(torch.float16, "swiglu_oai", gate_up, True, hidden_size=128, intermediate_size=256, limit=0.3)
    with emulated(ctas=3):
        assert_gemms_agree(plan_of(65, 0, 130, 40), case)


def test_rows_past_the_last_are_not_written() -> None:
    plan, spec = plan_of(65, 0, 130, 40), activation_spec("swiglu", "concatenated", None, None)
    given = make_inputs(plan, 128, 256, dtype=torch.float16)
    with emulated():
        a, h = KERNELS.up_proj_act(given["x"], given["w1"], None, plan, spec)
        y = KERNELS.down_proj(a, given["w2"], None, plan)
        s = given["scores"].reshape(-1)
        dh, _, a_scaled = KERNELS.down_proj_dgrad_dact(given["x"], given["w2"], None, h, s, plan, spec)
        dx_rows = KERNELS.up_proj_dgrad(dh, given["w1"], plan)
    for rows in (a.data.float(), a.scale, h, y, dh, a_scaled, dx_rows):
        assert not bool(rows[:195].isnan().any())
        assert bool(rows[195:].isnan().all())


def test_tiles_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """down_proj_dgrad walks three column tiles two and one at a time, up_proj five two, two and one."""
    asked = choose_bands(monkeypatch, host, {3: 2, 5: 2})
    with emulated():
        assert_gemms_agree(plan_of(130, 65, 3), Case(torch.float16, hidden_size=128, intermediate_size=640))
    assert asked == {"up_proj_act": (5, 128), "down_proj_dgrad_dact": (3, 128)}


@pytest.mark.parametrize("columns", [slice(128, 512), slice(256, 384)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_columns_of_a_quantised_weight(transposed: bool, columns: slice) -> None:
    """down_proj and up_proj_dgrad a slice of d at a time, of operands that are quantised once for all slices."""
    plan = plan_of(65, 0, 130, 40)
    given = make_inputs(plan, 640, 256, dtype=torch.float16, bias=True)
    w1, w2, b2 = given["w1"], given["w2"], given["b2"][:, columns]
    w1, w2 = (turn(w1), turn(w2)) if transposed else (w1, w2)
    a, dh = (torch.randn(plan.capacity, width).half() for width in (256, 512))
    with emulated() as launches:
        y = KERNELS.down_proj_inference(quantize(a, ROWS), KERNELS.weight_operand(w2, 2)[:, columns], b2, plan)
        dx_rows = KERNELS.up_proj_dgrad(KERNELS.rows_operand(dh), KERNELS.weight_operand(w1, 1)[:, :, columns], plan)
    assert gluon_kernels(launches) == {"gemm_stationary_kernel"}
    exact_y = EXACT.down_proj(a.float(), w2[:, columns].float(), b2.float(), plan)
    assert_close("y", y[:195].float(), exact_y[:195])
    exact_dx_rows = EXACT.up_proj_dgrad(dh.float(), w1[:, :, columns].float(), plan)
    assert_close("dx_rows", dx_rows[:195].float(), exact_dx_rows[:195])


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("index", range(len(ENDS)))
def test_wide_weight_gradients(all_wgrads_in_fp8: None, index: int, column_major: bool) -> None:
    with emulated(ctas=1 + index % 3, seed=index) as launches:
        assert_wgrads_agree(KERNELS, plan_of(*ENDS[index]), *SIZES[index], column_major, torch.float16, LIMIT)
    assert gluon_kernels(launches) == {"gemm_transposed_kernel"}


@pytest.mark.parametrize("name", every_third(ROUTINGS))
def test_wide_weight_gradients_of_hostile_routings(all_wgrads_in_fp8: None, name: str) -> None:
    with emulated(seed=1):
        assert_wgrads_agree(KERNELS, ROUTINGS[name], 128, 384, False, torch.float16, LIMIT)


def test_wide_weight_gradients_in_slices(all_wgrads_in_fp8: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilemoe.kernels.experts.triton.transpose.SLICE", 256)
    with emulated() as launches:
        assert_wgrads_agree(KERNELS, plan_of(65, 0, 130, 40), 640, 128, False, torch.float16, LIMIT)
    of_gemms = [launch.args["first_of_slice"] for launch in launches if launch.kernel.is_gluon()]
    assert of_gemms == 4 * [0, 256, 512]


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_wide_weight_gradients_in_chunks(all_wgrads_in_fp8: None, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts with one to five k-blocks; each CTA sums on its own, and tensor cores sum no more than a chunk."""
    monkeypatch.setattr(HOST_CHUNK, chunk)
    lengths, add = [], Product.add

    def counted(acc: Product, left: Buffer, right: Buffer) -> None:
        add(acc, left, right)
        lengths.append(acc.length)

    monkeypatch.setattr(Product, "add", counted)
    with emulated(ctas=3, seed=chunk):
        assert_wgrads_agree(KERNELS, plan_of(*OF_WGRAD_FAULTS), 384, 640, chunk == 2, torch.float16, LIMIT)
    assert max(lengths) == min(chunk, 3)  # of five k-blocks, three and two


def test_a_gradient_that_tma_cannot_describe_takes_the_portable_kernel(all_wgrads_in_fp8: None) -> None:
    """One launch, of operands that are not quantised, which adds: nothing is compiled once a slice was added."""
    plan, by_token = plan_of(65, 0, 130, 40), torch.randn(235, 128).half()
    total = torch.zeros(3 * 128 * 128 + 1)[1:].view(3, 128, 128)
    with emulated() as launches, pytest.raises(KeyError, match="gemm_wgrad_kernel"):  # not emulated
        KERNELS.down_proj_wgrad(by_token, torch.randn(235, 128).half(), plan, False, total)
    (launch,) = launches
    assert launch.constants["ADDS"]
    assert not launch.kernel.is_gluon()


@cache
def recorded(case: Case, counts: tuple[int, ...] = OF_FAULTS) -> list[Recorded]:
    """Each launch of the FP8 kernels on one CTA, and what it wrote, which is right."""
    with emulated(ctas=1) as launches:
        assert_gemms_agree(plan_of(*counts), case)
    return with_outputs(launches)


@cache
def recorded_wgrad() -> list[Recorded]:
    """down_proj_wgrad's launch for the last slice on two CTAs, in up to three chunks, and what it wrote; else NaN."""
    plan, width = plan_of(*OF_WGRAD_FAULTS), 640
    torch.manual_seed(0)
    by_token, by_row = torch.randn(plan.num_tokens, width).half(), torch.randn(plan.capacity, width).half()
    exact = EXACT.down_proj_wgrad(by_token.float(), by_row.float(), plan)
    with pytest.MonkeyPatch.context() as patch, emulated(ctas=2) as launches:
        patch.setattr("tilemoe.kernels.experts.triton.transpose.SLICE", 384)
        patch.setattr(HOST_CHUNK, 2)
        assert_close("dw2", KERNELS.down_proj_wgrad(by_token, by_row, plan).float(), exact)
    last, outputs = with_outputs(launches)[-1]  # the launch before it would now read this one's slice of A
    outputs["out"][:, : last.args["first_of_slice"]] = torch.nan
    return [(last, outputs)]


def assert_agree_with_a_fault(fault: Fault, recorded_launches: list[Recorded]) -> None:
    """With loads that come late, which shows a missing wait; then with sooner ones, which overwrite what is in use."""
    function, text, instead, _ = fault
    name = function.rpartition(".")[2]
    launches = [found for found in recorded_launches if name in functions_of(found[0].kernel)]
    assert launches, f"no kernel calls {function}"
    for late, found in product((0.9, 0.3), launches):
        assert not (errors := errors_with({function: (text, instead)}, late, *found)), errors


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name: str) -> None:
    case, fault = FAULTS[name]
    launches = recorded(case)
    with pytest.raises(AssertionError, match=fault[-1]):
        assert_agree_with_a_fault(fault, launches)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_STATIONARY)
def test_faults_of_a_stationary_weight_are_caught(name: str) -> None:
    case, fault = OF_STATIONARY[name]
    launches = recorded(case, OF_STATIONARY_FAULTS)
    with pytest.raises(AssertionError, match=fault[-1]):
        assert_agree_with_a_fault(fault, launches)


@pytest.mark.parametrize("name", OF_WGRAD)
def test_faults_of_weight_gradients_are_caught(all_wgrads_in_fp8: None, name: str) -> None:
    fault, launches = OF_WGRAD[name], recorded_wgrad()
    with pytest.raises(AssertionError, match=fault[-1]):
        assert_agree_with_a_fault(fault, launches)


def test_without_a_fault_nothing_is_caught(all_wgrads_in_fp8: None) -> None:
    for late, found in product((0.9, 0.3), recorded(SWIGLU) + recorded_wgrad()):
        assert not errors_with({}, late, *found)
