"""What the layer must compute, move and keep, and what a GPU can do: pure arithmetic, nothing is measured here."""
