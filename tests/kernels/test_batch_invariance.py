"""In Triton's interpreter and on a GPU a token, its routing given, gets the same bits whatever the other tokens of its
batch are.

T tokens · E experts
"""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from invariance_checks import Batch, Sizes, assert_tokens_keep_their_bits, make_batch, results, results_in_4_bit
from torch import Tensor
from triton_checks import DEVICE, INTERPRETED

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.triton.configs import small_m
from tilemoe.layers.moe import MoE
from tilemoe.ops import router
from tilemoe.routing.topk import _select_fused

pytestmark = [
    pytest.mark.process("interpreter"),
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory", "exact_products"),
]

if INTERPRETED:
    # An expert with rows of two tiles, the second a ragged one; and sums over two tiles of the contraction.
    SIZES = {"many rows": Sizes(52, 16, 8, 2, 2), "wide": Sizes(12, 72, 72, 2, 1)}
    RUNS = [("triton", "many rows", torch.float32), ("triton", "wide", torch.float16)]
    IN_4_BIT = [("triton", Sizes(20, 64, 64, 2, 2), torch.float32)]
else:
    SIZES = {
        "many rows": Sizes(3000, 256, 128, 8, 2),
        "fine experts": Sizes(1000, 768, 256, 64, 8),
        "ragged widths": Sizes(700, 328, 136, 5, 2),
    }
    RUNS = [*product(("triton", "hopper"), SIZES, (torch.bfloat16, torch.float16))]
    RUNS += [("hopper_fp8", name, torch.bfloat16) for name in ("many rows", "fine experts")]  # scales of a token's row
    IN_4_BIT = [(kernels, SIZES["many rows"], torch.bfloat16) for kernels in ("triton", "hopper")]


def batch_for(kernels: str, sizes: Sizes, dtype: torch.dtype) -> Batch:
    """Skips the test on a GPU that these kernels do not serve."""
    batch = make_batch(sizes, dtype, DEVICE)
    if not INTERPRETED and (why := backend_named(kernels).why_unsupported(DEVICE, dtype)):
        pytest.skip(why)
    return batch


@pytest.mark.parametrize(("kernels", "name", "dtype"), RUNS)
def test_experts_of_any_batch(kernels: str, name: str, dtype: torch.dtype) -> None:
    assert_tokens_keep_their_bits(batch_for(kernels, SIZES[name], dtype), partial(results, kernels=kernels))


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's product, the interpreter's dot, adds by a row's place in its tile on some CPUs: here it is fp64's.

    On a GPU a tile is one instruction after the other, the same for each of its rows.
    """
    matmul = np.matmul

    def exact(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", exact)


@pytest.mark.parametrize("storage", ["nf4", "mxfp4"])
@pytest.mark.parametrize(("kernels", "sizes", "dtype"), IN_4_BIT)
def test_experts_in_4_bit_of_any_batch(kernels: str, sizes: Sizes, dtype: torch.dtype, storage: str) -> None:
    run = partial(results_in_4_bit, kernels=kernels, storage=storage)
    assert_tokens_keep_their_bits(batch_for(kernels, sizes, dtype), run)


@pytest.mark.skipif(not INTERPRETED, reason="of its batches")
def test_the_batches_reach_both_tiles_of_inference_and_the_large_ones() -> None:
    tokens, *_, experts, k = SIZES["many rows"]
    assert [small_m(rows * k, experts) for rows in (1, 9, tokens)] == [16, 64, None]


@pytest.mark.parametrize(("kernels", "name", "dtype"), [run for run in RUNS if run[0] != "hopper_fp8"])
def test_a_whole_layer_of_any_batch(
    kernels: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``invariance="batch"``: the linear router, its choice and its scores, and the experts."""
    if INTERPRETED:
        monkeypatch.setattr(router, "why_no_triton", lambda device: None)
    batch, sizes = batch_for(kernels, SIZES[name], dtype), SIZES[name]
    cfg = MoEConfig(*sizes[1:], router=RouterConfig(bias=True, normalize=False), invariance="batch")
    layer = MoE(cfg, device=DEVICE, dtype=dtype, kernels=kernels)
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)))

    def run(part: Batch) -> dict[str, Tensor]:
        x = part.x.nan_to_num(100.0)  # a router on a CPU refuses NaN
        out = layer(x.requires_grad_())
        with torch.no_grad():
            inferred = layer(x).hidden
        assert out.router_logits is not None
        assert out.expert_ids is not None
        return {
            "logits": out.router_logits.detach(), "ids": out.expert_ids, "o": out.hidden.detach(), "inferred": inferred
        }  # fmt: skip

    assert_tokens_keep_their_bits(batch, run)


@pytest.mark.skipif(not INTERPRETED, reason="of the interpreter alone: docs/replay.md")
@pytest.mark.parametrize("preset", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_router_given_the_logits(preset: str) -> None:
    cfg = MoEConfig(8, 8, 16, 3, router=RouterConfig.preset(preset))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(150, 16, generator=generator)
    bias = torch.randn(16, generator=generator) if cfg.router.selection_bias else None
    d_scores = torch.randn(150, 3, generator=generator)

    def run(tokens: Tensor) -> list[Tensor]:
        part = logits[tokens].requires_grad_()
        chosen = _select_fused(part, cfg, bias, None)
        return [chosen.expert_ids, chosen.scores.detach(), *torch.autograd.grad(chosen.scores, part, d_scores[tokens])]

    whole = run(torch.arange(150))
    for part in (torch.tensor([7]), torch.arange(100, 117), torch.randperm(150, generator=generator)):
        for got, want in zip(run(part), whole, strict=True):
            assert torch.equal(got, want[part])
