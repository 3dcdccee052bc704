"""The kernels: of the experts (F1 to B5, by backend), router, plan, rounding, expert parallelism, language model."""
