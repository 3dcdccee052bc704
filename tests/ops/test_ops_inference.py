"""Experts by ids without gradients, in one call: the same numbers, the same errors, and only where nobody would notice.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from helpers import Watching
from torch import Tensor, nn
from torch.autograd import forward_ad

from tilemoe.ops import inference
from tilemoe.ops.inference import Activation, experts
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk

T, D, N, E, K = 12, 16, 8, 6, 3
SWIGLU = Activation("swiglu", "concatenated", None, None)


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors pass for a GPU's."""
    monkeypatch.setattr(inference, "is_replayable", lambda first: True)


def operands(*, bias: bool = False, ids: torch.dtype = torch.int64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    chosen = random(T, E + 1).topk(K, dim=1).indices  # E is a sentinel
    return {
        "x": random(T, D), "w1": random(E, 2 * N, D), "w2": random(E, D, N), "b1": random(E, 2 * N) if bias else None,
        "b2": random(E, D) if bias else None, "expert_ids": chosen.to(ids), "scores": random(T, K),
    }  # fmt: skip


def by_operators(given: dict[str, Any], activation: Activation = SWIGLU) -> Tensor:
    rest = {name: value for name, value in given.items() if name != "expert_ids"}
    name, gate_up, limit, alpha = activation
    options: dict[str, Any] = {"gate_up": gate_up, "activation_limit": limit, "activation_alpha": alpha}
    return moe(plan=plan_topk(given["expert_ids"], given["w2"].shape[0]), activation=name, **options, **rest)


BAD: dict[str, dict[str, Callable[[Tensor], Any]]] = {
    "ids of floats": {"expert_ids": lambda t: t.float()},
    "ids without K": {"expert_ids": lambda t: t[:, 0]},
    "ids of fewer tokens": {"expert_ids": lambda t: t[1:]},
    "scores of another K": {"scores": lambda t: t[:, 1:]},
    "w1 of another width": {"w1": lambda t: t[:, 1:]},
    "w2 of one expert": {"w2": lambda t: t[0]},
    "x of another width": {"x": lambda t: t[:, 1:]},
    "x of another dtype": {"x": lambda t: t.half()},
    "biases of another width": {"b1": lambda t: t[:, 1:]},
}


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("name", BAD)
def test_the_same_errors(name: str) -> None:
    given = operands(bias=True)
    with torch.no_grad():
        assert experts(**given, activation=SWIGLU) is not None
        for key, change in BAD[name].items():
            given[key] = change(given[key])
        with pytest.raises(ValueError, match=r"\S") as ours:
            experts(**given, activation=SWIGLU)
        with pytest.raises(ValueError, match=r"\S") as theirs:
            by_operators(given)
    assert str(ours.value) == str(theirs.value)


WATCHED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autograd": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu"),
    "a profiler": torch.profiler.profile,
    "a dispatch mode": lambda: Watching(lambda *_: None),
    "forward-mode differentiation": forward_ad.dual_level,
}


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("by", WATCHED)
def test_whoever_watches_sees_the_operators(by: str) -> None:
    given = operands()
    with torch.no_grad():
        with WATCHED[by]():
            assert experts(**given, activation=SWIGLU) is None
        assert experts(**given, activation=SWIGLU) is not None


class Subclass(Tensor):
    pass


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("name", ["x", "w1", "w2", "b1", "b2", "expert_ids", "scores"])
def test_other_tensors_are_left_to_the_operators(name: str) -> None:
    given = operands(bias=True)
    with torch.no_grad():
        for change in (lambda t: t.to("meta"), lambda t: t.as_subclass(Subclass), lambda t: t.tolist()):
            if name != "x" or isinstance(change(given[name]), Tensor):
                assert experts(**{**given, name: change(given[name])}, activation=SWIGLU) is None
        parameter = given | ({} if name == "expert_ids" else {name: nn.Parameter(given[name])})
        assert experts(**parameter, activation=SWIGLU) is not None


@pytest.mark.usefixtures("unwatched")
def test_too_little_memory_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 is full. See the manual.")

    monkeypatch.setattr(inference, "moe_forward", full)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match=r"inference: CUDA.*12 tokens in 36 rows.*fewer"):
        experts(**operands(), activation=SWIGLU)
