"""Warp-specialised expert GEMMs with FP8 operands for Hopper, written in Gluon."""
