"""What the package's own Python does in an eager forward on a CPU: few calls, in few files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import tilemoe

PACKAGE = str(Path(tilemoe.__file__).parent)
MOST_CALLS, MOST_FILES = 100, 20


def files_called(layer: tilemoe.MoE, x: torch.Tensor) -> list[str]:
    """The file of each call of one of the package's functions, generators' and comprehensions' among them."""
    files: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return files


@pytest.mark.parametrize("losses", [False, True])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_forward_calls_little(losses: bool, with_gradients: bool) -> None:
    router = tilemoe.RouterConfig(aux_loss_coef=0.01, z_loss_coef=0.001) if losses else tilemoe.RouterConfig()
    layer = tilemoe.MoE(tilemoe.MoEConfig(128, 64, 4, 2, router=router))
    x = torch.randn(640, 128, requires_grad=with_gradients)
    with torch.set_grad_enabled(with_gradients):
        layer(x)  # what is found once, and imported, is not counted
        files = files_called(layer, x)
    assert 0 < len(files) <= MOST_CALLS
    assert len(set(files)) <= MOST_FILES
