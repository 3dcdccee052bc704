"""Selection, plans, combine and rounding without a GPU: compiled for GPUs not here, and when they are chosen."""

import re
from pathlib import Path

import pytest
import torch
from triton_compile import (
    CAPABILITIES,
    GFX942,
    NVIDIA,
    compile_launch,
    compile_launches,
    count_spill_loads,
    recorded_launches,
    stack_bytes,
)

from tilemoe.kernels.choose import choose_inference_plan, choose_plan, choose_router
from tilemoe.kernels.experts.triton.combine import combine
from tilemoe.kernels.plan import triton as triton_plan
from tilemoe.kernels.plan import triton_small as plan_small
from tilemoe.kernels.plan.torch import new_index, sort_by_expert
from tilemoe.kernels.rounding import triton as rounding
from tilemoe.kernels.rounding.triton import RoundingSpec, round_launches, score_grad_launch
from tilemoe.kernels.router import triton as router
from tilemoe.kernels.router.triton import RouterSpec, select_grad_launch, select_launch
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.runtime.launch import Launch

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("experts", "spec"),
    [
        (128, RouterSpec(8, "late softmax", True, 1.0, 1, 1, False, False)),
        (8, RouterSpec(2, "late softmax", True, 1.0, 1, 1, False, False)),
        (router.MAX_EXPERTS, RouterSpec(8, "sigmoid", True, 1.0, 1, 1, False, False)),
        (512, RouterSpec(10, "softmax", True, 1.0, 1, 1, True, True)),
        (router.MAX_EXPERTS, RouterSpec(32, "softmax", False, 2.5, 1, 1, True, False)),
        (256, RouterSpec(8, "sigmoid", True, 2.5, 8, 4, True, True)),
    ],
)
def test_selection_compiles_without_spills(experts: int, spec: RouterSpec, capability: int, tmp_path: Path) -> None:
    logits, each, one = torch.zeros(64, experts), torch.zeros(experts), torch.zeros(())
    forward = select_launch(logits, None, None, spec)
    ids, scores = forward.args["expert_ids"], forward.args["scores"]
    sums = (each if spec.balance else None, one if spec.z else None)
    backward = select_grad_launch(logits, ids, None, scores, *sums, spec)
    for launch, compiled in compile_launches((forward, backward), capability):
        assert count_spill_loads(compiled, tmp_path) == 0, f"{launch.kernel} spills"
        if launch is forward or launch.constants["DENSE"]:
            assert "ld.global.v4.b32" in compiled.asm["ptx"], "logits are read 16 bytes at a time"
        assert compiled.metadata.shared <= 48 * 1024
        if launch is backward:
            stores = re.findall(r"(st\.global\.v4|st\.global|bar\.sync)", str(compiled.asm["ptx"]))
            of_all = len(stores) - stores[::-1].index("st.global.v4")
            assert stores[of_all] == "bar.sync", "all are stored before the chosen are, by other threads"
            assert set(stores[of_all:]) == {"bar.sync", "st.global"}


def test_what_the_selection_does_not_take() -> None:
    assert router.why_unsupported(router.MAX_EXPERTS, router.MAX_EXPERTS_PER_TOKEN) is None
    assert router.why_unsupported(router.MAX_EXPERTS + 1, 8) is not None
    assert router.why_unsupported(64, router.MAX_EXPERTS_PER_TOKEN + 1) is not None


