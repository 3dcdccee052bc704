"""Which implementation is chosen, that it says why, and what is refused."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton

from tilemoe.config import MoEConfig
from tilemoe.kernels import choose
from tilemoe.kernels.choose import choose_experts, choose_lm, choose_rounding, choose_router, select_kernels
from tilemoe.kernels.experts.base import compute_dtype
from tilemoe.kernels.experts.hopper import serves
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.runtime.device import Device

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The GPU that is asked is an H200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(serves, "gpu", lambda index: Device(90, 227 * 1024, 132))
    choose._known_experts_on.cache_clear()
    yield
    choose._known_experts_on.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_float_dtype_has_a_backend_and_a_reason(dtype: torch.dtype) -> None:
    cfg = MoEConfig(hidden_size=24, intermediate_size=7, num_experts=4, num_experts_per_tok=2)
    for device in ("cpu", CPU):
        chosen = select_kernels(device, dtype, cfg)
        assert chosen.name == chosen.impl.name == "torch"
        assert chosen.impl.why_unsupported(CPU, dtype, (24, 7)) is None
        assert "\n" not in chosen.reason
        for fact in ("cpu", str(dtype), "d=24", "n=7"):
            assert fact in chosen.reason
        assert chosen.impl is backend_named(chosen.name)
    assert "d=" not in select_kernels("cpu", dtype).reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cpu", torch.int32), "dtype must be one of torch.bfloat16, .*; got torch.int32"),
        (("cpu", torch.float8_e4m3fn), "dtype must be one of .*; got torch.float8_e4m3fn"),
        (("cpu", "float32"), "dtype must be one of .*; got float32"),
        (("gpu", torch.float32), "device must be a torch device such as 'cpu' or 'cuda:0', got 'gpu'"),
    ],
    ids=str,
)
def test_bad_arguments_are_named_in_one_line(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        select_kernels(*arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("version", "name"), [("3.6.0", "hopper"), ("3.9.0", "hopper"), ("9.0.0", "triton")])
@pytest.mark.usefixtures("h200")
def test_a_triton_whose_gluon_has_moved_leaves_the_portable_kernels(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    if name == "triton":  # an ImportError for who imports it
        monkeypatch.setitem(sys.modules, "tilemoe.kernels.experts.hopper.backend", None)
    chosen = select_kernels("cuda:0", torch.bfloat16)
    assert chosen.name == name
    assert ("not 9.0.0" in chosen.reason) == (name == "triton")
    why = serves.why_unsupported(torch.device("cuda:0"))
    assert (why is None) == (name == "hopper")
    assert why is None or why in chosen.reason


def test_compute_dtype() -> None:
    assert compute_dtype(torch.float64) == torch.float64
    assert {compute_dtype(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)} == {torch.float32}


def test_triton_serves_gpus_where_the_shapes_suit_it() -> None:
    cfg = MoEConfig(hidden_size=1536, intermediate_size=256, num_experts=4, num_experts_per_tok=2)
    chosen = select_kernels("cuda", torch.bfloat16, cfg)
    assert (chosen.name, chosen.impl) == ("triton", backend_named("triton"))
    assert "d=1536, n=256" in chosen.reason
    assert select_kernels("cuda", torch.float16).name == "triton"


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "reason"),
    [
        (GPU, torch.float64, (64, 32), "no Triton kernel computes in torch.float64"),
        (GPU, torch.float64, (64, 36), "no Triton kernel computes in torch.float64"),
        (GPU, torch.float32, (64, 32), "cuBLAS's fp32 products are faster; pass kernels='triton'"),
        (GPU, torch.bfloat16, (64, 36), "must be multiples of 8"),
        (GPU, torch.bfloat16, (60, 32), "must be multiples of 8"),
        (CPU, torch.bfloat16, (64, 32), "Triton does not run on cpu"),
        (CPU, torch.bfloat16, (60, 32), "Triton does not run on cpu"),
    ],
)
def test_torch_serves_the_rest_and_says_why(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int], reason: str
) -> None:
    chosen = choose_experts(device, dtype, widths)
    assert chosen.name == "torch"
    assert reason in chosen.reason


def test_every_chooser_asks_one_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Triton runs here is decided in one place for the experts, the router, the plan and all others."""
    choose._known_experts_on.cache_clear()
    monkeypatch.setattr(choose, "why_no_triton", lambda device: "none today")
    choices = (
        choose_experts(GPU, torch.bfloat16, (64, 32)),
        choose_router(GPU, torch.float32, 8, 2),
        choose_rounding(GPU, torch.float32, 8),
        choose.choose_plan(GPU, 8, 4),
        choose.choose_inference_plan(GPU, 8, 4),
        choose.choose_expert_parallel(GPU, 4, 8, 4, 2),
        choose_lm(torch.ones(2)),
    )
    choose._known_experts_on.cache_clear()
    assert {(choice.name, choice.reason) for choice in choices} == {("torch", "none today")}


def test_a_layers_own_limits_are_the_reason_where_triton_runs() -> None:
    assert choose_rounding(GPU, torch.float32, 8).name == "triton"
    for choice, reason in (
        (choose_router(GPU, torch.float64, 8, 2), "no Triton kernel computes in torch.float64"),
        (choose_router(GPU, torch.float32, 8, 33), "more than 32 experts per token"),
        (choose_rounding(GPU, torch.float32, 4097), "more than 4096 experts"),
        (choose_lm(torch.nn.Parameter(torch.ones(2))), "Parameter may stand for a tensor"),
    ):
        assert (choice.name, choice.reason) == ("torch", reason)
