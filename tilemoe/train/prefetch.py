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

AHEAD = 4  # micro-batches, of a megabyte or less each


class Prefetcher:
    """``read(index)`` by a thread, one index after the other, ``AHEAD`` of them before they are asked for.

    It holds nothing that a run would have to save: ``read`` is a pure function, and where training goes on from
    another index than the next, as after loading a checkpoint, what was read ahead is thrown away. The thread ends
    with the object.
    """

    def __init__(self, read: Callable[[int], Batch], device: torch.device) -> None:
        self._read, self._device = read, device
        self._thread = ThreadPoolExecutor(1, "tilemoe-data")
        self._ahead: deque[Future[tuple[Tensor, Tensor]]] = deque()
        self._first = 0  # the index of the first of them

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of ``index``, (B, S) int64 each, on their way to the device. Raises what ``read`` does."""
        if index != self._first:
            self.forget()
            self._first = index
        for following in range(index + len(self._ahead), index + AHEAD + 1):
            self._ahead.append(self._thread.submit(self._prepare, following))
        inputs, targets = self._ahead[0].result()
        self._ahead.popleft()
        self._first += 1
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)

    def forget(self) -> None:
        """Throw away what was read ahead, and read no further: a process that ends would wait for all of it."""
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _prepare(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.from_numpy(array) for array in self._read(index))
        if self._device.type != "cuda":
            return inputs, targets
        with torch.cuda.device(self._device):  # else pinning would take memory of the first GPU for every process
            return inputs.pin_memory(), targets.pin_memory()  # from other memory a copy would make the host wait
