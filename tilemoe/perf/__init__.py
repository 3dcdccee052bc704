"""The layer's FLOPs, bytes and memory, and what a GPU can do: pure arithmetic; nothing is measured here."""
