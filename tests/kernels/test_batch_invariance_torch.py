"""On a CPU what a token gets depends on the others by PyTorch's products alone: made row by row, they change no bit.

T tokens · E experts
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import raises_one_line
from invariance_checks import Batch, Sizes, assert_tokens_keep_their_bits, make_batch, results, results_in_4_bit
from torch import Tensor

from tilemoe.config import MoEConfig, TokenRounding
from tilemoe.kernels.experts.torch import grouped
from tilemoe.layers.lora import add_lora
from tilemoe.layers.moe import MoE
from tilemoe.routing.build import plan_topk

SIZES = Sizes(60, 256, 128, 4, 2)
RUNS = {
    "own dtype": partial(results, kernels="torch"),
    "FP8": partial(results, kernels="torch_fp8"),
    "NF4": partial(results_in_4_bit, kernels="torch", storage="nf4"),
    "MXFP4": partial(results_in_4_bit, kernels="torch", storage="mxfp4"),
}


def row_by_row(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*operands: Tensor, out: Tensor | None = None) -> Tensor:
        *bias, left, right = operands
        rows = torch.cat([product(*bias, row.contiguous(), right) for row in left.split(1)])
        return rows if out is None else out.copy_(rows)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("experts", RUNS)
def test_experts_of_any_batch(experts: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, row_by_row(getattr(torch, name)))
    monkeypatch.setattr(grouped, "_are_groupable", lambda *operands: False)

    def run(batch: Batch) -> dict[str, Tensor]:
        found = RUNS[experts](batch)
        return {what: tensor for what, tensor in found.items() if what != "ds"}  # a sum of PyTorch's over each row

    assert_tokens_keep_their_bits(make_batch(SIZES, dtype), run)


def test_what_nothing_computes_so_is_refused() -> None:
    sizes = (16, 8, 4, 2)
    layer, x = MoE(MoEConfig(*sizes, invariance="batch")), torch.randn(3, 16)
    with raises_one_line("invariance='batch': Triton does not run on cpu; set it to 'none'"):
        layer(x)
    plan = plan_topk(torch.tensor([[0, 1]] * 3), num_experts=4)
    with raises_one_line(
        "invariance='batch': kernels='torch' is not batch-invariant in torch.float32 .* pass kernels='triton' on a GPU"
    ):
        layer.experts(x, plan, torch.ones(3, 2))
    with raises_one_line("experts with invariance 'batch' cannot have adapters"):
        add_lora(layer, 2, 4.0)
    for other in ({"shared_intermediate_size": 8}, {"rounding": TokenRounding()}):
        with raises_one_line(f"invariance='batch' is only for a layer whose {next(iter(other))}"):
            MoEConfig(*sizes, invariance="batch", **other)
    with raises_one_line("invariance must be"):
        MoEConfig(*sizes, invariance="token")  # type: ignore[arg-type]
