"""When a weight's FP8 operands are kept and when they are made anew. PyTorch quantises here; no kernel runs.

E experts · a weight is (E, p, q)
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tilemoe.config import ParallelConfig
from tilemoe.kernels.experts.formats import fp8
from tilemoe.kernels.experts.formats.fp8 import ROWS, WEIGHTS, quantize, scales_of
from tilemoe.kernels.experts.formats.operand import Operand
from tilemoe.kernels.experts.triton.formats import fp8 as by_triton
from tilemoe.parallel.model import begin_micro_batch, micro_batches
from tilemoe.runtime.weight_cache import promise_unchanged_weights
from tilemoe.testing import assert_equal


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Scales and contraction of each launch that quantises a weight."""
    found = list[tuple[str, int]]()

    def by_torch(weight: Tensor, block: tuple[int, int]) -> Operand:
        found.append(("blocks" if block == WEIGHTS else "rows", 2 if block == WEIGHTS or block[0] == 1 else 1))
        if block[1] == 1:  # contiguous along the lines
            return quantize(weight.detach().transpose(1, 2), block[::-1]).transpose(1, 2)
        return quantize(weight.detach(), block)

    monkeypatch.setattr(by_triton, "quantized_weight", by_torch)
    return found


Launched = list[tuple[str, int]]


def a_weight(dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.randn(2, 128, 256, dtype=dtype))


def row_weight(weight: Tensor | Operand, contracted: int) -> Operand:
    return by_triton.weight_for("up_proj_act" if contracted == 2 else "up_proj_dgrad", weight)


def block_weight(weight: Tensor | Operand) -> Operand:
    return by_triton.weight_for("down_proj", weight)


def is_same(left: Operand, right: Operand) -> bool:
    return left.data is right.data and left.scale is right.scale


def test_a_weight_is_quantised_once_for_each_use(launched: Launched) -> None:
    weight = a_weight()
    first, second, third = row_weight(weight, 2), row_weight(weight, 1), block_weight(weight)
    assert launched == [("rows", 2), ("rows", 1), ("blocks", 2)]
    assert is_same(row_weight(weight, 2), first), "another use does not put it away"
    assert is_same(row_weight(weight, 1), second)
    assert is_same(block_weight(weight), third)
    assert len(launched) == 3
    assert [scales_of(operand) for operand in (first, second.transpose(1, 2), third)] == ["rows", "rows", "blocks"]
    assert first.data.is_contiguous()
    assert second.data.transpose(1, 2).is_contiguous()
    assert third.data.is_contiguous()


