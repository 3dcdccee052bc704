"""What the operator keeps between forward and backward: tensors, bytes, for how long; and too little memory on a GPU.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · P pairs · R_max row capacity
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import saved_tensors, watch_kernels
from test_ops_lora import plan_of
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tilemoe.ops.moe import moe
from tilemoe.ops.out_of_memory import out_of_memory_message
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.shape import MoEShape
from tilemoe.testing import assert_equal, forward_and_grads, make_inputs

INDEX_FIELDS = ("token_of_row", "pair_of_row", "row_of_pair", "pair_start_of_token", "row_start_of_expert")


def pairs_plan(tokens: int, experts: int, pairs: int) -> RoutingPlan:
    generator = torch.Generator().manual_seed(0)
    token = torch.randint(0, tokens, (pairs,), generator=generator)
    expert = torch.randint(0, experts, (pairs,), generator=generator)
    return plan_pairs(token, expert, tokens, experts)


def leaves(plan: RoutingPlan, d: int, n: int, activation: str = "swiglu", **options: Any) -> dict[str, Tensor]:
    inputs = make_inputs(plan, d, n, activation, **{"dtype": torch.bfloat16, **options})
    return {name: tensor.nan_to_num().requires_grad_() for name, tensor in inputs.items()}


def saved_by(plan: RoutingPlan, inputs: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Every distinct tensor that autograd keeps for the backward of one call."""
    with saved_tensors() as saved:
        o = moe(plan=plan, **inputs, **options)
    assert o.grad_fn is not None
    return list({(tensor.data_ptr(), tensor.shape): tensor.detach() for tensor in saved}.values())


def is_among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in others)


