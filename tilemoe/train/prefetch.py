"""Micro-batches read ahead: a thread fetches the next ones, pinned for a GPU, while the present one is computed.

B batch_size · S seq_len
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tilemoe.data.sampler import Batch

AHEAD = 4  # micro-batches, of half a megabyte or less each


class Prefetcher:
    """``read(index)`` by a thread, for one index after the other, ``AHEAD`` of them before they are asked for.

    It holds nothing that a run would have to save: ``read`` is a pure function, and where training goes on from
    another index than the next, as after loading a checkpoint, what was read ahead is thrown away. The thread ends
    with the object.
    """

    def __init__(self, read: Callable[[int], Batch], device: torch.device) -> None:
        self._read, self._device = read, device
        self._thread = ThreadPoolExecutor(1, "tilemoe-data", initializer=_use_device, initargs=(device,))
        self._ahead: deque[tuple[int, Future[tuple[Tensor, Tensor]]]] = deque()

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of ``index``, (B, S) int64 each, on their way to the device. Raises what ``read`` does."""
        if self._ahead and self._ahead[0][0] != index:
            self._drop()
        self._read_up_to(index)
        _, future = self._ahead.popleft()
        try:
            inputs, targets = future.result()
        except BaseException:
            self._drop()  # none of it is in order, should training go on all the same
            raise
        self._read_up_to(index + AHEAD)
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)

    def _read_up_to(self, last: int) -> None:
        first = self._ahead[-1][0] + 1 if self._ahead else last
        for index in range(first, last + 1):
            self._ahead.append((index, self._thread.submit(self._prepare, index)))

    def _drop(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _prepare(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.from_numpy(array) for array in self._read(index))
        if self._device.type == "cuda":  # else a copy would make the host wait
            return inputs.pin_memory(), targets.pin_memory()
        return inputs, targets


def _use_device(device: torch.device) -> None:
    """Of this thread: pinning would otherwise take memory of the first GPU for every process of a job."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