def test_groups_never_fill_more_columns_than_fit() -> None:
    for groups in range(1, router.MAX_EXPERTS // 2 + 1):
        logits = torch.empty(1, router.MAX_EXPERTS // groups * groups, device="meta")
        tile = select_launch(logits, None, None, RouterSpec(1, "softmax", True, 1.0, groups, 1, False, False))
        assert tile.constants["GROUPS"] * tile.constants["GROUP"] <= 8192
        assert tile.num_warps <= 16


@pytest.mark.parametrize(
    ("device", "dtype", "experts", "k", "fused"),
    [
        (GPU, torch.float32, 128, 8, True),
        (GPU, torch.float32, 1, 1, True),
        (CPU, torch.float32, 128, 8, False),
        (GPU, torch.float64, 128, 8, False),
        (GPU, torch.float32, 128, 33, False),
        (GPU, torch.float32, 5000, 8, False),
    ],
)
def test_when_the_selection_is_chosen(
    device: torch.device, dtype: torch.dtype, experts: int, k: int, fused: bool
) -> None:
    choice = choose_router(device, dtype, experts, k)
    assert (choice.name == "triton") == fused
    assert choice.reason


def launch_of_combine(rows: torch.Tensor, s: torch.Tensor | None, plan: RoutingPlan) -> Launch:
    with recorded_launches(NVIDIA[90]) as launches:
        combine(rows, s, plan, rows.new_empty(plan.num_tokens, rows.shape[1]))
    return launches[0]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_combine_compiles_to_wide_loads(dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    ids = torch.arange(24).view(3, 8) % 5
    plan, rows = plan_topk(ids, 5), torch.zeros(24, 1536, dtype=dtype)
    for s in (torch.zeros(24), None):
        compiled = compile_launch(launch_of_combine(rows, s, plan), capability)
        assert compiled.asm["ptx"].count("ld.global.v4.b32") >= 16, "two 16-byte loads for each row of the token"
        assert "st.global.v4.b32" in compiled.asm["ptx"]
        assert count_spill_loads(compiled, tmp_path) == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_combine_of_pairs_compiles(capability: int, tmp_path: Path) -> None:
    token, expert = torch.tensor([2, 0, 2]), torch.tensor([1, 1, 0])
    plan, rows = plan_pairs(token, expert, 3, 2), torch.zeros(3, 40, dtype=torch.float16)
    for s in (torch.zeros(3), torch.zeros(3, dtype=torch.float64), None):
        compiled = compile_launch(launch_of_combine(rows, s, plan), capability)
        assert count_spill_loads(compiled, tmp_path) == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("experts", [128, triton_plan.MAX_EXPERTS])
def test_plan_kernels_compile(experts: int, capability: int, tmp_path: Path) -> None:
    with recorded_launches(NVIDIA[capability]) as launches:
        triton_plan.count_sort(torch.zeros(600, 8, dtype=torch.int64), experts)
    for launch, compiled in compile_launches(launches, capability):
        assert count_spill_loads(compiled, tmp_path) == 0, f"{launch.kernel} spills"
        assert compiled.metadata.shared <= 48 * 1024


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("experts", [8, 128, plan_small.MAX_EXPERTS])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plan_of_few_pairs_compiles(dtype: torch.dtype, experts: int, capability: int, tmp_path: Path) -> None:
    ids = torch.zeros(64, 8, dtype=dtype)
    launch = plan_small.count_sort_small_launch(ids, experts, new_index(ids, experts))
    compiled = compile_launch(launch, capability)
    assert count_spill_loads(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= 48 * 1024


def test_what_the_plan_kernels_do_not_take() -> None:
    assert triton_plan.why_unsupported(1, triton_plan.MAX_EXPERTS) is None
    assert triton_plan.why_unsupported(0, 4) is not None
    assert triton_plan.why_unsupported(triton_plan.MAX_PAIRS + 1, 4) is not None
    assert triton_plan.why_unsupported(8, triton_plan.MAX_EXPERTS + 1) is not None


def test_other_devices_and_sizes_go_to_torch_and_say_why() -> None:
    for case in ((CPU, 8, 4), (GPU, 0, 4), (GPU, 8, 5000)):
        choice = choose_plan(*case)
        assert choice.name == "torch"
        assert choice.impl.build is sort_by_expert
        assert choice.reason
    assert choose_plan(GPU, 8, 4).impl.build is triton_plan.count_sort


def test_few_pairs_of_inference_have_a_builder_of_their_own() -> None:
    assert choose_inference_plan(GPU, plan_small.MAX_PAIRS + 1, 4).impl.build is triton_plan.count_sort
    assert choose_inference_plan(GPU, 8, plan_small.MAX_EXPERTS + 1).impl.build is triton_plan.count_sort
    assert choose_inference_plan(GPU, 8, 4).impl.build is plan_small.count_sort_small
    assert choose_inference_plan(CPU, 8, 4).impl.build is sort_by_expert


NO_SPILL = 16  # bytes of a thread's stack


def rounding_launches(
    num_experts: int, experts_per_token: int, mode: str, score: str, masked: bool = False
) -> list[Launch]:
    tokens = 640
    logits, kept = torch.zeros(tokens, num_experts), torch.zeros(tokens, experts_per_token)
    ids = torch.zeros(tokens, experts_per_token, dtype=torch.int32)
    mask = torch.ones(tokens, dtype=torch.bool) if masked else None
    spec = RoundingSpec(mode, 128, score, True, 1.0, tokens * experts_per_token + 128)
    forward, rows = round_launches(logits, ids, kept, torch.zeros(num_experts), mask, spec)
    saved = (rows.norm, rows.row_of_pair, rows.code_of_pair, rows.pair_start_of_token)
    return [*forward, score_grad_launch(rows.scores, logits, ids, mask, *saved, spec)]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("num_experts", "experts_per_token", "mode", "score"),
    [
        (512, 10, "nearest_score", "softmax"),
        (60, 4, "balance", "late softmax"),
        (rounding.MAX_EXPERTS, 32, "up", "sigmoid"),
    ],
)
def test_rounding_compiles_without_spills(
    num_experts: int, experts_per_token: int, mode: str, score: str, capability: int, tmp_path: Path
) -> None:
    for launch, compiled in compile_launches(
        rounding_launches(num_experts, experts_per_token, mode, score), capability
    ):
        where = f"{launch.kernel.fn.__name__} for sm_{capability}"
        assert compiled.metadata.shared <= 48 * 1024, where
        assert stack_bytes(compiled, tmp_path) <= NO_SPILL, where


@pytest.mark.thorough
def test_rounding_compiles_for_amd_and_with_a_mask() -> None:
    masked = rounding_launches(128, 8, "nearest_score", "softmax", masked=True)
    for _, compiled in compile_launches(masked, GFX942):
        assert compiled.metadata.shared <= 64 * 1024


def test_logits_are_read_sixteen_bytes_at_a_time() -> None:
    by_name = {launch.kernel.fn.__name__: launch for launch in rounding_launches(64, 4, "nearest", "softmax")}
    for name in ("key_kernel", "grad_kernel"):
        compiled = compile_launch(by_name[name], 90)
        assert re.search(r"ld\.global(\.\w+)*\.v4", compiled.asm["ptx"]), name


def test_bits_are_counted_by_an_instruction() -> None:
    counting = {"count_kernel", "place_kernel", "row_kernel", "token_kernel", "pair_kernel"}
    by_name = {launch.kernel.fn.__name__: launch for launch in rounding_launches(64, 4, "nearest_score", "softmax")}
    for launch, compiled in compile_launches([by_name[name] for name in sorted(counting)], 90):
        assert "popc.b32" in compiled.asm["ptx"], launch.kernel.fn.__name__


def test_the_number_of_tokens_is_in_no_key() -> None:
    keys = set()
    for tokens in (128, 129, 1000, 4096):
        spec = RoundingSpec("nearest", 128, "softmax", True, 1.0, 5 * tokens + 3)
        found, _ = round_launches(
            torch.zeros(tokens, 8), torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2), None, None, spec
        )
        keys.add(tuple(key_of(launch) for launch in found))
    assert len(keys) == 1


def key_of(launch: Launch) -> tuple[object, ...]:
    """What a compiled kernel depends on, besides the alignment of the tensors."""
    names = launch.kernel.arg_names
    specialised = {
        name: (value == 1, value % 16 == 0)
        for name, value in launch.args.items()
        if isinstance(value, int) and not launch.kernel.params[names.index(name)].do_not_specialize
    }
    return (*specialised.items(), *launch.constants.items(), launch.num_warps)


def refused(kernel: str) -> object:
    x, ids = torch.zeros(32, 2), torch.zeros(32, 1, dtype=torch.int32)
    if kernel == "selection":
        return router.select(x, None, None, RouterSpec(1, "softmax", True, 1.0, 1, 1, False, False))
    if kernel == "plan":
        return triton_plan.count_sort(ids, 3)
    return rounding.round_rows(x, ids, x[:, :1], None, None, RoundingSpec("nearest", 16, "softmax", True, 1.0, 64))


@pytest.mark.parametrize("kernel", ["selection", "plan", "rounding"])
def test_cpu_tensors_are_refused(kernel: str) -> None:
    with pytest.raises(ValueError, match="need a GPU"):
        refused(kernel)
