"""The kernels for the experts (up_proj to combine_grad, by backend), the router, plans, token rounding, expert
parallelism and the language model."""
