"""Memory of `dispatch.window` for processes without GPUs: a file of each rank, which all map. Kernels are
interpreted.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tilemoe.dispatch import window
from tilemoe.dispatch.choose import Transports

NAMES = count()  # all processes of a job open windows in one order


def windows_of_files(transports: Transports, device: torch.device, folder: Path) -> window.Windows:
    """What `Transports` make, in files."""
    by_files = FileTransports(transports.group, folder)
    by_files.layers = transports.layers
    return by_files._make(device)


class FileTransports(Transports):
    """Of one group, over windows in ``folder``. options: of `Windows`."""

    def __init__(self, group: dist.ProcessGroup, folder: Path, names: Iterator[int] = NAMES, **options: Any) -> None:
        super().__init__(group)
        self._folder, self._names, self._options = folder, names, options

    def _make(self, device: torch.device) -> window.Windows:
        window._ROUNDED = min(window._ROUNDED, 8)  # a row of padding takes the interpreter as long as one of tokens

        def allocate(group: dist.ProcessGroup, device: torch.device, size: int) -> window.Memory:
            name = next(self._names)
            paths = [self._folder / f"{name}-{rank}" for rank in range(dist.get_world_size(group))]
            paths[dist.get_rank(group)].write_bytes(bytes(size))
            dist.barrier(group)
            memory = [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]
            return (memory[dist.get_rank(group)], memory), [each.data_ptr() for each in memory]

        return window.Windows(self.group, device, self.layers, allocate, **self._options)
