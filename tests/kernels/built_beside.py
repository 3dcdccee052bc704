"""Triton's C functions are built beside the kernels that they start; in a process whose driver launches nothing."""

from __future__ import annotations

import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from fake_driver import H200, FakeDriver
from triton.backends.nvidia import driver

from tilemoe.kernels.select import kernel_set
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk


class CompilingDriver(FakeDriver):
    """Kernels are compiled and loaded in earnest, as far as that goes without a GPU."""

    launcher_cls = driver.CudaLauncher

    def __init__(self) -> None:
        super().__init__()
        self.utils.load_binary = lambda *args: (1, 1, 100, 0, 1024)
        self.utils.get_device_properties = lambda device: {"max_shared_mem": H200.shared_bytes}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Source of each C function that is asked for, and whether by the thread that launches."""
    found: list[tuple[str, bool]] = []

    def build(*, src: str, name: str, **options: Any) -> Any:
        assert set(options) == {"library_dirs", "include_dirs", "libraries"}
        found.append((src, threading.current_thread() is threading.main_thread()))
        return SimpleNamespace(launch=partial(lambda *args: None))  # no Python function, as C's is none

    monkeypatch.setattr(driver, "compile_module_from_src", build)
    monkeypatch.setattr(driver, "library_dirs", list)  # there is no libcuda here to find
    triton.runtime.driver.set_active(CompilingDriver())
    kernel_set("hopper")  # imports all that looks at the device
    for name, module in list(sys.modules.items()):
        if name.startswith("tilemoe.kernels.") and hasattr(module, "device_of"):
            monkeypatch.setattr(module, "device_of", lambda t: H200)
    return found


@pytest.mark.parametrize("kernels", ["triton", "hopper"])
def test_what_a_launch_asks_for_is_there_already(kernels: str, built: list[tuple[str, bool]]) -> None:
    plan = plan_topk(torch.rand(64, 4).topk(2).indices, 4)
    x, w1, w2 = (torch.zeros(size, dtype=torch.bfloat16) for size in ((64, 128), (4, 256, 128), (4, 128, 128)))
    leaves = [leaf.requires_grad_() for leaf in (x, w1, w2, torch.rand(64, 2))]
    o = moe(x, w1, w2, plan, leaves[3], kernels=kernels)
    torch.autograd.grad(o, leaves, torch.zeros_like(o))
    asked = [source for source, is_main in built if is_main]
    beside = {source for source, is_main in built if not is_main}
    assert len(asked) >= 4
    assert set(asked) == beside, "none is missing, and none is built for nothing"


def test_what_goes_wrong_beside_is_left_to_triton(
    built: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**options: Any) -> Any:
        raise RuntimeError(f"no C compiler in {threading.current_thread() is threading.main_thread()}")

    monkeypatch.setattr(driver, "compile_module_from_src", fail)
    plan = plan_topk(torch.rand(64, 4).topk(2).indices, 4)
    x, w1, w2 = (torch.zeros(size, dtype=torch.float16) for size in ((64, 128), (4, 256, 128), (4, 128, 128)))
    with pytest.raises(RuntimeError, match="no C compiler in True"):
        moe(x, w1, w2, plan, torch.rand(64, 2), kernels="triton")
