"""The experts' kernels up_proj to combine_grad (see `Backend` in `base`), with a folder for each backend, and their
helpers."""
