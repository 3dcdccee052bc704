"""Dispatch between implementations (PyTorch, Triton, Hopper): each function returns a `Choice`, with its reason.

It covers experts, router, plan, rounding, expert parallelism and the language model.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · P pairs · W ranks

Triton implementations are imported only once chosen: Triton is not on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilemoe.checks import require_type, shown
from tilemoe.config import MoEConfig
from tilemoe.kernels.expert_parallel import torch as torch_expert_parallel
from tilemoe.kernels.experts import table
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats import fp8
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.triton.configs import why_unsupported as why_widths_unsupported
from tilemoe.kernels.lm.documents import Documents, masked_attention, varlen_attention
from tilemoe.kernels.plan.torch import sort_by_expert
from tilemoe.runtime.device import why_no_triton
from tilemoe.runtime.tensors import device_named
from tilemoe.runtime.tracing import constant_when_traced

Impl = TypeVar("Impl")
DocumentAttention = Callable[[Tensor, Tensor, Tensor, Documents], Tensor]
Whys = tuple[str | None, ...] | None
PlanTopK = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Choice(Generic[Impl]):
    """The chosen implementation: its name, its code and, in one line, why it was chosen.

    impl is None where the caller itself selects the code by name.
    """

    name: str
    impl: Impl
    reason: str


class PlanBuilder(NamedTuple):
    """``build(expert_ids (T, K), num_experts)``; every builder returns the same tensors.

    ``build_in_one`` may return views of one allocation: use it only for tensors that no operator returns.
    """

    build: PlanTopK
    build_in_one: PlanTopK


def select_kernels(device: torch.device | str, dtype: torch.dtype, cfg: MoEConfig | None = None) -> Choice[Backend]:
    """The backend that computes experts on this device, in this dtype and for this layer, and why.

    ``cfg`` is None when only the device and the dtype are known. ValueError for a dtype that no backend computes in.

    Examples:
        >>> choice = tilemoe.select_kernels("cpu", torch.bfloat16)
        >>> choice.name, choice.reason
        ('torch', 'plain PyTorch is used for cpu, torch.bfloat16: Triton does not run on cpu')
    """
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(str(d) for d in FLOAT_DTYPES)}; got {shown(dtype)}")
    if cfg is not None:
        require_type("cfg", cfg, MoEConfig)
    found = device_named(device)
    widths = () if cfg is None else (cfg.hidden_size, cfg.intermediate_size)
    chosen = choose_experts(found, dtype, widths, "bf16" if cfg is None else cfg.precision)
    layer = "".join(f", {letter}={width}" for letter, width in zip("dn", widths, strict=False))
    serves = next(row.serves for row in table.ROWS if row.name == chosen.name)
    return Choice(chosen.name, chosen.impl, f"{serves} {found.type}, {dtype}{layer}: {chosen.reason}")


def choose_experts(
    device: torch.device, dtype: torch.dtype, widths: Sequence[int] = (), precision: str = "bf16"
) -> Choice[Backend]:
    """The experts' backend. widths: the layer's d and n, or empty. torch.compile can trace it, with symbolic widths.

    ``precision`` is a preference: where "fp8" is not available, a "bf16" backend is chosen, and the reason says why.
    """
    chosen = _experts_on(device, dtype, precision, None)
    if chosen.name == "torch":  # whatever the widths
        return chosen
    # The cache key has the reasons against the widths, not the widths themselves, which may be symbolic.
    whys = tuple([row.why_not_layer(dtype, *widths) for row in table.ROWS if row.precision == precision])
    chosen = _experts_on(device, dtype, precision, whys)
    if chosen.impl is not None:
        return chosen
    instead = choose_experts(device, dtype, widths)
    reason = f"not in {precision.upper()} ({chosen.reason}): change that, or set precision='bf16'; {instead.reason}"
    return Choice(instead.name, instead.impl, reason)


@constant_when_traced
def _experts_on(device: torch.device, dtype: torch.dtype, precision: str, whys: Whys) -> Any:
    return _known_experts_on(device, dtype, precision, whys)


@cache  # every forward asks, and the answer queries the GPU
def _known_experts_on(device: torch.device, dtype: torch.dtype, precision: str, whys: Whys) -> Choice[Backend | None]:
    """The choice of the first row of ``precision`` that can be used. whys: for each of these rows why the widths rule
    it out, or None; None in place of the tuple if they rule out none.

    If no row can be used, impl is None and the reason is that of the first row.
    """
    rows = [row for row in table.ROWS if row.precision == precision]
    against = list[str]()
    for row, why in zip(rows, whys or [None] * len(rows), strict=True):
        found = row.why_not(device, dtype, why)
        if found is None:
            return Choice(row.name, backend_named(row.name), row.because or against[-1])
        against.append(found)
    return Choice("", None, against[0])


def why_not_triton(device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
    """Why Triton kernels are not used for GEMMs in ``dtype``; None if they are."""
    return table.why_not_triton(device, dtype, why_widths_unsupported(*widths))


@constant_when_traced
def choose_router(device: torch.device, dtype: torch.dtype, num_experts: int, experts_per_token: int) -> Choice[None]:
    """The router's kernels, for logits of this device and dtype, fp32 or fp64 (16-bit logits are converted first)."""
    return _known_router(why_no_triton(device), dtype, num_experts, experts_per_token)


