"""The GEMMs of `kernels.triton`, warp-specialised for Hopper (H100, H200) in Gluon, Triton's explicit dialect."""
