"""An expert weight of a transformers model, stored in 4 bit, with the low-rank product that PEFT's adapters add to it.

d hidden_size · n intermediate_size · E experts · p, q the last two dimensions of a weight, as its module has it
r rank of an adapter

A `FrozenWeight` takes the place of a stacked parameter (E, p, q) under its name, with its shape and dtype, so that
transformers and PEFT treat it as that frozen weight. Where PEFT would compute ``W + scale left right``, it keeps the
factors instead: `tilemoe.ops.lora.moe_lora` multiplies by ``left`` and ``right``, and the sum is never materialised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilemoe.integrations.gates import name_of
from tilemoe.kernels.experts.formats.mxfp4 import Mxfp4Weight
from tilemoe.kernels.experts.formats.packed import PackedWeight, Weight
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.ops.lora import Adapters

_MXFP4 = Mxfp4Weight.name
_RANK_MULTIPLE = 8  # GPU kernels take ranks that are multiples of it
_INSTEAD = (
    "only experts_implementation='tilemoe' computes with it, an average takes the parameters that require gradients "
    "alone, and dequantize_experts(model) makes it plain again"
)

UNCOMPILED = "_tilemoe_uncompiled"  # attribute of an experts module that torch.compile must not trace


class LowRank(NamedTuple):
    """The product ``scale left right``, as its factors left (E, p, r) and right (E, r, q)."""

    left: Tensor
    right: Tensor
    scale: float


class FrozenWeight(Tensor):
    """A frozen weight (E, p, q) of ``dtype``, and the product that adapters add to it, if any.

    ``stored`` is in 4 bit; only in a temporary weight, which is no module's parameter, it may be a plain tensor.
    """

    stored: Weight
    added: LowRank | None

    @staticmethod
    def __new__(
        cls: type[FrozenWeight],
        stored: Weight | FrozenWeight,
        dtype: torch.dtype | None = None,
        added: LowRank | None = None,
        *,
        requires_grad: bool = False,
    ) -> FrozenWeight:
        if isinstance(stored, FrozenWeight):  # accelerate calls so to rebuild a parameter that it had offloaded
            return nn.Parameter(stored, requires_grad)  # type: ignore[return-value]
        if dtype is None:
            raise ValueError("experts in 4 bit cannot be offloaded to disk; offload them to the CPU")
        device = (stored if isinstance(stored, Tensor) else stored.codes).device
        made: FrozenWeight = Tensor._make_wrapper_subclass(cls, stored.shape, dtype=dtype, device=device)
        made.stored, made.added = stored, added
        return made

    @property
    def packed(self) -> PackedWeight:
        """The 4-bit storage of a parameter."""
        assert isinstance(self.stored, PackedWeight), "a parameter"
        return self.stored

    def tensors(self) -> list[Tensor]:
        """The tensors that it is stored as, codes first."""
        return list(self.packed.tensors.values())

    def mapped(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> FrozenWeight:
        """A new weight of ``function`` applied to each of its tensors, without adapters."""
        return FrozenWeight(type(self.packed)(*map(function, self.tensors())), dtype or self.dtype)

    def transpose(self, first: int, second: int) -> FrozenWeight:
        """The weight as (E, q, p), which is not a parameter."""
        if (first, second) != (1, 2):  # grouped_mm asks for (-2, -1)
            return super().transpose(first, second)  # type: ignore[return-value]  # refused like any other call
        added = self.added and LowRank(self.added.right.mT, self.added.left.mT, self.added.scale)
        return FrozenWeight(self.stored.transpose(first, second), self.dtype, added)

    def with_product(self, more: LowRank) -> FrozenWeight:
        """The weight with ``more`` added; two products are joined to one of their summed rank."""
        if self.added is not None:
            (one, other), scale = _of_one_scale(self.added, more)
            more = LowRank(torch.cat((one, other), 2), torch.cat((self.added.right, more.right), 1), scale)
        return FrozenWeight(self.stored, self.dtype, more)

    @torch.no_grad()
    def dense(self) -> Tensor:
        """The dequantised weight (E, p, q) in its dtype, without adapters; works on one expert at a time."""
        dense = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for expert, matrix in enumerate(dense):
            matrix.copy_(self.packed.expert(expert, self.dtype))
        return dense

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """The tensors that FSDP2 all-gathers along the experts: as stored, whatever the mixed-precision policy says."""
        if outer_size[0] % mesh.size():
            raise ValueError(f"{outer_size[0]} experts in 4 bit cannot be shared evenly by {mesh.size()} processes")
        tensors = tuple(t if t.is_contiguous() else t.mT for t in self.tensors())
        return tensors if mesh.size() > 1 else tensors[:1], None  # with one process FSDP2 looks at a single tensor

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[FrozenWeight, tuple[()]] | None:
        """The whole weight, as views of the gathered tensors, which FSDP2 frees and refills; None if given ``out``."""
        if out is not None:
            return None
        if len(gathered) < len(self.tensors()):  # this process is alone
            return FrozenWeight(self.stored, param_dtype), ()
        pairs = zip(gathered, self.tensors(), strict=True)
        whole = [t if shard.is_contiguous() else t.mT for t, shard in pairs]
        return FrozenWeight(type(self.packed)(*whole), param_dtype), ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a call of `loaded`, which `torch.load` allows even with its default ``weights_only=True``."""
        parts = saved(self)
        of_format = [name for name, each in STORAGES.items() if isinstance(self.packed, each.weight)]
        storage = next(name for name in of_format if len(saved_names(name)) == len(parts))
        return loaded, (list(parts), storage, self.dtype, storage == _MXFP4 and self.packed.blocked == 1)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self.stored).__name__} {tuple(self.shape)} of {self.dtype} on {self.device}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.baddbmm:  # PEFT's ``W + scale left right``; caught here so that autograd sees both factors
            weight, left, right = args
            return weight.with_product(LowRank(left, right, kwargs["alpha"]))
        if func is Tensor.numpy:  # TRL calls it to hash a reference model
            return args[0].dense().numpy()
        if func is Tensor.element_size:  # a fraction of a byte; transformers computes a model's memory from it
            return sum(tensor.nbytes for tensor in args[0].tensors()) / args[0].numel()
        if func in (Tensor.untyped_storage, Tensor.storage):
            return _NoStorage()
        if func is Tensor.share_memory_:  # the wrapper itself has no memory: torch would crash
            args[0].mapped(Tensor.share_memory_)
            return args[0]
        if func is Tensor.is_shared:
            return all(tensor.is_shared() for tensor in args[0].tensors())
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func is Tensor.data.__set__:  # type: ignore[attr-defined]  # which copies shape and dtype alone
            args[0].stored = args[1].stored
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        weight, aten = args[0], torch.ops.aten
        if isinstance(weight, FrozenWeight):
            if func in (aten.detach.default, aten.alias.default) or func.name() in _WAITS:
                return weight.mapped(Tensor.detach)
            if func in (aten.clone.default, aten._pin_memory.default):
                return weight.mapped(func)
            if func is aten._to_copy.default:
                return weight.mapped(lambda t: t.to(kwargs.get("device"), copy=True), kwargs.get("dtype"))
            if func in _LIKE and args[1:] in ((), (list(weight.shape),)):
                return weight.mapped(lambda t: torch.zeros_like(t, device=kwargs.get("device")), kwargs.get("dtype"))
            if func is aten.is_pinned.default:
                return all(tensor.is_pinned() for tensor in weight.tensors())
            if func is aten.set_.source_Tensor and args[1] is weight:
                return weight  # what torch.nn.utils.parametrize does to register a parametrisation
            if func in _SHARDING:
                return _SHARDING[func](weight, *args[1:])
        instead = "save and load SHARDED_STATE_DICT" if func.namespace == "c10d" else _INSTEAD
        raise ValueError(f"{func} has an expert weight in 4 bit for an argument; {instead}")


