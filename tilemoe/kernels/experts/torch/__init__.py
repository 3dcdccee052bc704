"""The experts' kernels in plain PyTorch, for any device and any float dtype, fp64 included."""
