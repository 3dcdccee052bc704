"""Fixtures of every test directory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Check, run_on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tilemoe.testing import poisoned_memory as poisoned_memory_block

pytest_plugins = ("process_cases", "pytester")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN (integers: the largest value) while the test runs."""
    with poisoned_memory_block():
        yield


@pytest.fixture
def all_wgrads_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of any width have FP8 operands in their weight gradients, if in other GEMMs."""
    monkeypatch.setattr("tilemoe.config.FP8_WGRAD_WIDTH", 1)
    monkeypatch.setattr("tilemoe.config.FP8_WGRAD_ELEMENTS", 1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes in one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_process() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> Callable[[Sequence[Check]], list[Check]]:
    """Of the checks whose names this module's tests have as their parameter ``name``: those whose tests are to run."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = {item.callspec.params.get("name") for item in items}
    return lambda checks: [check for check in checks if check.__name__ in names]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What came of a module's ``CHECKS``, by the check's name, on as many processes as its ``RANKS`` says."""
    ranks = getattr(request.module, "RANKS", 4)
    return run_on_ranks(selected(request.module.CHECKS), ranks, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def gpu_results(
    request: pytest.FixtureRequest, selected: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The same on GPUs, four or two."""
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    return run_on_ranks(selected(request.module.CHECKS), ranks, tmp_path_factory.mktemp("gpu_ranks"), "cuda")
