"""GPUs: what their makers state and, where it was measured, what a plain matrix product and a plain copy reach."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

# Dense rates, without structured sparsity. A matrix unit's fp16 rate is its bf16 rate, accumulated in fp32.
DTYPE_BYTES = MappingProxyType({"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4})


@dataclass(frozen=True)
class Ceilings:
    """TFLOP/s (1e12 operations) and TB/s (1e12 bytes read + written) to hold a kernel against."""

    tflops: float
    tbps: float
    is_measured: bool


@dataclass(frozen=True)
class Gpu:
    """Stated figures: TFLOP/s dense by dtype, memory in TB/s and GB (1e9 bytes); ``source`` says whose.

    ``measured_bf16_tflops`` (8192^3 matrix product) and ``measured_tbps`` (device copy) are None where nobody measured.
    """

    name: str
    bf16_tflops: float
    tf32_tflops: float
    fp32_tflops: float
    tbps: float
    memory_gb: int
    source: str
    measured_bf16_tflops: float | None = None
    measured_tbps: float | None = None

    def ceilings(self, dtype: str = "bf16") -> Ceilings:
        """Measured ceilings of 16-bit types where there are any, else stated ones. ValueError for another dtype."""
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}; got {dtype!r}")
        if dtype in ("bf16", "fp16") and self.measured_bf16_tflops is not None and self.measured_tbps is not None:
            return Ceilings(self.measured_bf16_tflops, self.measured_tbps, is_measured=True)
        stated = {"tf32": self.tf32_tflops, "fp32": self.fp32_tflops}.get(dtype, self.bf16_tflops)
        return Ceilings(stated, self.tbps, is_measured=False)


GPUS = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("A100", 312, 156, 19.5, 2.039, 80, "NVIDIA A100 80GB SXM datasheet"),
            Gpu("H100", 989.4, 494.7, 66.9, 3.35, 80, "NVIDIA H100 SXM datasheet"),
            Gpu("H200", 989.4, 494.7, 66.9, 4.8, 141, "NVIDIA H200 SXM datasheet; ceilings measured", 778, 4.295),
            Gpu("B200", 2250, 1125, 75, 8.0, 180, "NVIDIA HGX B200 datasheet, per GPU"),
            Gpu("RTX 4090", 165.2, 82.6, 82.6, 1.008, 24, "NVIDIA Ada GPU architecture whitepaper"),
            Gpu("RTX 5090", 209.5, 104.8, 104.8, 1.792, 32, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
        )
    }
)


def find_gpu(name: str) -> Gpu:
    """The GPU of the table whose name occurs in ``name`` ("NVIDIA H200" finds "H200"). ValueError lists them."""
    for known in sorted(GPUS, key=len, reverse=True):
        if known.lower() in name.lower():
            return GPUS[known]
    raise ValueError(f"no figures for GPU {name!r}; known are {', '.join(GPUS)}")