class _NoStorage:
    """A storage of size 0, which torch.distributed.checkpoint compares before it clones; safetensors gets an error."""

    def size(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            "a 4-bit weight has no storage; to save it pass safe_serialization=False, or call save_pretrained"
        )


def _experts(weight: FrozenWeight, dim: int = 0, start: int = 0, stop: int = sys.maxsize) -> FrozenWeight:
    if dim != 0 and start == 0 and stop >= weight.shape[dim]:  # checkpoints slice so, to take a whole shard
        return weight.mapped(Tensor.detach)
    if dim != 0:
        raise ValueError("experts in 4 bit are shared whole: take a number of processes that divides theirs")
    return weight.mapped(lambda t: t[start:stop])


def _split(weight: FrozenWeight, size: int, dim: int = 0) -> list[FrozenWeight]:
    return [_experts(weight, dim, at, at + size) for at in range(0, weight.shape[0], size)]


def _copy(weight: FrozenWeight, other: FrozenWeight, *_: Any) -> FrozenWeight:
    own, given = (_kinds(each.tensors() if isinstance(each, FrozenWeight) else [each]) for each in (weight, other))
    if own != given:  # copy_ would broadcast or cast them
        raise ValueError(f"{own} take no values of {given}; quantise the model as it was when it was saved")
    for tensor, value in zip(weight.tensors(), other.tensors(), strict=True):
        tensor.copy_(value)
    return weight


