"""Top-K selection of the router, its scores and their gradients."""
