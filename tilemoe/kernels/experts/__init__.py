"""The experts' kernels F1 to B5 (see `Backend` in `base`) and their helpers, a folder for each backend."""
