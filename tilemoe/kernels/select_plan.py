"""Which plan builder serves a device and a size, and why.

T tokens · E experts · K experts per token
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

from torch import Tensor

from tilemoe.kernels.torch.plan import plan_topk as torch_plan_topk

PlanTopK = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]


class PlanBuilder(NamedTuple):
    """``build(expert_ids (T, K), num_experts)`` gives the same tensors whatever the name; ``reason``: why this one.

    ``build_in_one`` where they may be parts of one allocation, which only what stays inside an operator may be.
    """

    name: str
    build: PlanTopK
    reason: str
    build_in_one: PlanTopK


def select_inference_plan_topk(device_type: str, num_pairs: int, num_experts: int) -> PlanBuilder:
    """As `select_plan_topk`; few pairs, as of tokens that are generated, have a builder of their own.

    Not so in training, where no number of tokens compiles anything that another has not.
    """
    if device_type == "cuda" and find_spec("triton") is not None:
        from tilemoe.kernels.triton import plan_few

        if plan_few.unsupported(num_pairs, num_experts) is None:
            reason = "few pairs: a counting sort in one kernel"
            return PlanBuilder("triton", plan_few.plan_topk, reason, plan_few.plan_topk_in_one)
    return select_plan_topk(device_type, num_pairs, num_experts)


def select_plan_topk(device_type: str, num_pairs: int, num_experts: int) -> PlanBuilder:
    """The builder for ``num_pairs`` = T*K pairs on a device of this type ("cpu", "cuda", ...)."""
    if device_type != "cuda":
        return _only("torch", torch_plan_topk, f"Triton does not run on {device_type}")
    if find_spec("triton") is None:
        return _only("torch", torch_plan_topk, "Triton is not installed")
    from tilemoe.kernels.triton import plan as triton_plan  # imported only where there is a GPU for it

    problem = triton_plan.unsupported(num_pairs, num_experts)
    if problem is not None:
        return _only("torch", torch_plan_topk, problem)
    return _only("triton", triton_plan.plan_topk, "a counting sort in four kernels")


def _only(name: str, build: PlanTopK, reason: str) -> PlanBuilder:
    return PlanBuilder(name, build, reason, build)
