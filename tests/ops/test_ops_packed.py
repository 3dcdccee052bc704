"""The operator on frozen weights in 4 bits against itself on their decoded values; what it keeps; what it refuses."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers import raises_one_line, saved_tensors
from test_ops_lora import CASES, ROUTINGS, SCALE, gradients, plan_of
from test_ops_lora import given as given_dense
from torch import Tensor

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts import registry
from tilemoe.kernels.experts.formats.nf4 import Nf4Weight
from tilemoe.kernels.experts.formats.packed import PackedWeight
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.ops import experts as library
from tilemoe.ops import lora
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.plan import RoutingPlan
from tilemoe.testing import assert_equal, poisoned_memory

D, N = 128, 64
PLAN = plan_of()


def frozen(weight: Tensor, storage: str, transposed: bool) -> PackedWeight:
    quantize = STORAGES[storage].quantize
    return quantize(weight.transpose(1, 2)).transpose(1, 2) if transposed else quantize(weight)


def decoded(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """As a tensor that is stored in the same order."""
    stored = weight if weight.blocked == 2 else weight.transpose(1, 2)
    dense = torch.stack([stored.expert(index, dtype) for index in range(stored.shape[0])])
    return dense if weight.blocked == 2 else dense.transpose(1, 2)


def given(plan: RoutingPlan, case: str, dtype: torch.dtype, storage: str = "nf4") -> tuple[dict[str, Any], Adapters]:
    """Arguments of `moe_lora`, w1 and w2 in 4 bits, of "oai" with blocks along the output."""
    found, adapters = given_dense(plan, case, dtype, D, N)
    return found | {name: frozen(found[name], storage, case == "oai") for name in ("w1", "w2")}, adapters


def run(arguments: dict[str, Any], adapters: Adapters, how: Any = moe_lora) -> list[Tensor]:
    """The output and the gradients of x, the scores and the adapters."""
    o = how(**arguments, adapters=adapters)
    return [o.detach(), *gradients(o, arguments, adapters)]


@pytest.mark.parametrize("kernel", ["combine", "dact"])
def test_out_of_memory_names_no_wrong_size_and_no_option_that_adapters_lack(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its codes have half of a weight's width."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(TorchBackend, kernel, fail)
    step = "moe_lora" if kernel == "combine" else "moe_lora_grad"
    with pytest.raises(torch.OutOfMemoryError) as error:
        run(*given(PLAN, "swiglu", torch.float32))
    assert str(error.value) == f"tilemoe.moe, {step}: CUDA out of memory. Pass fewer tokens per call."


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_hostile_routings_are_bit_equal_to_dense_weights(routing: str, case: str) -> None:
    storage = list(STORAGES)[(list(ROUTINGS).index(routing) + list(CASES).index(case)) % len(STORAGES)]
    for dtype in (torch.float64, torch.bfloat16):
        arguments, adapters = given(ROUTINGS[routing], case, dtype, storage)
        dense = {name: decoded(arguments[name], dtype) for name in ("w1", "w2")}
        with poisoned_memory():
            found, expected = run(arguments, adapters), run(arguments | dense, adapters)
        assert_equal(found, expected, dtype)


@pytest.mark.parametrize("storage", STORAGES)
def test_weights_are_saved_as_they_are_stored(storage: str) -> None:
    arguments, adapters = given(PLAN, "swiglu", torch.bfloat16, storage)
    with saved_tensors() as saved:
        moe_lora(**arguments, adapters=adapters)
    kept = {tensor.untyped_storage().data_ptr() for tensor in saved}
    alive = [part for name in ("w1", "w2") for part in arguments[name].tensors.values()]
    assert {each.untyped_storage().data_ptr() for each in alive} < kept
    assert max(tensor.nbytes for tensor in saved) == arguments["w1"].codes.nbytes, "and nothing is larger"


def test_autocast_decodes_to_its_own_dtype() -> None:
    arguments, adapters = given(PLAN, "swiglu", torch.bfloat16)
    wide = {name: each.float() if isinstance(each, Tensor) else each for name, each in arguments.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(moe_lora(**wide, adapters=adapters), moe_lora(**arguments, adapters=adapters))


@pytest.mark.parametrize("storage", STORAGES)
def test_compiled_whole(storage: str) -> None:
    arguments, adapters = given(PLAN, "oai", torch.float32, storage)
    compiled = torch.compile(moe_lora, fullgraph=True, backend="aot_eager")
    assert_equal(run(arguments, adapters, compiled), run(arguments, adapters))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("storage", ["dense", *STORAGES])
@pytest.mark.parametrize("plan", [PLAN, plan_of(0, 3, 2)], ids=["40 tokens", "none"])
def test_opcheck(plan: RoutingPlan, storage: str, case: str) -> None:
    make = partial(given, storage=storage) if storage in STORAGES else partial(given_dense, d=D, n=N)
    arguments, adapters = make(plan, case, torch.float32)
    spec = activation_spec(arguments["activation"], arguments["gate_up"], None, None)
    routed = (plan, spec, backend_named("torch"))
    tail = library.ROUTED.flatten(routed)
    weights = arguments["w1"], arguments["w2"]
    (data1, *scales1), (data2, *scales2) = map(lora._parts, weights)
    scores = arguments["scores"].detach().reshape(-1).requires_grad_()
    matrices = (arguments["x"], data1, data2, scores, *adapters[:4])
    scales, biases = (*scales1, *scales2), (arguments.get("b1"), arguments.get("b2"))
    options = (" ".join(map(lora._format, weights)), SCALE)
    torch.library.opcheck(lora._forward.registered, (*matrices, *biases, *scales, *options, *tail))
    detached = tuple(t.detach() for t in matrices)
    o, h, u = lora._forward(*detached, *biases, *scales, *options, *routed)
    backward = (torch.ones_like(o), *detached, biases[1], *scales, h, u, *options, *tail)
    torch.library.opcheck(lora._backward_op.registered, backward)


class Blind(TorchBackend):
    name = "blind"
    packed = MappingProxyType({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"w1": lambda w: Nf4Weight(w.codes, w.absmax.clone().requires_grad_())},
            r"w1.absmax must be frozen under adapters; call w1.absmax.requires_grad_\(False\)",
        ),
        ({"w1": lambda w: w[:, :64]}, r"w1 must be \(5, 128, 128\) to go with w2"),
        ({"x": lambda x: x[:, :96]}, r"x must be \(40, 128\) to go with w2"),
        (
            {
                "w2": lambda w: w[:, :96],
                "x": lambda x: x[:, :96],
                "w1": lambda w: w.expert(0, torch.float32).new_zeros(5, 128, 96),
            },
            "hidden_size must be a multiple of 64, the block of NF4, got 96",
        ),
        ({"w2": lambda w: Nf4Weight(w.codes.to("meta"), w.absmax.to("meta"))}, "w2 is on meta but x is on cpu"),
        ({"kernels": lambda _: "blind"}, "kernels='blind' cannot read weights in NF4; leave kernels out"),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BACKENDS, "blind", Blind)
    arguments, adapters = given(PLAN, "swiglu", torch.float32)
    arguments = {**arguments, "kernels": None}
    if "w2" in changes and "x" in changes:
        adapters = adapters._replace(up_a=adapters.up_a[:, :, :96], down_b=adapters.down_b[:, :96])
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with raises_one_line(message):
        moe_lora(**arguments, adapters=adapters)


@pytest.mark.parametrize("storage", ["dense", "nf4_double"])
def test_layers_of_one_kind_and_another_go_together(storage: str) -> None:
    """w1 in MXFP4, w2 in another kind."""
    arguments, adapters = given(PLAN, "swiglu", torch.float64, "mxfp4")
    dense = {name: decoded(arguments[name], torch.float64) for name in ("w1", "w2")}
    w2 = dense["w2"]
    if storage != "dense":
        w2 = frozen(dense["w2"], storage, transposed=False)
        dense["w2"] = decoded(w2, torch.float64)
    assert_equal(run(arguments | {"w2": w2}, adapters), run(arguments | dense, adapters))