def _kinds(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(each.shape)} {each.dtype} {each.layout}" for each in tensors)


def _gathered(weight: FrozenWeight, *args: Any) -> FrozenWeight:
    """The weight with the experts of all processes, all-gathered for a full state dict."""

    def whole(shard: Tensor) -> Tensor:
        return _C10D.wait_tensor(_C10D.all_gather_into_tensor(shard, *args))

    return weight.mapped(lambda t: whole(t) if t.is_contiguous() else whole(t.mT).mT)


# Calls that allocate a weight of the same shape, whose values are set later.
_LIKE = (torch.ops.aten.empty_like.default, torch.ops.aten.zeros_like.default, torch.ops.aten.new_empty.default)
_C10D = torch.ops._c10d_functional
# Calls that wait for an all-gather, which `_gathered` has done already; some releases of PyTorch lack the second.
_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
# How FSDP2 shards a weight by experts. Its flat view is never read: `fsdp_pre_all_gather` gives the tensors to gather.
_SHARDING: MappingProxyType[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.aten.split.Tensor: _split,
        torch.ops.aten.slice.Tensor: _experts,
        torch.ops.aten.new_zeros.default: lambda w, size: w.mapped(lambda t: torch.zeros_like(t[: size[0]])),
        torch.ops.aten.copy_.default: _copy,
        torch.ops.aten.view.default: lambda w, *_: w.mapped(Tensor.detach),
        torch.ops.aten.as_strided.default: lambda w, *_: w.mapped(Tensor.detach),
        _C10D.all_gather_into_tensor.default: _gathered,
    }
)


def adapters_of(w1: FrozenWeight, w2: FrozenWeight) -> Adapters:
    """The adapters that PEFT adds to w1 (E, w, d) and w2 (E, d, n); zeros for a weight without adapters.

    Ranks are padded with zeros to one that the kernels take; scales that differ are multiplied into up_b and down_b.
    """
    ranks = [each.added.left.shape[2] for each in (w1, w2) if each.added] or [1]
    rank = filled_rank(max(ranks), w1.device)
    up, down = _of_rank(w1, w2, rank), _of_rank(w2, w1, rank)
    (up_b, down_b), scale = _of_one_scale(up, down)
    return Adapters(up.right.contiguous(), up_b.contiguous(), down.right.contiguous(), down_b.contiguous(), scale)


def filled_rank(rank: int, device: torch.device) -> int:
    """The rank to which `adapters_of` pads ``rank`` on this device."""
    return rank if device.type == "cpu" else -(-rank // _RANK_MULTIPLE) * _RANK_MULTIPLE


def _of_one_scale(one: LowRank, other: LowRank) -> tuple[tuple[Tensor, Tensor], float]:
    """Both left factors and their common scale; if the scales differ, the factors are multiplied by them, 1 remains."""
    if one.scale == other.scale:
        return (one.left, other.left), one.scale
    return (one.left * one.scale, other.left * other.scale), 1.0


def _of_rank(weight: FrozenWeight, other: FrozenWeight, rank: int) -> LowRank:
    """The product added to ``weight``, padded to ``rank``; if there is none, zeros with the scale of ``other``."""
    if weight.added is None:
        experts, p, q = weight.shape
        zeros = partial(torch.zeros, dtype=weight.dtype, device=weight.device)
        return LowRank(zeros(experts, p, rank), zeros(experts, rank, q), other.added.scale if other.added else 1.0)
    left, right, scale = weight.added
    more = rank - left.shape[2]
    if not more:
        return weight.added
    return LowRank(nn.functional.pad(left, (0, more)), nn.functional.pad(right, (0, 0, 0, more)), scale)


def make_dense(model: nn.Module) -> int:
    """Replace each 4-bit weight by a plain frozen one of its dtype; returns how many there were."""
    for module, _, _ in quantized_weights(model):
        _refuse_offloaded(module)
    count = 0
    for module, name, weight in quantized_weights(model):
        setattr(module, name, nn.Parameter(weight.dense(), requires_grad=False))
        vars(module).pop(UNCOMPILED, None)
        count += 1
    return count


def quantized_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, FrozenWeight]]:
    """(module, name within it, weight) of each 4-bit weight."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, FrozenWeight):
                yield module, name, parameter


def quantize_weight(weight: Tensor, storage: str, is_transposed: bool) -> nn.Parameter:
    """The weight (E, p, q), frozen and in 4 bit. Blocks lie along q in NF4, along the inputs in MXFP4 (as gpt-oss)."""
    turns = storage == _MXFP4 and is_transposed
    stored = STORAGES[storage].quantize(weight.mT if turns else weight)
    return _parameter(stored.transpose(1, 2) if turns else stored, weight.dtype)


def saved_names(storage: str) -> tuple[str, ...]:
    """The suffixes of a weight's name in a folder that stores it in 4 bit, one per tensor."""
    return ("blocks", "scales") if storage == _MXFP4 else STORAGES[storage].parts


