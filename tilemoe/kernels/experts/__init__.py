"""The experts' kernels up_proj to combine_grad (see `Backend` in `base`) and helpers, a folder for each backend."""
