"""Slices of d in which the two (R_max, d) buffers, y and dx_rows, are made and combined: a pure function of the sizes.

R_max static row capacity · d hidden_size · y (R_max, d) · each slice but the last has whole tiles of columns

Each further slice costs a launch, some 20 microseconds on an H200, and reads the GEMM's other operand, a or dh, again.
So the fewest slices are used that bring the peak memory down to a limit, if they are cheap (docs/lab/memory.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilemoe.kernels.experts.triton.configs import LARGEST_TILE
from tilemoe.shape import MoEShape

COLUMNS = LARGEST_TILE.block_n  # slices are multiples of this
_MIN_TILES = 768  # fewest tiles of a slice: about six waves on 132 SMs
_MAX_SLICES = 4
_MAX_REREAD = 0.1  # largest share that re-reading may add to the time of the GEMM and combine in one slice
_ALIGNMENT = 16  # d is sliced only if it is a multiple: else some slices would need a specialisation of their own


def cut(width: int, count: int) -> Sequence[slice]:
    """``count`` slices of ``width`` columns, as equal as multiples of `COLUMNS` allow; the last takes the remainder."""
    inner = [COLUMNS * -(-(width // COLUMNS) * index // count) for index in range(1, count)]
    return [slice(start, end) for start, end in zip([0, *inner], [*inner, width], strict=True)]


def widest(slices: Sequence[slice]) -> int:
    """Number of columns of the widest slice."""
    return max(part.stop - part.start for part in slices)


def fewest(shape: MoEShape, peak: Callable[[Sequence[slice]], float], limit: float, reread: float) -> Sequence[slice]:
    """The fewest slices of d whose ``peak`` is at most ``limit``; a single slice if no permitted number achieves that.

    reread: the time to read the operand once more, divided by the time of the GEMM and combine in one slice.
    """
    d = shape.hidden_size
    tiles = -(-shape.num_rows // LARGEST_TILE.block_m) * (d // COLUMNS)
    most = min(_MAX_SLICES, d // COLUMNS, tiles // _MIN_TILES) if d % _ALIGNMENT == 0 else 1
    counts = (cut(d, count) for count in range(1, most + 1) if (count - 1) * reread <= _MAX_REREAD)
    return next((slices for slices in counts if peak(slices) <= limit), cut(d, 1))