def saved(weight: FrozenWeight) -> tuple[Tensor, ...]:
    """The tensors that a folder stores for a weight, in the order of `saved_names`; MXFP4 has gpt-oss's own layout."""
    stored = weight.stored
    if not isinstance(stored, Mxfp4Weight):
        return tuple(weight.tensors())
    codes, scales = (t if t.is_contiguous() else t.mT for t in weight.tensors())
    return codes.unflatten(-1, (scales.shape[-1], -1)), scales


def loaded(parts: list[Tensor], storage: str, dtype: torch.dtype, is_transposed: bool) -> nn.Parameter:
    """The inverse of `saved`. The file is not trusted: ValueError unless ``parts`` make up a weight."""
    form, codes = STORAGES[storage], parts[0]
    shape = (1, *codes.shape[1:2], 2 * codes.shape[2:].numel())
    is_whole = len(shape) == 3 and all(shape) and shape[2] % form.weight.block == 0 and dtype.is_floating_point
    like = saved(FrozenWeight(form.quantize(torch.empty(shape, device="meta")), dtype)) if is_whole else ()
    if _kinds(parts) != _kinds([t.expand(len(codes), *t.shape[1:]) for t in like]):
        raise ValueError(f"{_kinds(parts)} are no weight of {dtype} in {storage}; save it again")
    if storage != _MXFP4:
        return _parameter(STORAGES[storage].weight(*parts), dtype)
    stored = Mxfp4Weight.from_checkpoint(*parts)
    return _parameter(stored.transpose(1, 2) if is_transposed else stored, dtype)


def _parameter(stored: PackedWeight, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(FrozenWeight(stored, dtype), requires_grad=False)


def weight_names(module: nn.Module) -> tuple[str, str]:
    """The names of the two weights of an experts module of transformers."""
    return ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"), "down_proj"


def check_quantizable(module: nn.Module, storage: str) -> None:
    """ValueError unless the experts of ``module``, which may be on the meta device, can be stored as ``storage``."""
    _refuse_offloaded(module)
    first, second = (getattr(module, name, None) for name in weight_names(module))
    if isinstance(first, FrozenWeight):
        raise _refusal(module, f"it is {first!r} already; call dequantize_experts first")
    if type(first) is not nn.Parameter or type(second) is not nn.Parameter or not first.ndim == second.ndim == 3:
        raise _refusal(module, "its weights are no whole stacked parameters; quantise before processes divide them")
    if first.dtype == torch.float64:
        raise _refusal(module, "its weights are fp64, and scales are fp32; cast the model first")
    _, d, n = second.shape
    if getattr(module, "is_transposed", False):
        d, n = n, d
    why = STORAGES[storage].weight.why_not(d, n)
    if why is not None:
        raise _refusal(module, why)


def _refuse_offloaded(module: nn.Module) -> None:
    """ValueError if accelerate keeps the module's weights, and would put them back in its next forward."""
    if hasattr(module, "_hf_hook") and any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(
            f"the experts of {name_of(module)} are offloaded; call accelerate.hooks.remove_hook_from_submodules(model)"
        )


def _refusal(module: nn.Module, reason: str) -> ValueError:
    return ValueError(f"the experts of {name_of(module)} cannot be stored in 4 bit: {reason}")


# The one function of ours that a file read by torch.load may call: it makes a weight of plain tensors, or raises.
torch.serialization.add_safe_globals([loaded])
