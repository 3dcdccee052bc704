"""The experts' kernels up_proj to combine_grad (see `Backend` in `base`) and their helpers, a folder for each
backend."""
