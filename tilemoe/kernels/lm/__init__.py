"""Kernels of the language model around the layer: the head's loss, rotary positions, attention within documents."""
