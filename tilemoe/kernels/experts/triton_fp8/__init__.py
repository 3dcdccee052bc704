"""Triton kernels that make FP8 operands, for GPUs of compute capability 8.9 and above: quantised, and transposed."""
