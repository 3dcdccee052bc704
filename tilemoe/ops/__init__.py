"""Autograd and torch.library registration: what makes the kernels differentiable, traceable operators."""
