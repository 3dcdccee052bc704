"""A format and an architecture are added by rows of the table: one file each in this folder, nothing in the package.

The format is `toy_format`, with its load; the architecture is `toy_architecture`, which reads it and dense operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import toy_architecture
import toy_format
from toy_format import Int4Weight, quantize_int4

from tilemoe.cli.doctor import _choices
from tilemoe.config import PRECISIONS, MoEConfig
from tilemoe.kernels import choose
from tilemoe.kernels.choose import choose_experts, select_kernels
from tilemoe.kernels.experts import registry, table
from tilemoe.kernels.experts.table import TORCH, Row
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.layers import lora as lora_layer
from tilemoe.layers.lora import add_lora
from tilemoe.layers.moe import MoE
from tilemoe.ops import lora as lora_ops
from tilemoe.ops import moe as moe_module
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.testing import assert_equal, forward_and_grads, make_inputs

CPU, FP32 = torch.device("cpu"), torch.float32
PLAN = plan_topk(torch.arange(24).view(12, 2) % 5, 5)
INPUTS = make_inputs(PLAN, 16, 8, bias=True)
CFG = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=5, num_experts_per_tok=2)


def why_not_the_toy(device: torch.device, dtype: torch.dtype, why: str | None) -> str | None:
    return why or (None if device.type == "cpu" else "the toy is for CPUs")


TOY = f"{toy_architecture.__name__}:ToyBackend"
OF_DENSE = Row(
    "toy", TOY, "bf16", "a toy serves", "it is there to be seen",
    lambda dtype, *widths: None if dtype == FP32 else f"the toy computes in fp32, not {dtype}",
    why_not_the_toy, needs_triton=False,
)  # fmt: skip
OF_INT8, TORCH_OF_INT8 = (
    Row(
        name, architecture, "int8", "int8 serves", "int8 is asked for", toy_format.why_not, why_not_the_toy,
        toy_format.__name__, needs_triton=False,
    )
    for name, architecture in (("toy_int8", TOY), ("torch_int8", TORCH))
)  # fmt: skip


@pytest.fixture(autouse=True)
def rows_of_the_toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if they stood in the table; "int8" is the word that users ask for the format by."""
    rows = (OF_DENSE, OF_INT8, TORCH_OF_INT8)
    monkeypatch.setattr(table, "ROWS", (*rows, *table.ROWS))
    monkeypatch.setattr(registry, "_BACKENDS", registry._BACKENDS | {row.name: row for row in rows})
    monkeypatch.setattr(moe_module, "PRECISIONS", (*PRECISIONS, "int8"))
    for cached in (registry._made, choose._known_experts_on):
        cached.cache_clear()
    yield
    for cached in (registry._made, choose._known_experts_on):
        cached.cache_clear()


def test_they_are_chosen_for_their_reasons() -> None:
    chosen = select_kernels("cpu", FP32, CFG)
    assert (chosen.name, chosen.impl.name, chosen.impl.precision) == ("toy", "toy", "bf16")
    assert chosen.reason == "a toy serves cpu, torch.float32, d=16, n=8: it is there to be seen"
    assert select_kernels("cpu", torch.bfloat16, CFG).name == "torch"
    chosen = choose_experts(CPU, FP32, (16, 8), "int8")
    assert (chosen.name, chosen.impl.precision, chosen.impl.format) == ("toy_int8", "int8", toy_format)
    instead = choose_experts(CPU, torch.bfloat16, (16, 8), "int8")
    assert instead.name == "torch"
    assert instead.reason.startswith("not in INT8 (the toy quantises fp32, not torch.bfloat16): change that")
    assert f"experts in float32: toy ({select_kernels('cpu', FP32, CFG).reason})" in _choices("cpu", CFG, 16)


def test_the_architecture_trains(function: Callable[..., Any]) -> None:
    found = forward_and_grads(function, INPUTS, PLAN)
    expected = forward_and_grads(moe, INPUTS, PLAN, kernels="torch")
    for name, values in found.items():
        torch.testing.assert_close(values, expected[name])


def test_the_format_trains_on_both_architectures(function: Callable[..., Any]) -> None:
    found = forward_and_grads(function, INPUTS, PLAN, precision="int8")  # the first row's: the toy's architecture
    by_torch = forward_and_grads(moe, INPUTS, PLAN, precision="int8", kernels="torch_int8")
    plain = forward_and_grads(moe, INPUTS, PLAN, kernels="torch")
    for name, values in found.items():
        torch.testing.assert_close(values, by_torch[name])
        error = (values - plain[name]).norm() / plain[name].norm()
        assert error < 0.03, name
    assert not torch.equal(found["o"], plain["o"])
    assert_equal({"o": found["o"]}, {"o": moe(plan=PLAN, precision="int8", kernels="toy_int8", **INPUTS)})


def test_a_format_of_frozen_experts_trains_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are those of dense experts; none of the layer and the operator names it."""
    row = table.Storage(Int4Weight, quantize_int4, ("codes", "powers"))
    monkeypatch.setattr(lora_layer, "STORAGES", {"int4": row})
    monkeypatch.setattr(lora_ops, "PACKED", {"int4": Int4Weight})
    monkeypatch.setattr(TorchBackend, "packed", {"int4": "not tested"})
    layer, dense = (MoE(replace(CFG, hidden_size=16, intermediate_size=16), kernels="torch") for _ in range(2))
    add_lora(dense, 2, 4.0)
    add_lora(layer, 2, 4.0, storage="int4")
    state = {
        name: tensor for name, tensor in layer.state_dict().items() if "codes" not in name and "powers" not in name
    }
    for name in ("w1", "w2"):
        weight = layer.experts._frozen(name, lambda t: t)
        state[f"experts.{name}"] = torch.stack([weight.expert(index, FP32) for index in range(5)])
    dense.load_state_dict(state)
    x = torch.randn(12, 16)
    for each in (layer, dense):
        each(x).hidden.square().sum().backward()
    grads = [{name: p.grad for name, p in each.named_parameters() if p.requires_grad} for each in (layer, dense)]
    assert len(grads[0]) == 4
    assert_equal(*grads)
