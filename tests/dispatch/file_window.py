"""A window of `dispatch.symmetric` for processes without GPUs: a file of each rank, which all map into memory."""

import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tilemoe.dispatch.choose import Transports
from tilemoe.dispatch.symmetric import SLOTS, Pull
from tilemoe.dispatch.transport import Arrival, Transport

_PATIENCE = 60.0  # seconds
_LONGEST_PAUSE = 0.002


class FileWindow:
    """Reading another rank's slot takes a random while, so that one who writes too early is found out."""

    def __init__(self, group: dist.ProcessGroup, folder: Path, name: str, slot_bytes: int) -> None:
        self.slot_bytes, self._here, self._group = slot_bytes, dist.get_rank(group), group
        size = SLOTS * slot_bytes + 4 * dist.get_world_size(group)
        paths = [folder / f"{name}-{rank}" for rank in range(dist.get_world_size(group))]
        paths[self._here].write_bytes(bytes(size))
        dist.barrier(group)
        self._memory = [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]
        self._flags = [memory[SLOTS * slot_bytes :].view(torch.int32) for memory in self._memory]
        self._random = random.Random(self._here)

    def begin(self) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, turn: int, rows: Tensor) -> None:
        self._slot(self._here, turn, 0, rows.nbytes).copy_(_bytes(rows))

    def fetch(self, turn: int, rank: int, first: int, rows: Tensor, start: int, count: int) -> None:
        time.sleep(self._random.random() * _LONGEST_PAUSE)
        _bytes(rows)[start : start + count].copy_(self._slot(rank, turn, first, count))

    def _slot(self, rank: int, turn: int, first: int, count: int) -> Tensor:
        assert 0 <= first <= first + count <= self.slot_bytes
        start = turn % SLOTS * self.slot_bytes + first
        return self._memory[rank][start : start + count]

    def set_flags(self, turn: int) -> None:
        for rank, flags in enumerate(self._flags):
            if rank != self._here:
                flags[self._here] = turn

    def wait_for_all(self, turn: int) -> None:
        mine, until = self._flags[self._here], time.monotonic() + _PATIENCE
        while any(mine[rank] < turn for rank in range(len(mine)) if rank != self._here):
            assert time.monotonic() < until, f"nobody told of turn {turn}"
            time.sleep(1e-5)

    def arrival(self) -> Arrival:
        return _Arrived()

    def close(self) -> None:
        dist.barrier(self._group)


def _bytes(rows: Tensor) -> Tensor:
    return rows.detach().view(-1).view(torch.uint8)


class _Arrived:
    def wait(self) -> None:
        pass


class FileTransports(Transports):
    """Of one group, over windows in ``folder``."""

    def __init__(self, group: dist.ProcessGroup, folder: Path, names: Iterator[int]) -> None:
        super().__init__(group)
        self._folder, self._names = folder, names

    def _make(self, device: torch.device) -> Transport:
        def window(slot_bytes: int) -> FileWindow:
            return FileWindow(self.group, self._folder, str(next(self._names)), slot_bytes)

        return Pull(dist.get_rank(self.group), dist.get_world_size(self.group), window)


NAMES = count()  # all processes of a job open windows in one order
