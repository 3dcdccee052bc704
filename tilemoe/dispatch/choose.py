"""Choose the transport of a process group."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from tilemoe.checks import require_choice
from tilemoe.config import EXCHANGES
from tilemoe.dispatch.transport import Collective, Transport


class Transports:
    """The transport of one group. All ranks make it together when rows are first sent, because their device decides.

    ``exchange``: "collective", by ``all_to_all_single``; "symmetric", by reading the other GPUs' memory; "auto", the
    latter if it is possible. "symmetric" takes memory for 2.5 to 3 times the most bytes that a rank sends at once; all
    layers share it.
    """

    def __init__(self, group: dist.ProcessGroup, exchange: str = "auto") -> None:
        """ValueError: ``exchange`` is none of these."""
        require_choice("exchange", exchange, EXCHANGES)
        self.group, self.exchange = group, exchange
        self._made: dict[torch.device, Transport] = {}

    def of(self, device: torch.device) -> Transport:
        """ValueError: symmetric memory was asked for and is not possible, with the reason."""
        if device not in self._made:
            self._made[device] = self._make(device)
        return self._made[device]

    def _make(self, device: torch.device) -> Transport:
        if self.exchange == "collective" or (self.exchange == "auto" and device.type != "cuda"):
            return Collective(self.group)
        from tilemoe.dispatch import symmetric  # only for GPUs

        why = symmetric.why_unsupported(self.group, device)
        if why is None:
            window = partial(symmetric.SymmetricWindow, self.group, device)
            return symmetric.Pull(dist.get_rank(self.group), dist.get_world_size(self.group), window)
        if self.exchange == "symmetric":
            raise ValueError(f"exchange='symmetric': {why}; pass 'auto' or 'collective'")
        return Collective(self.group)
