"""Kernels of the language model around the layer: cross-entropy, rotary embedding, attention within documents."""
