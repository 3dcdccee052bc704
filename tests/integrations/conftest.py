from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from tilemoe.integrations import transformers as integration


@pytest.fixture
def registered() -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every call of the expert MLP by the integration, with adapters or without."""
    seen: list[dict[str, Any]] = []

    def recording(compute: Callable[..., Tensor], x: Tensor, w1: Tensor, w2: Tensor, *rest: Any, **more: Any) -> Tensor:
        seen.append({"x": x, "w1": w1, "w2": w2, **more})
        return compute(x, w1, w2, *rest, **more)

    for name in ("moe", "moe_lora"):
        monkeypatch.setattr(integration, name, partial(recording, getattr(integration, name)))
    return seen


@pytest.fixture
def unregistered_after() -> Iterator[None]:
    """For a test that registers by itself."""
    yield
    integration.unregister()
