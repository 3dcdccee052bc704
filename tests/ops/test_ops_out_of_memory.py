"""Too little memory on a GPU: the same exception in one line that says what to do; no buffer stays; a retry works."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.ops.moe import moe
from tilemoe.ops.out_of_memory import out_of_memory_message
from tilemoe.routing.build import plan_topk
from tilemoe.shape import MoEShape
from tilemoe.testing import forward_and_grads, make_inputs

# As PyTorch words it, with all that it says of the allocator.
FOUND = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.72 GiB of which 12.25 MiB is "
    "free. Including non-PyTorch memory, this process has 139.70 GiB memory in use. If reserved but unallocated memory "
    "is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation."
)
PLAN = plan_topk(torch.arange(24 * 3).view(24, 3) % 6, 6)
INPUTS = make_inputs(PLAN, 16, 8, dtype=torch.bfloat16, bias=True)
STEP_OF_KERNEL = {
    "up_proj_act": "forward",
    "down_proj": "forward",
    "combine": "forward",
    "down_proj_dgrad_dact": "down_proj_dgrad_dact",
    "down_proj_wgrad": "down_proj_wgrad",
    "up_proj_dgrad": "up_proj_input_grad",
    "combine_grad": "up_proj_input_grad",
    "up_proj_wgrad": "up_proj_wgrad",
    "down_proj_bias_grad": "down_proj_bias_grad",
    "up_proj_bias_grad": "up_proj_bias_grad",
}


def full(monkeypatch: pytest.MonkeyPatch, kernel: str) -> list[StorageWeakRef]:
    """The torch kernels on a GPU that is full once ``kernel`` runs; what kernels before it have made is noted."""
    made: list[StorageWeakRef] = []

    def noted(name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if name == kernel:
                raise torch.OutOfMemoryError(FOUND)
            result = getattr(TorchBackend(), name)(*args)
            made.extend(StorageWeakRef(t.untyped_storage()) for t in _tensors(result))
            return result

        return run

    for name in STEP_OF_KERNEL:
        monkeypatch.setitem(vars(backend_named("torch")), name, noted(name))
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
    assert text.startswith(
        f"tilemoe.moe, {STEP_OF_KERNEL[kernel]}: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0"
    )
    assert "12.25 MiB is free." in text
    assert "PYTORCH_ALLOC_CONF" not in text
    assert text.endswith("Pass fewer tokens per call, or recompute='up_proj', which keeps no pre-activations.")
    sizes = "With 24 tokens in 72 rows, hidden_size 16, intermediate_size 8 and 6 experts it takes"
    assert (sizes in text) == ("bias" not in kernel)
    for name, tensor in forward_and_grads(moe, INPUTS, PLAN).items():
        assert torch.equal(tensor, expected[name]), f"{name} after another try"


@pytest.mark.parametrize("kernel", ["down_proj", "combine"])
def test_the_forward_holds_nothing_while_its_error_is_handled(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = full(monkeypatch, kernel)
    with pytest.raises(torch.OutOfMemoryError) as error:
        moe(plan=PLAN, **{name: tensor.clone().requires_grad_() for name, tensor in INPUTS.items()})
    assert error.value.__context__ is None
    assert made, "kernels ran before"
    assert all(ref.expired() for ref in made)


def test_gradients_gathered_so_far_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in INPUTS.items()}
    for tensor in leaves.values():
        tensor.grad = torch.ones_like(tensor)
    o = moe(plan=PLAN, **leaves)
    full(monkeypatch, "up_proj_wgrad")
    with pytest.raises(torch.OutOfMemoryError, match="up_proj_wgrad"):
        o.sum().backward()
    for name, tensor in leaves.items():
        assert tensor.grad is not None
        assert bool((tensor.grad == 1).all()), name


def test_other_errors_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setitem(vars(backend_named("torch")), "down_proj_inference", broken)
    with pytest.raises(RuntimeError, match=r"^something else$"):
        moe(plan=PLAN, **INPUTS)


def test_the_need_in_numbers() -> None:
    shape = MoEShape(32768, 2048, 1024, 64, 8)
    text = out_of_memory_message("forward", FOUND, shape)
    assert "it takes 2.12 GiB in forward and 2.50 GiB in backward, gradients included." in text
    assert "it takes 10.00 MiB in forward" in out_of_memory_message("forward", FOUND, replace(shape, num_tokens=128))
    nothing_said = out_of_memory_message("forward", "", shape)
    assert nothing_said.startswith("tilemoe.moe, forward: out of memory. With 32768 tokens")
    sizes_unknown = out_of_memory_message("forward", "HIP out of memory.", None)
    assert sizes_unknown.startswith("tilemoe.moe, forward: HIP out of memory. Pass fewer tokens")
