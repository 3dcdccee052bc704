"""Finds the ``.grad`` tensor that a wgrad kernel may accumulate into, in place of autograd.

E experts · p, q a weight's other widths
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from tilemoe.kernels.experts.formats.dense import compute_dtype, is_column_major
from tilemoe.runtime.tensors import PLAIN

_CAST = "ToCopyBackward0"  # the autograd node of autocast's cast of a leaf


def sum_to_add_to(ctx: Any, index: int, weight: Tensor) -> Tensor | None:
    """``.grad`` (E, p, q), fp32 (fp64 for fp64), of the leaf that is, or was cast to, the operator's input ``index``.

    If there is none, it is created with zeros. Returns None if autograd must receive the gradient itself, because a
    hook or another caller may read, keep or differentiate it.
    """
    node = ctx.next_functions[index][0] if index < len(ctx.next_functions) else None
    dtype = compute_dtype(weight.dtype)
    if node is None:  # a call that only compiles kernels has no autograd graph
        return torch.empty_like(weight, dtype=dtype)
    if node.name() == _CAST:
        node = node.next_functions[0][0]
    leaf: Any = getattr(node, "variable", None)
    if (
        type(leaf) not in PLAIN
        or torch.is_grad_enabled()  # create_graph=True
        or not isinstance(ctx, BackwardCFunction)  # compiled autograd, which would drop the sum
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.is_anomaly_enabled()
        or leaf._backward_hooks
        or leaf._post_accumulate_grad_hooks
        or not _accumulates(node)
    ):
        return None
    if leaf.grad is None:
        leaf.grad_dtype = dtype
        leaf.grad = torch.zeros_like(leaf, dtype=dtype)
    total: Tensor = leaf.grad
    is_dense = type(total) in PLAIN and (total.is_contiguous() or is_column_major(total))
    return total if is_dense and total.dtype == dtype else None


def _accumulates(node: Any) -> bool:
    """Whether this backward will run ``node``, an AccumulateGrad; under autograd.grad it does not run."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised under autograd.grad for a leaf's node
        return False
