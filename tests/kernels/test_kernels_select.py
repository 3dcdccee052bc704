"""Which KernelSet is chosen, that it says why, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import triton

from tilemoe.config import MoEConfig
from tilemoe.kernels.base import compute_dtype
from tilemoe.kernels.hopper import serves
from tilemoe.kernels.select import KERNEL_SETS, kernel_set, select_for_widths, select_kernels
from tilemoe.kernels.tiling import Device


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_float_dtype_has_a_set_and_a_reason(dtype: torch.dtype) -> None:
    cfg = MoEConfig(hidden_size=24, intermediate_size=7, num_experts=4, num_experts_per_tok=2)
    for device in ("cpu", torch.device("cpu")):
        chosen = select_kernels(device, dtype, cfg)
        assert chosen.name in KERNEL_SETS
        assert "\n" not in chosen.reason
        for fact in ("cpu", str(dtype), "d=24", "n=7"):
            assert fact in chosen.reason
        assert chosen.because("") == KERNEL_SETS[chosen.name]
    assert "d=" not in select_kernels("cpu", dtype).reason


def test_registry_is_read_only_and_named_by_its_keys() -> None:
    assert all(name == ks.name for name, ks in KERNEL_SETS.items())
    assert all(kernel_set(name) is ks for name, ks in KERNEL_SETS.items())
    with pytest.raises(TypeError):
        KERNEL_SETS["mine"] = KERNEL_SETS["torch"]  # type: ignore[index]


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


@pytest.mark.parametrize("name", ["cutlass", 3, None, [], {}], ids=str)
def test_unknown_sets_are_named_in_one_line(name: Any) -> None:
    with pytest.raises(ValueError, match=r"kernels must be None or one of .*torch.*; got") as error:
        kernel_set(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("version", "name"), [("3.6.0", "hopper"), ("3.9.0", "hopper"), ("9.0.0", "triton")])
def test_a_triton_whose_gluon_has_moved_leaves_the_portable_kernels(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(serves, "gpu", lambda index: Device(90, 227 * 1024, 132))
    monkeypatch.setattr(triton, "__version__", version)
    if name == "triton":
        monkeypatch.setitem(sys.modules, "tilemoe.kernels.hopper.kernel_set", None)  # an ImportError for who imports it
    chosen = select_kernels("cuda:0", torch.bfloat16)
    assert chosen.name == name
    assert ("not 9.0.0" in chosen.reason) == (name == "triton")


def test_compute_dtype() -> None:
    assert compute_dtype(torch.float64) == torch.float64
    assert {compute_dtype(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)} == {torch.float32}


def test_triton_serves_gpus_where_the_shapes_suit_it() -> None:
    chosen = select_for_widths("cuda", torch.bfloat16, 1536, 256)
    assert (chosen.name, chosen.because("")) == ("triton", kernel_set("triton"))
    assert "d=1536, n=256" in chosen.reason
    cfg = MoEConfig(hidden_size=64, intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    assert select_kernels("cuda", torch.bfloat16, cfg).name == select_kernels("cuda", torch.float16).name == "triton"


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "reason"),
    [
        ("cuda", torch.float64, (64, 32), "no Triton kernel computes in torch.float64"),
        ("cuda", torch.float32, (64, 32), "cuBLAS's fp32 products are faster; pass kernels='triton'"),
        ("cuda", torch.bfloat16, (64, 36), "must be multiples of 8"),
        ("cuda", torch.bfloat16, (60, 32), "must be multiples of 8"),
        ("cpu", torch.bfloat16, (64, 32), "Triton does not run on cpu"),
    ],
)
def test_torch_serves_the_rest_and_says_why(
    device: str, dtype: torch.dtype, widths: tuple[int, int], reason: str
) -> None:
    chosen = select_for_widths(device, dtype, *widths)
    assert chosen.name == "torch"
    assert reason in chosen.reason
