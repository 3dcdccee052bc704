"""The expert GEMMs with FP8 operands, warp-specialised for Hopper in Gluon."""
