"""Operators: autograd and torch.library registration that make the kernels differentiable and traceable."""