def held_bytes(tensors: list[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("plan", [plan_of(24, 6, 3), pairs_plan(24, 6, 70)], ids=["topk", "pairs"])
def test_saved_are_exactly_x_h_scores_and_the_plan(plan: RoutingPlan, activation: str, bias: bool) -> None:
    d, n = 64, 8
    width = n * (2 if activation == "swiglu" else 1)
    inputs = leaves(plan, d, n, activation, bias=bias)
    given = list(inputs.values())
    index = [getattr(plan, name) for name in INDEX_FIELDS if getattr(plan, name) is not None]
    saved = saved_by(plan, inputs, activation=activation)
    kept = [tensor for tensor in saved if not is_among(tensor, given)]
    assert all(is_among(tensor, saved) for tensor in given), "scores, x, weights and biases are kept as they are"
    assert all(is_among(tensor, kept) for tensor in index)
    (h,) = [tensor for tensor in kept if not is_among(tensor, index)]
    assert h.shape == (plan.capacity, width)
    assert h.dtype == torch.bfloat16
    assert len(saved) == len(given) + len(index) + 1
    assert held_bytes([h]) == 2 * plan.capacity * width, "no padding, no larger storage behind it"
    scores = inputs["scores"]
    pair_start = 0 if plan.pair_start_of_token is None else 4 * (plan.num_tokens + 1)
    rest = 4 * (plan.num_experts + 1) + pair_start
    assert held_bytes([*kept, scores]) == 2 * width * plan.capacity + 16 * plan.capacity + rest
    assert all(tensor.numel() < plan.capacity * d for tensor in kept)


def test_memory_does_not_grow_with_granularity() -> None:
    """n halves and K doubles: h stays the same, and only indices and scores grow."""
    sizes = []
    for n, k, experts in ((64, 1, 8), (32, 2, 16), (16, 4, 32), (8, 8, 64)):
        plan = plan_of(32, experts, k)
        inputs = leaves(plan, 128, n)
        kept = [t for t in saved_by(plan, inputs) if not is_among(t, list(inputs.values()))]
        (h,) = [t for t in kept if t.is_floating_point()]
        sizes.append(held_bytes([h]))
        assert held_bytes(kept) - sizes[-1] == 12 * 32 * k + 4 * (experts + 1)
    assert sizes == [4 * 32 * 64] * 4


@pytest.mark.parametrize("plan", [plan_of(24, 6, 3), pairs_plan(24, 6, 70)], ids=["topk", "pairs"])
def test_recomputing_keeps_no_h(plan: RoutingPlan) -> None:
    inputs = leaves(plan, 64, 8, bias=True)
    kept = [t for t in saved_by(plan, inputs, recompute="up_proj") if not is_among(t, list(inputs.values()))]
    assert all(t.dtype == torch.int32 for t in kept)
    pair_start = 0 if plan.pair_start_of_token is None else 4 * (plan.num_tokens + 1)
    assert held_bytes(kept) == 12 * plan.capacity + 4 * (plan.num_experts + 1) + pair_start


def h_of(o: Tensor, plan: RoutingPlan, width: int) -> StorageWeakRef:
    node: Any = o.grad_fn
    (h,) = [t for t in node.saved_tensors if t is not None and t.shape == (plan.capacity, width)]
    return StorageWeakRef(h.untyped_storage())


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_h_is_gone_once_b1_has_read_it(dtype: torch.dtype, retain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(24, 6, 3)
    inputs = leaves(plan, 32, 8, dtype=dtype, bias=True)
    alive: dict[str, bool] = {}
    o = moe(plan=plan, **inputs)
    ref = h_of(o, plan, 16)
    assert not ref.expired(), "kept for the backward"

    def around(name: str, kernel: Callable[..., Any], *args: Any) -> Any:
        alive[name] = not ref.expired()
        return kernel(*args)

    first = ("down_proj_bias_grad", "down_proj_dgrad_dact")
    later = ("down_proj_wgrad", "up_proj_dgrad", "combine_grad", "up_proj_wgrad", "up_proj_bias_grad")
    watch_kernels(monkeypatch, (*first, *later), around)
    o.sum().backward(retain_graph=retain)
    assert alive == dict.fromkeys(first, True) | dict.fromkeys(later, retain)
    if retain:
        o.sum().backward()
        assert alive["down_proj_wgrad"] is False


# As PyTorch words it, with all that it says of the allocator.
FOUND = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.72 GiB of which 12.25 MiB is "
    "free. Including non-PyTorch memory, this process has 139.70 GiB memory in use. If reserved but unallocated memory "
    "is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation."
)
PLAN = plan_topk(torch.arange(24 * 3).view(24, 3) % 6, 6)
INPUTS = make_inputs(PLAN, 16, 8, dtype=torch.bfloat16, bias=True)
STEP_OF_KERNEL = {
    "up_proj_act": "forward", "down_proj": "forward", "combine": "forward",
    "down_proj_dgrad_dact": "down_proj_dgrad_dact", "down_proj_wgrad": "down_proj_wgrad",
    "up_proj_dgrad": "up_proj_input_grad", "combine_grad": "up_proj_input_grad",
    "up_proj_wgrad": "up_proj_wgrad", "up_proj_bias_grad": "up_proj_bias_grad",
    "down_proj_bias_grad": "down_proj_bias_grad",
}  # fmt: skip


def full(monkeypatch: pytest.MonkeyPatch, kernel: str) -> list[StorageWeakRef]:
    """The torch kernels on a GPU that is full once ``kernel`` runs; what kernels before it have made is noted."""
    made: list[StorageWeakRef] = []

    def around(name: str, run: Callable[..., Any], *args: Any) -> Any:
        if name == kernel:
            raise torch.OutOfMemoryError(FOUND)
        result = run(*args)
        made.extend(StorageWeakRef(t.untyped_storage()) for t in _tensors(result))
        return result

    watch_kernels(monkeypatch, STEP_OF_KERNEL, around)
    return made


def _tensors(result: Any) -> list[Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)]


@pytest.mark.parametrize("kernel", STEP_OF_KERNEL)
def test_it_is_one_line_with_the_step_the_need_and_a_way_out(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = forward_and_grads(moe, INPUTS, PLAN)
    with monkeypatch.context() as patch:
        full(patch, kernel)
        with pytest.raises(torch.OutOfMemoryError) as error:
            forward_and_grads(moe, INPUTS, PLAN)
    text = str(error.value)
    assert "\n" not in text
    step = STEP_OF_KERNEL[kernel]
    assert text.startswith(f"tilemoe.moe, {step}: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0")
    assert "12.25 MiB is free." in text
    assert "PYTORCH_ALLOC_CONF" not in text
    assert text.endswith("Pass fewer tokens per call, or recompute='up_proj', which keeps no pre-activations.")
    sizes = "With 24 tokens in 72 rows, hidden_size 16, intermediate_size 8 and 6 experts the call takes"
    assert (sizes in text) == ("bias_grad" not in step)
    assert_equal(forward_and_grads(moe, INPUTS, PLAN), expected, "after another try")


@pytest.mark.parametrize("kernel", ["down_proj", "combine"])
def test_the_forward_holds_nothing_while_its_error_is_handled(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = full(monkeypatch, kernel)
    with pytest.raises(torch.OutOfMemoryError) as error:
        moe(plan=PLAN, **{name: tensor.clone().requires_grad_() for name, tensor in INPUTS.items()})
    assert error.value.__context__ is None
    assert made, "kernels ran before"
    assert all(ref.expired() for ref in made)


def test_the_need_in_numbers() -> None:
    shape = MoEShape(32768, 2048, 1024, 64, 8)
    text = out_of_memory_message("forward", FOUND, shape)
    assert "the call takes 2.50 GiB in forward and 2.50 GiB in backward, gradients included." in text
    assert "call takes 10.00 MiB in forward" in out_of_memory_message("forward", FOUND, replace(shape, num_tokens=128))
    nothing_said = out_of_memory_message("forward", "", shape)
    assert nothing_said.startswith("tilemoe.moe, forward: out of memory. With 32768 tokens")
    sizes_unknown = out_of_memory_message("forward", "HIP out of memory.", None)
    assert sizes_unknown.startswith("tilemoe.moe, forward: HIP out of memory. Pass fewer tokens")
