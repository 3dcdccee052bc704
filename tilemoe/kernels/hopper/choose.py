"""Which of the GEMMs the Hopper kernels take, and with what tile: pure functions, measured on an H200.

d hidden_size · n intermediate_size
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from tilemoe.kernels.tiling import Device, Kernel

# On which the kernels have run: Gluon's interface still moves between Triton's releases.
TRITON_VERSIONS = ("3.6.", "3.9.")
CAPABILITY = 90
SHARED_BYTES = 227 * 1024  # what the rings below fill


@dataclass(frozen=True)
class Shape:
    """Rows and columns of a tile, stages of the ring, and registers of a consumer's and of the producer's threads.

    The registers of 256 consumer and 128 producer threads must not exceed 65536, in multiples of 8.
    """

    rows: int
    columns: int
    stages: int
    consumer_registers: int
    producer_registers: int


SHAPES: MappingProxyType[Kernel, Shape] = MappingProxyType(
    {
        "up_proj_act": Shape(128, 256, 4, 224, 56),
        "down_proj": Shape(192, 128, 4, 240, 24),
        "up_proj_act_grad": Shape(192, 128, 4, 240, 24),
        "down_proj_act_grad": Shape(128, 256, 4, 224, 56),
        "down_proj_weight_grad": Shape(128, 256, 4, 224, 56),
        "up_proj_weight_grad": Shape(128, 256, 4, 224, 56),
    }
)
# With a longer contraction up_proj_act_grad is faster in its portable form: there is little epilogue to hide beside it.
# Where d is wide, it is so sooner: by up to 22% with 256 rows of an expert in whole tiles, as rounding makes them.
# In such tiles it loses where it is chosen, too: 11% with 256 rows and d = 1536. up_proj_act and down_proj_act_grad won
# or lost 1% at most, at every width that was measured; so did down_proj, but in whole tiles (it lost up to 9%) and with
# Mixtral's contraction of 14336 (6% with 16384 tokens, 1% with 8192).
MAX_CONTRACTION = 1024
MAX_CONTRACTION_OF_NARROW = 2048
NARROW = 2048  # of d
# Up_proj_weight_grad's contraction is over an expert's rows, which no choice of what to compile may follow. By the
# width of dh and with thousands of rows it was 5% faster to 1% slower up to 1536, and equal to 7% slower from 2048 on;
# with 256 rows 6 to 20% faster. Down_proj_weight_grad won up to 27% with few rows, and lost up to 9% with thousands.
MAX_WIDTH_OF_DH = 2047
# Activations of which B1's slices are a loop. Unrolled, both consumers' code is 147 to 158 KB, more than an SM's
# instruction cache (128 KB), and the kernel took 1.1 to 2.4 times as long as swiglu's instead of .94 to 1.13. The loop
# moves registers: swiglu's kernel was 3 to 9% slower as one.
ACTIVATIONS_IN_A_LOOP = ("swiglu_oai", "geglu")
# Column tiles beyond which tiles are walked in bands. In the plain order a wave of tiles reads about 40 GB/s of weights
# for each of them, which for Mixtral's 112 is all that DRAM gives. Measured: 6 to 16 (bands lose or tie), 56 and 112.
MAX_COLUMN_TILES = 32
MIN_WIDTH = 64  # of d and n: narrower, most of a tile would be padding


def problem_of_gpu(device: Device, triton_version: str) -> str | None:
    """Why the Hopper kernels cannot run on a GPU with this release of Triton; None if they can."""
    if device.capability != CAPABILITY:
        return "the Hopper kernels need compute capability 9.0"
    if device.shared_bytes < SHARED_BYTES:
        return f"the Hopper kernels need {SHARED_BYTES} bytes of shared memory"
    if not triton_version.startswith(TRITON_VERSIONS):
        return f"the Hopper kernels need Triton {' or '.join(v + 'x' for v in TRITON_VERSIONS)}, not {triton_version}"
    return None


def is_faster(kernel: Kernel, width_in: int, width_out: int) -> bool:
    """Whether the Hopper kernel beats the portable one.

    Row GEMMs: the contraction's length and the output's width. Weight gradients: the widths of the gathered and of the
    contiguous operand.
    """
    if min(width_in, width_out) < MIN_WIDTH:
        return False
    if kernel == "up_proj_weight_grad":
        return width_out <= MAX_WIDTH_OF_DH
    if kernel == "up_proj_act_grad":
        return width_in <= (MAX_CONTRACTION_OF_NARROW if width_out <= NARROW else MAX_CONTRACTION)
    return True
