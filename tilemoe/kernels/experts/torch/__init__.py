"""The kernels in plain PyTorch: any device, any float dtype, fp64 too."""
