"""The seam for backends: what may be registered, and that a layer computes and trains with a user's own."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import raises_one_line, run_python
from torch import Tensor
from toy_format import quantize

import tilemoe
from tilemoe.kernels import choose
from tilemoe.kernels.experts import registry
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.operand import Operand
from tilemoe.kernels.experts.registry import backend_named, backend_of, check_kernels, register_backend
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.testing import assert_equal, forward_and_grads, make_inputs

BUILT_IN = ("blackwell", "hopper", "hopper_fp8", "torch", "torch_fp8", "triton")
PLAN = plan_topk(torch.arange(24).view(12, 2) % 5, 5)
INPUTS = make_inputs(PLAN, 16, 8, bias=True)

NAMES = "blackwell, hopper, hopper_fp8, torch, torch_fp8, triton"


class Doubled(TorchBackend):
    """down_proj gives twice what it should, so that it is seen; its gradients are those of the plain layer."""

    name = "doubled"

    def down_proj(self, a: Tensor, w2: Tensor, b2: Tensor | None, plan: tilemoe.RoutingPlan) -> Tensor:
        return 2 * super().down_proj(a, w2, b2, plan)


class Int8Weights(TorchBackend):
    """w2 in int8 with a scale for each row: how a backend of a narrow precision uses `Operand`."""

    name = "int8_weights"

    def down_proj(self, a: Tensor, w2: Tensor, b2: Tensor | None, plan: tilemoe.RoutingPlan) -> Tensor:
        return super().down_proj(a, quantize(w2, 2).dense(w2.dtype), b2, plan)


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    """Names that a test registers are free again after it."""
    before = dict(registry._BACKENDS)
    yield
    registry._BACKENDS.clear()
    registry._BACKENDS.update(before)
    registry._made.cache_clear()
    choose._known_experts_on.cache_clear()  # it holds backends that are made anew now


def test_each_backend_has_the_name_that_it_is_registered_by() -> None:
    for name in BUILT_IN:
        assert backend_named(name).name == name
        assert backend_named(name) is backend_named(name)
        assert backend_of(name) is backend_of(backend_named(name)) is backend_named(name)
        check_kernels(name)
        check_kernels(backend_named(name))


def missing_kernels() -> type[Backend]:
    class Partial(Backend):
        name = "partial"

        def why_unsupported(self, *args: Any) -> str | None:
            return None

    return Partial


@pytest.mark.parametrize(
    ("name", "cls", "message"),
    [
        ("torch", TorchBackend, f"name 'torch' is taken; the backends are {NAMES}"),
        ("hopper", Doubled, "name 'hopper' is taken"),
        ("two words", Doubled, "name must be letters, digits and underscores, got 'two words'"),
        (3, Doubled, "name must be letters, digits and underscores, got 3"),
        ("mine", Doubled(), "cls must be a subclass of tilemoe.Backend, got <.*Doubled object"),
        ("mine", dict, "cls must be a subclass of tilemoe.Backend, got <class 'dict'>"),
        ("mine", Doubled, "cls Doubled must be named as it is registered; set name = 'mine' in it"),
        ("partial", missing_kernels(), "cls Partial does not define combine, combine_grad, down_proj, "),
    ],
)
def test_what_cannot_be_registered_is_named_in_one_line(name: Any, cls: Any, message: str) -> None:
    with raises_one_line(message):
        register_backend(name, cls)
    with pytest.raises(ValueError, match=f"one of {NAMES}; got"):
        check_kernels("mine")


@pytest.mark.parametrize("name", ["cutlass", "triton_fp8", 3, None, [], {}], ids=str)
def test_unknown_names_are_refused_in_one_line(name: Any) -> None:
    for ask in (backend_named, backend_of, check_kernels):
        with raises_one_line(f"kernels must be None or one of {NAMES}; got"):
            ask(name)


@pytest.mark.parametrize("kernels", ["doubled", Doubled()], ids=["name", "instance"])
def test_a_users_backend_trains(kernels: str | Backend, function: Callable[..., Any]) -> None:
    """Its down_proj is taken, in inference, too, and what it inherits makes the gradients."""
    register_backend("doubled", Doubled)
    found, plain = forward_and_grads(function, INPUTS, PLAN, kernels=kernels), forward_and_grads(moe, INPUTS, PLAN)
    assert torch.equal(found.pop("o"), 2 * plain.pop("o"))
    assert found.keys() == plain.keys()
    assert_equal(found, plain)
    with torch.no_grad():
        assert torch.equal(function(plan=PLAN, kernels=kernels, **INPUTS), 2 * moe(plan=PLAN, **INPUTS))


@pytest.mark.parametrize("kernels", ["doubled", Doubled()], ids=["name", "instance"])
def test_layers_and_adapters_take_it_too(kernels: str | Backend) -> None:
    register_backend("doubled", Doubled)
    cfg = tilemoe.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=5, num_experts_per_tok=2)
    layer, plain = tilemoe.MoE(cfg, kernels=kernels), tilemoe.MoE(cfg)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(7, 16)
    torch.testing.assert_close(layer(x).hidden, 2 * plain(x).hidden)
    assert layer(x).hidden.isfinite().all()
    shapes = {"up_a": (5, 2, 16), "up_b": (5, 16, 2), "down_a": (5, 2, 8), "down_b": (5, 16, 2)}
    adapters = Adapters(**{name: torch.randn(shape) for name, shape in shapes.items()}, scale=0.5)
    given = {**INPUTS, "adapters": adapters, "plan": PLAN}
    assert not torch.equal(moe_lora(**given, kernels=kernels), moe_lora(**given))


def test_an_instance_of_no_registered_class_says_how_to_register_it() -> None:
    class Other(TorchBackend):
        pass

    fix = r"kernels: Other is not the class registered as 'torch'; give it a name of its own and call tilemoe\.register"
    cfg = tilemoe.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=5, num_experts_per_tok=2)
    with pytest.raises(ValueError, match=fix):
        moe(plan=PLAN, kernels=Other(), **INPUTS)
    with pytest.raises(ValueError, match=fix):
        tilemoe.MoE(cfg, kernels=Other())
    with pytest.raises(ValueError, match=f"kernels must be None or one of {NAMES}; got 'doubled'"):
        tilemoe.MoE(cfg, kernels=Doubled())


def test_an_operand_is_its_data_times_its_scales() -> None:
    data = torch.arange(2 * 5 * 7).view(2, 5, 7) - 30
    scale = torch.rand(2, 3, 3, dtype=torch.float64) + 0.5
    operand = Operand(data.to(torch.int8), scale, (2, 3), torch.float64)
    dense = operand.dense(torch.float64)
    for e, i, j in itertools.product(range(2), range(5), range(7)):
        assert dense[e, i, j] == data[e, i, j] * scale[e, i // 2, j // 3]
    assert_equal(operand.transpose(1, 2).dense(torch.float64), dense.transpose(1, 2))
    for parts in ((slice(1, 2),), (slice(None), slice(2, 5)), (slice(None), slice(None), slice(3, 6))):
        assert_equal(operand[parts].dense(torch.float64), dense[parts])
    with pytest.raises(AssertionError, match="a scale for each block"):
        Operand(data, scale[:, :2], (2, 3), torch.float64)


def test_a_backend_of_a_narrow_precision_trains_within_its_rounding(function: Callable[..., Any]) -> None:
    register_backend("int8_weights", Int8Weights)
    found, plain = (
        forward_and_grads(function, INPUTS, PLAN, kernels="int8_weights"),
        forward_and_grads(moe, INPUTS, PLAN),
    )
    rounded = {**INPUTS, "w2": quantize(INPUTS["w2"], 2).dense(torch.float32)}
    assert torch.equal(found["o"], moe(plan=PLAN, **rounded))
    assert 0 < (found.pop("o") - plain.pop("o")).abs().max() < 0.02 * INPUTS["w2"].abs().max()
    assert_equal(found, plain)


def test_triton_is_not_imported_by_names_choices_and_a_step_on_a_cpu() -> None:
    run_python(
        """
import sys, torch, tilemoe
tilemoe.Backend, tilemoe.register_backend, tilemoe.select_kernels("cpu", torch.bfloat16)
tilemoe.MoE(tilemoe.MoEConfig(8, 8, 4, 2), kernels="hopper")
tilemoe.MoE(tilemoe.MoEConfig(8, 8, 4, 2))(torch.ones(3, 8)).hidden.sum().backward()
assert "triton" not in sys.modules, "triton was imported"
"""
    )


def test_without_triton_its_backends_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "has_triton", lambda: False)
    registry._made.cache_clear()
    for name in ("triton", "hopper"):
        with pytest.raises(ValueError, match=f"kernels='{name}' needs the package triton; install a build of PyTorch"):
            backend_named(name)
    assert backend_named("torch").name == "torch"
