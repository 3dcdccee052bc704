"""The formats of what a GEMM reads, one file each: how an operand is made, stored, sliced, kept and made dense again.

Plain PyTorch: these files are the reference of a format, and read where there is no Triton. The loads of a format are
in an architecture's folder, beside the mainloops that call them (`triton/formats/`).
"""
