"""The fused top-K selection without a GPU: compiled for four GPUs, and when it is chosen.

T tokens · E experts · K experts per token
"""

import re
from pathlib import Path

import pytest
import torch
from triton_compile import compile_launches, count_spill_loads

from tilemoe.kernels.choose import choose_router
from tilemoe.kernels.router.triton import (
    MAX_EXPERTS,
    MAX_EXPERTS_PER_TOKEN,
    RouterSpec,
    select,
    select_grad_launch,
    select_launch,
    why_unsupported,
)

CAPABILITIES = (80, 90, 100, 120)
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("experts", "spec"),
    [
        (128, RouterSpec(8, "late softmax", True, 1.0, 1, 1, False, False)),
        (8, RouterSpec(2, "late softmax", True, 1.0, 1, 1, False, False)),
        (MAX_EXPERTS, RouterSpec(8, "sigmoid", True, 1.0, 1, 1, False, False)),
        (512, RouterSpec(10, "softmax", True, 1.0, 1, 1, True, True)),
        (MAX_EXPERTS, RouterSpec(32, "softmax", False, 2.5, 1, 1, True, False)),
        (256, RouterSpec(8, "sigmoid", True, 2.5, 8, 4, True, True)),
    ],
)
def test_kernels_compile_without_spills(experts: int, spec: RouterSpec, capability: int, tmp_path: Path) -> None:
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


def test_what_the_kernels_do_not_take() -> None:
    assert why_unsupported(MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN) is None
    assert why_unsupported(MAX_EXPERTS + 1, 8) is not None
    assert why_unsupported(64, MAX_EXPERTS_PER_TOKEN + 1) is not None


def test_groups_never_fill_more_columns_than_fit() -> None:
    for groups in range(1, MAX_EXPERTS // 2 + 1):
        logits = torch.empty(1, MAX_EXPERTS // groups * groups, device="meta")
        tile = select_launch(logits, None, None, RouterSpec(1, "softmax", True, 1.0, groups, 1, False, False))
        assert tile.constants["GROUPS"] * tile.constants["GROUP"] <= 8192
        assert tile.num_warps <= 16


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="need a GPU"):
        select(torch.zeros(2, 4), None, None, RouterSpec(1, "softmax", True, 1.0, 1, 1, False, False))


@pytest.mark.parametrize(
    ("device", "dtype", "experts", "k", "fused"),
    [
        (CUDA, torch.float32, 128, 8, True),
        (CUDA, torch.float32, 1, 1, True),
        (CPU, torch.float32, 128, 8, False),
        (CUDA, torch.float64, 128, 8, False),
        (CUDA, torch.float32, 128, 33, False),
        (CUDA, torch.float32, 5000, 8, False),
    ],
)
def test_when_the_kernels_are_chosen(
    device: torch.device, dtype: torch.dtype, experts: int, k: int, fused: bool
) -> None:
    choice = choose_router(device, dtype, experts, k)
    assert (choice.name == "triton") == fused
    assert choice.reason
