"""GPUs: the makers' stated figures and, for some, rates measured elsewhere. Nothing is measured here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType

from tilemoe.config import FP8_BLOCK

# Bytes per element of x and h. With FP8, which quantises GEMM operands, x and h stay in 16 bits.
DTYPE_BYTES = MappingProxyType({"bf16": 2, "fp16": 2, "fp8": 2, "tf32": 4, "fp32": 4})


@dataclass(frozen=True)
class Ceilings:
    """The TFLOP/s (1e12 operations) and TB/s (1e12 bytes read + written) with which kernels are compared."""

    tflops: float
    tbps: float
    is_measured: bool

    @property
    def ridge(self) -> float:
        """FLOP/byte at which computing takes as long as moving the bytes."""
        return self.tflops / self.tbps


@dataclass(frozen=True)
class Gpu:
    """Stated figures: dense TFLOP/s by dtype (fp8_tflops 0: no FP8), memory in TB/s and GB (1e9 bytes), the link to
    other GPUs of the host in GB/s, one way; ``source`` names the document.

    ``capability`` (10 * major + minor; 0: no NVIDIA GPU) and ``shared_bytes`` per CTA determine the kernels' tiles.
    ``measured_bf16_tflops`` (8192^3 matrix product) and ``measured_tbps`` (device copy) are None if not measured.
    """

    name: str
    bf16_tflops: float
    fp8_tflops: float
    tf32_tflops: float
    fp32_tflops: float
    tbps: float
    memory_gb: float
    link_gbps: float
    multiprocessors: int
    capability: int
    shared_bytes: int
    source: str
    measured_bf16_tflops: float | None = None
    measured_tbps: float | None = None

    @property
    def interpreted(self) -> bool:
        """False; for `choose_tile`, as in `tilemoe.runtime.device.Device`."""
        return False

    def why_not_fp8(self, hidden_size: int, intermediate_size: int) -> str | None:
        """Why experts of these widths are computed in 16 bits although FP8 is asked for; None: they are not."""
        if self.capability != 90:
            return "no FP8 kernels for it"
        if hidden_size % FP8_BLOCK or intermediate_size % FP8_BLOCK:
            return f"FP8 needs d and n to be multiples of {FP8_BLOCK}"
        return None

    def stated_tflops(self, dtype: str = "bf16") -> float:
        """Stated dense TFLOP/s in ``dtype``. ValueError: ``dtype`` is unknown, or the GPU does not support it."""
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}; got {dtype!r}")
        others = {"fp8": self.fp8_tflops, "tf32": self.tf32_tflops, "fp32": self.fp32_tflops}
        stated = others.get(dtype, self.bf16_tflops)  # fp16 has bf16's rate, both with fp32 accumulators
        if stated == 0:
            raise ValueError(f"dtype {dtype!r}: the {self.name} has no such matrix unit; choose bf16")
        return stated

    def ceilings(self, dtype: str = "bf16") -> Ceilings:
        """Measured ceilings for 16-bit dtypes if there are any, else stated ones. ValueError: see `stated_tflops`."""
        stated = self.stated_tflops(dtype)
        if dtype in ("bf16", "fp16") and self.measured_bf16_tflops is not None and self.measured_tbps is not None:
            return Ceilings(self.measured_bf16_tflops, self.measured_tbps, is_measured=True)
        return Ceilings(stated, self.tbps, is_measured=False)


_KB = 1024
GPUS = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("A100", 312, 0, 156, 19.5, 2.039, 80, 300, 108, 80, 163 * _KB, "NVIDIA A100 80GB SXM datasheet"),
            Gpu("H100", 989.4, 1978.9, 494.7, 66.9, 3.35, 80, 450, 132, 90, 227 * _KB, "NVIDIA H100 SXM datasheet"),
            Gpu(
                "H200", 989.4, 1978.9, 494.7, 66.9, 4.8, 141, 450, 132, 90, 227 * _KB,
                "NVIDIA H200 SXM datasheet; ceilings measured", 778, 4.295,
            ),
            Gpu("B200", 2250, 4500, 1125, 75, 8.0, 180, 900, 148, 100, 227 * _KB, "NVIDIA HGX B200 datasheet, per GPU"),
            Gpu("B300", 2250, 4500, 1125, 75, 8.0, 288, 900, 148, 103, 227 * _KB, "NVIDIA HGX B300 datasheet, per GPU"),
            Gpu(
                "RTX 4090", 165.2, 330.3, 82.6, 82.6, 1.008, 24, 32, 128, 89, 99 * _KB,
                "NVIDIA Ada GPU architecture whitepaper",
            ),
            Gpu(
                "RTX 5090", 209.5, 419, 104.8, 104.8, 1.792, 32, 64, 170, 120, 99 * _KB,
                "NVIDIA RTX Blackwell GPU architecture whitepaper",
            ),
            Gpu(
                "MI300X", 1307.4, 2614.9, 653.7, 163.4, 5.3, 192, 448, 304, 0, 64 * _KB,
                "AMD Instinct MI300X datasheet; no kernel of this package has run there",
            ),
        )
    }
)  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """The GPU of the table whose name occurs in ``name``, in any case, with words joined by a space, - or _.

    "NVIDIA H200" and "h200" find "H200"; "rtx4090" finds "RTX 4090". ValueError: none does; it lists the table.
    """
    spelled = name.lower().replace("-", " ").replace("_", " ")
    for known in sorted(GPUS, key=len, reverse=True):
        if re.search(known.lower().replace(" ", " ?") + r"(?!\d)", spelled):
            return GPUS[known]
    raise ValueError(f"no figures for GPU {name!r}; known are {', '.join(GPUS)}")
