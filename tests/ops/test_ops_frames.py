"""The way of a tensor: which functions of the package stand between the call of a layer and the launch of a kernel."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import triton

import tilemoe
from tilemoe.kernels.experts.hopper import backend as hopper_backend
from tilemoe.kernels.experts.hopper.configs import TRITON_VERSIONS
from tilemoe.kernels.experts.triton import backend as triton_backend
from tilemoe.kernels.experts.triton import combine
from tilemoe.kernels.experts.triton.tiles import tile_lists_kernel
from tilemoe.runtime import launch as launch_module
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch

H200 = Device(capability=90, shared_bytes=227 * 1024, multiprocessors=132)
PACKAGE = Path(tilemoe.__file__).parent
MOST = 9
BACKENDS = {"triton": "TritonBackend"}
if triton.__version__.startswith(TRITON_VERSIONS):
    BACKENDS["hopper"] = "HopperBackend"
WAY = ["MoE.forward", "Experts.forward", "moe", "Operator.__call__", "moe_forward"]  # to any backend


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors pass for those of a GPU."""
    for module in (hopper_backend, triton_backend, combine):
        monkeypatch.setattr(module, "device_of", lambda t: H200)


class Stop(Exception):
    """Raised inside the launch of a kernel."""


def of_package(frames: Iterable[FrameType]) -> list[str]:
    """The functions of the package among ``frames``."""
    codes = [frame.f_code for frame in frames]
    return [code.co_qualname for code in codes if PACKAGE in Path(code.co_filename).parents]


def layer_of(kernels: str, tokens: int) -> tuple[tilemoe.MoE, torch.Tensor]:
    cfg = tilemoe.MoEConfig(128, 64, 4, 2)
    x = torch.randn(tokens, 128, dtype=torch.bfloat16)
    return tilemoe.MoE(cfg, dtype=torch.bfloat16, kernels=kernels), x


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("with_gradients", [True, False])
def test_the_way_to_the_first_gemm(kernels: str, with_gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(kernel: Any, device: torch.device) -> None:
        raise Stop

    run = Launch.run
    monkeypatch.setattr(launch_module, "_compiled", stop)
    # The list of tiles is launched before, by functions of its own.
    monkeypatch.setattr(Launch, "run", lambda launch: launch.kernel is tile_lists_kernel or run(launch))
    layer, x = layer_of(kernels, 640)
    with torch.set_grad_enabled(with_gradients), pytest.raises(Stop) as raised:
        layer(x)
    found = of_package(frame for frame, _ in traceback.walk_tb(raised.value.__traceback__))
    method = "up_proj_act" if with_gradients else "up_proj_act_inference"
    assert found == [*WAY, f"TritonBackend.{method}", f"{BACKENDS[kernels]}._up_proj_act", "Launch.run"]
    assert len(found) <= MOST
