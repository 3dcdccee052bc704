"""That Triton compiles MXFP8 GEMMs for Blackwell, and what of a tile fits into tensor memory; no values.

What it is for: docs/lab/blackwell-mxfp8.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mxfp8_probe import mxfp8_up_proj_launch
from triton_compile import compile_launch, make_operands, stack_bytes

from tilemoe.kernels.experts.blackwell.configs import SHARED_BYTES, TMEM_COLUMNS


@pytest.mark.parametrize(("block_n", "accumulators"), [(128, 3), (256, 1)])
def test_up_proj_compiles(block_n: int, accumulators: int, tmp_path: Path) -> None:
    compiled = compile_launch(mxfp8_up_proj_launch(make_operands(), block_n, accumulators), 100)
    ptx = str(compiled.asm["ptx"])
    assert re.search(r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale\.(scale_vec::1X|block32)\b", ptx)
    assert "tcgen05.cp.cta_group::1.warpx4.32x128b" in ptx, "scales go to tensor memory without registers"
    assert "tile::gather4" in ptx
    assert "shfl.sync.bfly" not in ptx, "a thread has all 32 values that share a scale"
    assert not re.search(r"\btrap\b", ptx)
    assert 0 < compiled.metadata.tmem_size <= TMEM_COLUMNS
    assert compiled.metadata.shared <= SHARED_BYTES
    assert stack_bytes(compiled, tmp_path) == 0


def test_two_accumulators_of_256_columns_leave_no_room_for_scales() -> None:
    compiled = compile_launch(mxfp8_up_proj_launch(make_operands(), 256, 2), 100)
    assert compiled.metadata.tmem_size > TMEM_COLUMNS
    assert re.search(r"\btrap\b", str(compiled.asm["ptx"])), "Triton reports no error"
