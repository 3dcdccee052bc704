"""Chooses the transport by which a process group exchanges tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tilemoe.checks import require_bool, require_choice, require_int
from tilemoe.config import EXCHANGES
from tilemoe.dispatch.base import LayerRoom
from tilemoe.dispatch.collective import Collective

if TYPE_CHECKING:
    from tilemoe.dispatch.window import Windows


class Transports:
    """The transport of one group. All ranks make it together when rows are first sent, since it depends on the device.

    ``exchange``: "collective", by ``all_to_all_single``; "symmetric", through windows in memory that all GPUs read;
    "auto", "symmetric" if it is possible. All ``layers`` share the window. ``keep_received``: see `ParallelConfig`;
    ``max_tokens``: see `expert_parallel`.
    """

    def __init__(
        self, group: dist.ProcessGroup, exchange: str = "auto", keep_received: bool = False, max_tokens: int = 0
    ) -> None:
        """ValueError: an argument is invalid."""
        require_choice("exchange", exchange, EXCHANGES)
        require_bool("keep_received", keep_received)
        require_int("max_tokens", max_tokens, 0)
        self.group, self.exchange, self.keep_received, self.max_tokens = group, exchange, keep_received, max_tokens
        self.layers: list[LayerRoom] = []
        self._made: dict[torch.device, Collective | Windows] = {}

    def of(self, device: torch.device) -> Collective | Windows:
        """The transport for ``device``. ValueError: ``exchange`` is "symmetric" and that is not possible; says why."""
        if device not in self._made:
            self._made[device] = self._make(device)
        return self._made[device]

    def _make(self, device: torch.device) -> Collective | Windows:
        if self.exchange == "collective" or (self.exchange == "auto" and device.type != "cuda"):
            return Collective(self.group)
        from tilemoe.dispatch import window  # only for GPUs

        why = window.why_unsupported(self.group, device)
        if why is None:
            keep, most = self.keep_received, self.max_tokens
            return window.Windows(self.group, device, self.layers, keep_received=keep, max_tokens=most)
        if self.exchange == "symmetric":
            raise ValueError(f"exchange='symmetric': {why}; pass 'auto' or 'collective'")
        return Collective(self.group)
