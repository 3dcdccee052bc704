"""The portable expert GEMMs with FP8 operands, in Triton, for GPUs of compute capability 8.9 and above."""
