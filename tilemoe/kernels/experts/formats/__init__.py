"""The formats of GEMM operands, one file each: how an operand is quantised, stored, sliced, cached and dequantised.

These files are plain PyTorch: each is its format's reference and also works without Triton. The device code that
loads a format is in an architecture's folder, beside the mainloops that call it (`triton/formats/`).
"""