def test_what_a_compiling_call_makes_is_not_kept(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches are withheld, so its memory is uninitialised. The same where another operand is kept already."""
    weight = a_weight()
    for dim in (2, 1):
        monkeypatch.setattr(fp8, "withholds_values", lambda: True)
        withheld = row_weight(weight, dim)
        monkeypatch.setattr(fp8, "withholds_values", lambda: False)
        kept = row_weight(weight, dim)
        assert is_same(row_weight(weight, dim), kept)
        assert not is_same(kept, withheld)
    assert launched == [("rows", 2)] * 2 + [("rows", 1)] * 2


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(-2)


def by_an_optimiser(weight: nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()


def other_memory(weight: nn.Parameter) -> None:
    """`.data = ` leaves the version counter, not the address."""
    version = weight._version
    weight.data = torch.randn_like(weight)
    assert weight._version == version


@pytest.mark.parametrize("change", [in_place, by_an_optimiser, other_memory])
def test_a_change_renews_all_and_frees_what_was_kept(
    change: Callable[[nn.Parameter], None], launched: Launched
) -> None:
    weight = a_weight()
    before = [weakref.ref(each.data) for each in (row_weight(weight, 1), row_weight(weight, 2), block_weight(weight))]
    change(weight)
    for found, block in (
        (row_weight(weight, 1), (128, 1)),
        (row_weight(weight, 2), (1, 256)),
        (block_weight(weight), WEIGHTS),
    ):
        assert_equal(found.dense(torch.float32), quantize(weight.detach(), block).dense(torch.float32))
    assert len(launched) == 6
    gc.collect()
    assert all(data() is None for data in before)


def test_another_stream_does_not_read_what_one_is_making(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = a_weight()
    first = row_weight(weight, 2)
    monkeypatch.setattr(fp8, "_stream_of", lambda weight: 7)
    assert not is_same(row_weight(weight, 2), first)
    assert len(launched) == 2
    assert is_same(row_weight(weight, 2), row_weight(weight, 2))
    assert len(launched) == 2


def of_no_leaf() -> Tensor:
    return a_weight() * 1


def of_inference() -> Tensor:
    with torch.inference_mode():
        return torch.randn(2, 128, 256)


@pytest.mark.parametrize("make", [of_no_leaf, of_inference])
def test_what_has_no_counter_of_its_own_is_not_kept(make: Callable[[], Tensor], launched: Launched) -> None:
    weight = make()
    assert not is_same(row_weight(weight, 2), row_weight(weight, 2))
    row_weight(weight, 1)
    assert launched == [("rows", 2), ("rows", 2), ("rows", 1)]
    assert weight not in fp8._KEPT


def test_nothing_is_kept_among_processes(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may change the weight, which the version counter does not tell; nor is what was kept given."""
    weight = a_weight()
    before = row_weight(weight, 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert not is_same(row_weight(weight, 2), before)
    row_weight(weight, 2)
    assert len(launched) == 3


def test_what_stands_is_kept_among_processes(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = a_weight()
    before = row_weight(weight, 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with promise_unchanged_weights():
        first, second = row_weight(weight, 2), row_weight(weight, 1)
        assert not is_same(first, before), "of the time before there were processes"
        assert is_same(row_weight(weight, 2), first)
        assert is_same(row_weight(weight, 1), second)
        assert len(launched) == 3
        data = weakref.ref(second.data)
    del first, second
    gc.collect()
    assert data() is None
    with promise_unchanged_weights():
        row_weight(weight, 1)
    assert len(launched) == 4


class _Products(torch.autograd.Function):
    """x (T,q) times weight (E,p,q) of two FP8 operands, as up_proj and up_proj_dgrad read them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.einsum("tq,epq->tp", x, row_weight(weight, 2).dense(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = torch.einsum("tp,epq->tq", grads[0], row_weight(weight, 1).dense(x.dtype))
        return dx, torch.einsum("tp,tq->pq", grads[0], x).expand_as(weight).contiguous()


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = a_weight(dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(_Products.apply(x, self.weight))


@pytest.mark.parametrize(("between", "a_step"), [("nothing", 6), ("weights", 2), ("weights_and_gradients", 2)])
def test_a_weight_that_fsdp_gathers_is_quantised_once_a_step_for_each_use(
    between: Literal["nothing", "weights", "weights_and_gradients"],
    a_step: int,
    launched: Launched,
    one_process: DeviceMesh,
) -> None:
    """In a step of three micro-batches whose gathers PyTorch's version counter does not tell of."""
    config = ParallelConfig(between_micro_batches=between, reshard_after_forward=False)
    model = _Layer()
    fully_shard(model, mesh=one_process, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        launched.clear()
        values = model.weight.detach().to_local().bfloat16()
        with micro_batches(config):
            for part in range(3):
                begin_micro_batch(model, config, is_last=part == 2)
                x = torch.ones(4, 256, dtype=torch.bfloat16, requires_grad=True)
                o = model(x)
                o.backward(torch.ones_like(o))
                assert_equal(o, torch.einsum("tq,epq->tp", x, quantize(values, (1, 256)).dense(x.dtype)))
        assert len(launched) == a_step
        optimizer.step()
        optimizer.zero_grad()


def test_operands_end_with_their_weight(launched: Launched) -> None:
    weight = a_weight()
    data = [weakref.ref(row_weight(weight, dim).data) for dim in (1, 2)]
    gc.collect()
    assert all(of_dim() is not None for of_dim in data)
    del weight
    gc.collect()
    assert all(of_dim() is None for of_dim in data)


def test_operands_pass_as_they_are(launched: Launched) -> None:
    operand = quantize(torch.randn(2, 128, 256), WEIGHTS)
    assert block_weight(operand) is operand
    assert row_weight(operand, 2) is operand
    rows = quantize(torch.randn(3, 256), ROWS)
    assert by_triton.rows_for("up_proj_act", rows) is rows
    assert launched == []