@cache  # every forward asks
def _known_router(why: str | None, dtype: torch.dtype, num_experts: int, experts_per_token: int) -> Choice[None]:
    """``why``: why no Triton kernel runs on the device, or None."""
    if why is None and dtype != torch.float32:
        why = f"no Triton kernel computes in {dtype}"
    if why is None:
        from tilemoe.kernels.router.triton import why_unsupported

        why = why_unsupported(num_experts, experts_per_token)
    if why is not None:
        return Choice("torch", None, why)
    return Choice("triton", None, "selection, scores and the losses' sums in one kernel that reads each logit once")


def choose_rounding(device: torch.device, dtype: torch.dtype, num_experts: int) -> Choice[None]:
    """Token rounding's kernels; they limit the number of experts as the router's do, but not K."""
    return choose_router(device, dtype, num_experts, 1)


def choose_plan(device: torch.device, num_pairs: int, num_experts: int) -> Choice[PlanBuilder]:
    """The builder of a plan, for the P = T*K pairs of a top-K selection."""
    why = why_no_triton(device)
    if why is None:
        from tilemoe.kernels.plan import triton as triton_plan

        why = triton_plan.why_unsupported(num_pairs, num_experts)
    if why is not None:
        return Choice("torch", PlanBuilder(sort_by_expert, sort_by_expert), why)
    builder = PlanBuilder(triton_plan.count_sort, triton_plan.count_sort)
    return Choice("triton", builder, "a counting sort in four kernels")


def choose_inference_plan(device: torch.device, num_pairs: int, num_experts: int) -> Choice[PlanBuilder]:
    """`choose_plan` with a builder for few pairs. Not for training, where a new batch size must not compile."""
    if why_no_triton(device) is None:
        from tilemoe.kernels.plan import triton_small

        if triton_small.why_unsupported(num_pairs, num_experts) is None:
            builder = PlanBuilder(triton_small.count_sort_small, triton_small.count_sort_small_in_one)
            return Choice("triton", builder, "few pairs: a counting sort in one kernel")
    return choose_plan(device, num_pairs, num_experts)


def choose_expert_parallel(
    device: torch.device, num_tokens: int, num_pairs: int, num_experts: int, ranks: int
) -> Choice[ModuleType]:
    """Expert parallelism's kernels, for T tokens and P pairs that are sent or received among W ranks: a module with the
    functions that `tilemoe.kernels.expert_parallel.torch` documents.
    """
    why = why_no_triton(device)
    if why is None:
        from tilemoe.kernels.expert_parallel import triton as triton_expert_parallel

        why = triton_expert_parallel.why_unsupported(num_tokens, num_pairs, num_experts, ranks)
    if why is not None:
        return Choice("torch", torch_expert_parallel, why)
    return Choice("triton", triton_expert_parallel, "counting sorts, a few kernels each")


def choose_packing(device: torch.device, dtype: torch.dtype) -> Choice[ModuleType]:
    """The module whose `pack_rows` and `unpack_rows` quantise rows of this dtype, which processes exchange in FP8."""
    why = why_no_triton(device) or backend_named("triton").why_unsupported(device, dtype)
    if why is None:
        from tilemoe.kernels.experts.triton.formats.quantize import why_no_e4m3

        why = why_no_e4m3(device)
    if why is not None:
        return Choice("torch", fp8, why)
    from tilemoe.kernels.experts.triton.formats import quantize as by_triton

    return Choice("triton", by_triton, "one kernel packs, one unpacks")


def choose_lm(x: Tensor) -> Choice[None]:
    """The language model's kernels (loss, rotary embedding) for ``x``; PyTorch's while torch.compile traces."""
    if torch.compiler.is_compiling():
        return Choice("torch", None, "torch.compile makes a kernel of its own")
    if type(x) is not Tensor:
        return Choice("torch", None, f"{type(x).__name__} is not a plain tensor")
    why = why_no_triton(x.device)
    return Choice("triton", None, "one kernel in place of several") if why is None else Choice("torch", None, why)


def choose_projections(device: torch.device) -> Choice[None]:
    """Attention's projections if FP8 is requested: "torchao", or "torch" for GEMMs in the layer's dtype."""
    if find_spec("torchao") is None:
        return Choice("torch", None, "not in FP8 (torchao is not installed); pip install 'tilemoe[fp8]'")
    if device.type == "cpu":
        return Choice("torchao", None, "FP8 is asked for; it is emulated here, slower than the layer's own dtype")
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        return Choice("torch", None, "not in FP8 (it needs NVIDIA's compute capability 8.9 or above)")
    return Choice("torchao", None, "FP8 is asked for, and the GPU has FP8 matrix units")


def choose_document_attention(device: torch.device, dtype: torch.dtype, width: int) -> Choice[DocumentAttention]:
    """Causal attention within the documents of packed sequences, for queries, keys and values (..., width)."""
    if device.type != "cuda":
        return Choice("masked", masked_attention, f"PyTorch's variable-length attention does not run on {device.type}")
    if dtype not in (torch.float16, torch.bfloat16):
        return Choice("masked", masked_attention, f"PyTorch's variable-length attention does not compute in {dtype}")
    if width % 8 or width > 256:  # where scaled_dot_product_attention would pad, or choose another kernel
        return Choice("masked", masked_attention, f"PyTorch's variable-length attention has no heads of width {width}")
    return Choice("varlen", varlen_attention, "pairs of tokens in different documents cost nothing")
