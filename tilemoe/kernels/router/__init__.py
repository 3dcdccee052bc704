"""The router's kernels: top-K selection, scores, the losses' sums, and their gradients."""
