"""Which activation a function is found to be, and every class of experts that transformers has: computed or refused."""

import importlib
import itertools
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import assert_near
from hf_models import experts, routing, run
from torch import Tensor

from tilemoe.activations import REGISTRY, activation_spec
from tilemoe.config import GATE_UP_LAYOUTS, GATED_ACTIVATIONS, UNGATED_ACTIVATIONS
from tilemoe.integrations.gates import recognised_activation
from tilemoe.kernels.experts.torch.activations import activation_rows

LIMIT, ALPHA = 7.0, 1.702


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *itertools.product(sorted(GATED_ACTIVATIONS), GATE_UP_LAYOUTS),
        *((name, "") for name in sorted(UNGATED_ACTIVATIONS)),
    ],
)
def test_every_activation(name: str, layout: str) -> None:
    """By the value that the package computes; without a layout where it is ungated."""
    entry = REGISTRY[name]
    spec = activation_spec(name, layout or "concatenated", entry.limit and LIMIT, entry.alpha)
    options = {"limit": LIMIT, "alpha": ALPHA} if layout else {}
    found = recognised_activation(lambda h: activation_rows(h, spec), is_gated=bool(layout), **options)
    assert found.name == name
    assert not layout or found.gate_up == layout


def halves(h: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = h.chunk(2, dim=-1)
    return gate, up


def in_fp32(h: Tensor) -> Tensor:
    gate, up = halves(h)
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda h: F.gelu(halves(h)[0]) * halves(h)[1], "geglu"),
        (lambda h: F.gelu(halves(h)[0], approximate="tanh") * halves(h)[1], "geglu_tanh"),
        (in_fp32, "swiglu"),
    ],
)
@pytest.mark.parametrize("outside", [False, True], ids=["", "under autocast and on meta"])
def test_functions_of_others(function: Callable[[Tensor], Tensor], name: str, outside: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=outside), torch.device("meta" if outside else "cpu"):
        found = recognised_activation(function, is_gated=True, limit=LIMIT, alpha=ALPHA)
    assert (found.name, found.gate_up) == (name, "concatenated")


def clamped(limit: float, alpha: float, shift: float) -> Callable[[Tensor], Tensor]:
    def function(h: Tensor) -> Tensor:
        gate, up = halves(h)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + shift) * gate * torch.sigmoid(alpha * gate)

    return function


def tanh_gelu(z: Tensor, slope: float) -> Tensor:
    return 0.5 * z * (1 + torch.tanh(slope * (z + 0.044715 * z**3)))


NEAR_MISSES: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh GELU of a rounded constant": lambda h: tanh_gelu(halves(h)[0], 0.8) * halves(h)[1],
    "quick GELU": lambda h: halves(h)[0] * torch.sigmoid(1.702 * halves(h)[0]) * halves(h)[1],
    "up before gate": lambda h: halves(h)[0] * F.silu(halves(h)[1]),
    "clamped at another limit": clamped(7.5, ALPHA, 1.0),
    "with another slope": clamped(LIMIT, 1.7, 1.0),
    "without the shift": clamped(LIMIT, ALPHA, 0.0),
    "clamped far out": lambda h: F.silu(halves(h)[0]).clamp(max=2e4) * halves(h)[1],
    "scaled": lambda h: 1.001 * F.silu(halves(h)[0]) * halves(h)[1],
    "noisy": lambda h: F.silu(halves(h)[0]) * halves(h)[1] * (1 + 0.01 * torch.randn(h.shape[0], 1)),
    "of another shape": lambda h: h,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_not_taken_for_what_they_resemble(name: str) -> None:
    assert recognised_activation(NEAR_MISSES[name], is_gated=True, limit=LIMIT, alpha=ALPHA) is None


def test_a_clamped_gate_needs_its_parameters() -> None:
    function = clamped(LIMIT, ALPHA, 1.0)
    assert recognised_activation(function, is_gated=True, limit=LIMIT, alpha=ALPHA) is not None
    assert recognised_activation(function, is_gated=True, limit=LIMIT) is None
    assert recognised_activation(function, is_gated=True, limit=LIMIT, alpha=1.0) is None
    without_alpha = clamped(LIMIT, 1.0, 0.0)
    assert recognised_activation(without_alpha, is_gated=True, limit=LIMIT) is not None
    assert recognised_activation(without_alpha, is_gated=True) is None


def test_the_probe_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    recognised_activation(lambda h: F.silu(halves(h)[0]) * halves(h)[1], is_gated=True)
    assert torch.equal(torch.get_rng_state(), before)


OF_5_24 = {"Inkling2LoopExperts"}
REFUSED = {"Inkling2Experts", "MuseSparkExperts"} | OF_5_24
_CLASS = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)


@cache
def every_class() -> dict[str, str]:
    """Name to module, read from the sources."""
    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in _CLASS.findall(file.read_text(encoding="utf-8")):
            found[name] = f"transformers.models.{file.parent.name}.{file.stem}"
    return found


def test_there_are_many_classes_and_those_refused_among_them() -> None:
    assert len(every_class()) > 60
    assert every_class().keys() >= REFUSED - OF_5_24


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", every_class())
def test_every_class(name: str) -> None:
    kind = getattr(importlib.import_module(every_class()[name]), name)
    module = experts(kind, mlp_gate_softcap=1.0, mlp_up_softcap=1.0)
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"cannot compute {name} \(made_up\): "):
            run(module, "tilemoe", *routing())
    else:
        assert_near(run(module, "tilemoe", *routing()), run(module, "eager", *routing()), 1e-5)
