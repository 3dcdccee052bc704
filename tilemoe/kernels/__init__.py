"""The kernels: of the experts (up_proj to combine_grad, by backend), router, plan, rounding, expert parallelism,
language model."""
