"""Warp-specialised versions for Hopper (H100, H200) of the GEMMs of `kernels.experts.triton`, written in Gluon."""
