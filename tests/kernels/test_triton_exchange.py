"""The kernels that prepare what is sent between ranks, compiled for GPUs that are not here."""

import re
from itertools import chain
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import JITFunction
from triton_compile import (
    CAPABILITIES,
    GFX942,
    MI300,
    NVIDIA,
    compile_launches,
    compiled_key,
    recorded_launches,
    stack_bytes,
)

from tilemoe.kernels.choose import choose_expert_parallel
from tilemoe.kernels.expert_parallel import triton as exchange
from tilemoe.kernels.expert_parallel.torch import Routed
from tilemoe.kernels.experts.formats.fp8 import words_of_row
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch

EXPERTS, TOKENS, PER_TOKEN = 128, 48, 8

GPU = torch.device("cuda")
STACK = 64  # bytes of a thread: some words of the kernel that places pairs


def plans(tokens: int = TOKENS) -> list[RoutingPlan]:
    ids = torch.arange(tokens * PER_TOKEN).view(tokens, PER_TOKEN) % EXPERTS
    token = torch.arange(tokens).repeat_interleave(PER_TOKEN)
    return [plan_topk(ids, EXPERTS), plan_pairs(token, ids.flatten(), tokens, EXPERTS)]


def launches(
    device: Device, plan: RoutingPlan, ranks: int, dtype: torch.dtype, here: int = 1, width: int = 1536
) -> list[Launch]:
    arrays = (plan.row_of_pair, plan.pair_of_row, plan.pair_start_of_token, plan.row_start_of_expert)
    routed = Routed(*arrays, plan.num_tokens, ranks, here)
    x, scores = torch.zeros(plan.num_tokens, width, dtype=dtype), torch.zeros(plan.num_pairs)
    scores = scores.double() if dtype == torch.float64 else scores
    with recorded_launches(device) as found:
        sizes, before = exchange.count_sent(routed)
        _, _, _, words, *_ = exchange.place_sent(x, scores, sizes, before, routed)
        exchange.plan_received(words, sizes, here, EXPERTS // ranks, plan.num_tokens)
    return found


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), (8, torch.float64), (64, torch.bfloat16)])
def test_kernels_compile(ranks: int, dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    device, names = NVIDIA[capability], set()
    of_all = chain(*(launches(device, plan, ranks, dtype) for plan in plans()))
    for launch, compiled in compile_launches(of_all, capability):
        names.add(launch.kernel.fn.__name__)
        assert compiled.metadata.shared <= 48 * 1024, launch.kernel
        assert stack_bytes(compiled, tmp_path) <= STACK, f"{launch.kernel} spills"
        if launch.kernel is exchange.copy_tokens_kernel:
            assert "ld.global.v4.b32" in compiled.asm["ptx"] or "ld.global.v2.b64" in compiled.asm["ptx"]
    own = {name for name, value in vars(exchange).items() if isinstance(value, JITFunction) and "_kernel" in name}
    assert own <= names, "a kernel is left out"


def test_rows_that_are_quantised(tmp_path: Path) -> None:
    """Lines of int32 words; a word at a time, since no line but the first begins at a multiple of 16 bytes."""
    found = launches(NVIDIA[90], plans()[0], 4, torch.int32, width=words_of_row(2048))
    copies = [launch for launch in found if launch.kernel is exchange.copy_tokens_kernel]
    ((_, compiled),) = compile_launches(copies, 90)
    assert stack_bytes(compiled, tmp_path) == 0
    assert not re.search(r"ld\.global\S*\.b(8|16)\s", compiled.asm["ptx"])


def test_other_numbers_of_tokens_and_other_ranks_compile_nothing() -> None:
    for first, *others in zip(*(plans(tokens) for tokens in (TOKENS, 1, 77, 200)), strict=True):
        known = list(map(compiled_key, launches(NVIDIA[90], first, 4, torch.bfloat16)))
        assert len(known) == 8
        for here, plan in enumerate(others):
            assert list(map(compiled_key, launches(NVIDIA[90], plan, 4, torch.bfloat16, here))) == known


def test_kernels_compile_for_amd() -> None:
    of_all = chain(*(launches(MI300, plan, 2, torch.bfloat16) for plan in plans()))
    for _, compiled in compile_launches(of_all, GFX942):
        assert "s_endpgm" in compiled.asm["amdgcn"]


def test_choice() -> None:
    assert choose_expert_parallel(torch.device("cpu"), 4, 4, 4, 2).reason == "Triton does not run on cpu"
    assert choose_expert_parallel(GPU, 4, 32, 128, 8).name == "triton"
    for case in ((0, 0, 128, 8), (4, 32, 130, 65)):
        chosen = choose_expert_parallel(GPU, *case)
        assert (chosen.name, chosen.reason) == ("torch", exchange.why_unsupported(*case))
