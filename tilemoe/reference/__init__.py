"""The oracle: slow, obvious implementations that every fast one is tested against.

They are plain loops in plain PyTorch, differentiable any number of times by autograd, in fp64 for fp64 inputs. They
share no code with the kernels, the table of activations or the routers.

Examples:
    >>> tilemoe.reference.activation(torch.tensor([[0.0, 3.0]]), "swiglu").tolist()  # silu(0) * 3
    [[0.0]]
"""

from __future__ import annotations

from tilemoe.reference.activations import activation
from tilemoe.reference.experts import moe, shared_expert
from tilemoe.reference.router import ReferenceRouting, route

__all__ = ["ReferenceRouting", "activation", "moe", "route", "shared_expert"]
