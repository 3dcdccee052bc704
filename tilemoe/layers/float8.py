"""FP8 GEMMs for the attention's projections, by torchao's float8 training (the extra ``fp8``)."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from tilemoe.kernels.choose import choose_projections
from tilemoe.layers.attention import Attention
from tilemoe.runtime.tracing import warn_once

# One scale per tensor: torchao's fastest recipe, and the one that still gains at widths below 2048.
_RECIPE = "tensorwise"


def require_torchao() -> None:
    """ValueError unless torchao is installed."""
    if find_spec("torchao") is None:
        raise ValueError(
            "train.dense_precision 'fp8' needs torchao: pip install 'tilemoe[fp8]', or use --train.dense-precision bf16"
        )


def quantize_projections(model: nn.Module, device: torch.device) -> None:
    """Make the four projections of every `Attention` of ``model`` compute in FP8 on ``device``, in place.

    Parameters keep their dtype, device and names. On a GPU without FP8 nothing changes
    (`tilemoe.kernels.choose.choose_projections` says why); a CPU emulates FP8 in fp32. Either gives a warning.

    ValueError: torchao is not installed.
    """
    require_torchao()
    chosen = choose_projections(device)
    if chosen.name != "torchao" or device.type == "cpu":
        warn_once(f"attention's projections: {chosen.name}, {chosen.reason}")
    if chosen.name != "torchao":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(_RECIPE), emulate=device.type == "cpu")
    for module in list(model.modules()):
        if isinstance(module, Attention):
            convert_to_float8_training(module, config=config)
