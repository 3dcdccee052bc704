"""AdamW whose moments take a byte each (arXiv 2110.02861), by torchao (the extra ``fp8``).

A moment of a parameter of at least 4,096 elements, a multiple of 256, is ``codes`` (its shape) uint8 and ``scale``
(elements / 256) fp32: ``value = table[code] * scale`` of its block of 256. Any other moment stays fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

PARTS = ("codes", "scale")  # of a moment; the table is torchao's, the same for all
BLOCK = 256


def require_torchao() -> None:
    """ValueError unless torchao is installed."""
    if find_spec("torchao") is None:
        raise ValueError("optim.name 'adamw8bit' needs torchao: pip install 'tilemoe[fp8]', or use --optim.name adamw")


def make_adamw8bit(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """torchao's optimiser, its update compiled by torch.compile on a GPU. ValueError: torchao is not installed."""
    require_torchao()
    from torchao.optim import AdamW8bit

    class _AdamW8bit(AdamW8bit):
        def step(self, closure: Any = None) -> Any:
            on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"  # for which a compiler may be missing
            with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                return super().step(closure)

    return _AdamW8bit([group for group in groups if group["params"]])


def parts_of(moment: Tensor) -> dict[str, Tensor]:
    """Plain tensors by the end of their name: a moment of codes and scales in parts, any other whole, by ""."""
    if not hasattr(moment, "codes"):
        return {"": moment}
    return {f".{part}": getattr(moment, part) for part in PARTS}


def moment_of(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The inverse of `parts_of`; ``name``: "exp_avg", whose codes have a sign, or "exp_avg_sq"."""
    if "" in parts:
        return parts[""]
    from torchao.optim.subclass_8bit import OptimState8bit

    codes, is_signed = parts[".codes"], name == "exp_avg"
    made: Tensor = OptimState8bit.zeros(codes.shape, is_signed, BLOCK, codes.device, torch.float32)
    made.codes, made.scale = codes, parts[".scale"]  # type: ignore[attr-defined]
    return made
