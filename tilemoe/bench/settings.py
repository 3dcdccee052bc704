"""What a benchmark is told, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """The device, the contestants (the first is what the others are compared to), modes and rounds of each case.

    modes: "burst", "sustained" and, of the layer, "alone". kernels: the backend whose kernels are timed; None: the one
    that is chosen.
    """

    device: torch.device
    peers: Sequence[str] = ("tilemoe",)
    modes: Sequence[str] = ("burst", "sustained")
    rounds: int = 7
    kernels: str | None = None
