"""Kernels of the language model around the layer."""
