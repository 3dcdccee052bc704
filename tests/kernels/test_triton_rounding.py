"""Token rounding in Triton without a GPU: compiled for four GPUs and for MI300."""

import re
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton_compile import compile_launch, compile_launches, stack_bytes

from tilemoe.kernels.rounding.triton import MAX_EXPERTS, RoundingSpec, round_launches, round_rows, score_grad_launch
from tilemoe.runtime.launch import Launch

CAPABILITIES = (80, 90, 100, 120)
NO_SPILL = 16  # bytes of a thread's stack


def launches(num_experts: int, experts_per_token: int, mode: str, score: str, masked: bool = False) -> list[Launch]:
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
    [(512, 10, "nearest_score", "softmax"), (60, 4, "balance", "late softmax"), (MAX_EXPERTS, 32, "up", "sigmoid")],
)
def test_kernels_compile_without_spills(
    num_experts: int, experts_per_token: int, mode: str, score: str, capability: int, tmp_path: Path
) -> None:
    for launch, compiled in compile_launches(launches(num_experts, experts_per_token, mode, score), capability):
        where = f"{launch.kernel.fn.__name__} for sm_{capability}"
        assert compiled.metadata.shared <= 48 * 1024, where
        assert stack_bytes(compiled, tmp_path) <= NO_SPILL, where


def test_kernels_compile_for_amd_and_with_a_mask() -> None:
    masked = launches(128, 8, "nearest_score", "softmax", masked=True)
    for _, compiled in compile_launches(masked, GPUTarget("hip", "gfx942", 64)):
        assert compiled.metadata.shared <= 64 * 1024


def test_logits_are_read_sixteen_bytes_at_a_time() -> None:
    by_name = {launch.kernel.fn.__name__: launch for launch in launches(64, 4, "nearest", "softmax")}
    for name in ("key_kernel", "grad_kernel"):
        compiled = compile_launch(by_name[name], 90)
        assert re.search(r"ld\.global(\.\w+)*\.v4", compiled.asm["ptx"]), name


def test_bits_are_counted_by_an_instruction() -> None:
    counting = {"count_kernel", "place_kernel", "row_kernel", "token_kernel", "pair_kernel"}
    by_name = {launch.kernel.fn.__name__: launch for launch in launches(64, 4, "nearest_score", "softmax")}
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


def test_cpu_tensors_are_refused() -> None:
    spec = RoundingSpec("nearest", 16, "softmax", True, 1.0, 64)
    with pytest.raises(ValueError, match="need a GPU"):
        round_rows(torch.zeros(32, 2), torch.zeros(32, 1, dtype=torch.int32), torch.zeros(32, 1), None, None, spec)
