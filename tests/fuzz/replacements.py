"""What a caller can pass in place of a right argument: by kind, made from the right value."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nested import nested_tensor


class Subclass(Tensor):
    """A tensor as any other, of another class."""


ANYTHING: Mapping[str, Any] = MappingProxyType(
    {
        "None": None,
        "text": "wrong",
        "empty text": "",
        "two lines": "a\nb",
        "bytes": b"torch",
        "list": [0.5, 1.5],
        "empty list": [],
        "tuple": (1, 2),
        "dict": {"a": 1},
        "object": object(),
        "class": int,
        "function": len,
        "True": True,
        "False": False,
        "0": 0,
        "-1": -1,
        "2**31": 2**31,
        "2**63": 2**63,
        "2**200": 2**200,
        "0.5": 0.5,
        "NaN": float("nan"),
        "inf": float("inf"),
        "-inf": float("-inf"),
        "complex": 1j,
        "numpy array": np.ones((3, 2), np.float32),
        "numpy integer": np.int64(3),
        "dtype": torch.int32,
        "device": torch.device("meta"),
        "module": nn.Identity(),
        "tensor of 0 dimensions": torch.tensor(1.0),
        "integer tensor of 0 dimensions": torch.tensor(1),
        "tensor without elements": torch.empty(0),
        "tensor": torch.ones(2, 2),
    }
)

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.bool),
        *(torch.complex32, torch.complex64, torch.complex128),
    )
}


def _freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def _strided(t: Tensor) -> Tensor:
    return torch.stack([t, t], dim=-1)[..., 0]


def _quantised(t: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)


def _filled(value: float, t: Tensor) -> Tensor:
    t = t.clone()
    t.view(-1)[: t.numel() // 2 + 1] = value
    return t


def _dtensor(t: Tensor) -> Tensor:
    """It, in a job of one process, which must run."""
    return DTensor.from_local(t, init_device_mesh("cpu", (1,)), [Replicate()], run_check=False)


# Tensors like the right one in all but their dtype, their place in memory or their values.
SAME_SHAPE: Mapping[str, Callable[[Tensor], Any]] = MappingProxyType(
    {
        **{f"of {name}": partial(Tensor.to, dtype=dtype) for name, dtype in DTYPES.items()},
        "strided": _strided,
        "expanded": lambda t: t[:1].expand_as(t),
        "overlapping": lambda t: t.as_strided(t.shape, (1,) * t.ndim),
        "Parameter": lambda t: nn.Parameter(t, requires_grad=t.is_floating_point()),
        "requires_grad": lambda t: t.detach().requires_grad_(),
        "Subclass": lambda t: t.as_subclass(Subclass),
        "negated view": lambda t: (-t)._neg_view(),
        "NaN": partial(_filled, float("nan")),
        "inf": partial(_filled, float("inf")),
        "-inf": partial(_filled, float("-inf")),
        "-1": partial(_filled, -1),
        "large": partial(_filled, 2**40),
    }
)
OTHER_SHAPE: Mapping[str, Callable[[Tensor], Any]] = MappingProxyType(
    {
        "a dimension more": lambda t: t[None],
        "a dimension less": lambda t: t[0],
        "0 dimensions": lambda t: t.flatten()[0],
        "narrower": lambda t: t[..., :-1],
        "shorter": lambda t: t[:-1],
        "longer": lambda t: torch.cat([t, t]),
        "empty": lambda t: t[:0],
        "without columns": lambda t: t[..., :0],
        "transposed": lambda t: t.transpose(0, -1),
    }
)
NOT_ORDINARY: Mapping[str, Callable[[Tensor], Any]] = MappingProxyType(
    {
        "float4": lambda t: torch.zeros(t.shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "quantised": _quantised,
        "meta": lambda t: t.to("meta"),
        "sparse COO": Tensor.to_sparse,
        "sparse CSR": lambda t: t.to_sparse_csr(),
        "sparse BSR": lambda t: t.to_sparse_bsr((1, 1)),
        "mkldnn": lambda t: t.float().to_mkldnn(),
        "nested": lambda t: nested_tensor([t, t], layout=torch.strided),
        "nested rows": lambda t: nested_tensor(list(t), layout=torch.strided),
        "jagged": lambda t: nested_tensor([t, t[:1]], layout=torch.jagged),
        "jagged rows": lambda t: nested_tensor(list(t), layout=torch.jagged),
        "DTensor": _dtensor,
        "freed": _freed,
        "list": lambda t: t.tolist(),
        "numpy": lambda t: t.numpy(),
    }
)


_ALL = {**SAME_SHAPE, **OTHER_SHAPE, **NOT_ORDINARY}
FORMS = MappingProxyType({f"its {kind}": form for kind, form in _ALL.items()})


def kinds_for(value: Any) -> list[str]:
    """What can be put in place of ``value``: of ``ANYTHING``, and where it is a tensor, of ``FORMS`` what it has."""
    return [*ANYTHING, *(kind for kind in FORMS if isinstance(value, Tensor) and _has_form(value, kind))]


def replacement(kind: str, value: Any) -> Any:
    return ANYTHING[kind] if kind in ANYTHING else FORMS[kind](value)


def _has_form(value: Tensor, kind: str) -> bool:
    try:
        FORMS[kind](value)
    except (RuntimeError, TypeError, IndexError):  # integers with a gradient, rows of what is flat
        return False
    return True


def plain(replaced: Tensor, original: Tensor) -> Tensor:
    """The values of ``replaced`` as an ordinary tensor, in the original's dtype."""
    values = replaced.detach().as_subclass(Tensor)
    return torch.empty(values.shape, dtype=original.dtype).copy_(values)
