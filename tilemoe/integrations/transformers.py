"""The experts of Hugging Face's models, computed by tilemoe: ``register()``, then ``experts_implementation="tilemoe"``.

T tokens · d hidden_size · n intermediate_size · E experts of this rank · K experts per token · w = 2n gated, n ungated

transformers looks up the function that computes a model's experts in a table. `register` adds tilemoe's function to it,
and to the tables for FP8 experts and for quantizers entries that raise. The router stays the model's own. Weights are
read in place, (E, w, d) or transposed, without a copy. To find out which activation a model uses, its own gate function
is evaluated; the answer is kept as an attribute of the experts module. Nothing else in transformers changes. A model
that tilemoe does not compute exactly is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tilemoe.dispatch.base import Dispatched, Dispatcher, LocalDispatcher
from tilemoe.integrations.divided_adapters import LENT, take_adapters, with_adapters
from tilemoe.integrations.gates import activation_of, name_of, refusal
from tilemoe.integrations.quantized_weight import UNCOMPILED, FrozenWeight, adapters_of
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.ops.inference import Activation
from tilemoe.ops.inference import experts as infer_experts
from tilemoe.ops.lora import moe_lora
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.tracing import autocast_dtype

NAME = "tilemoe"
OLDEST = (5, 7)  # release of transformers; earlier ones accept only a fixed list of experts' implementations
_UPGRADE = "pip install -U 'transformers>=5.7'"


def register() -> None:
    """Make ``experts_implementation="tilemoe"`` available to every model of transformers >= 5.7. Idempotent.

    Raises:
        ValueError: transformers is missing or older than that.

    Examples:
        >>> from tilemoe.integrations import transformers as tilemoe_transformers
        >>> from transformers import AutoModelForCausalLM, OlmoeConfig
        >>> config = OlmoeConfig(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        ...                      num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
        >>> tilemoe_transformers.register()
        >>> model = AutoModelForCausalLM.from_config(config, experts_implementation="tilemoe")
    """
    for table, entry in _tables():
        table.setdefault(NAME, entry)


def unregister() -> None:
    """Undo `register`. A model that is still set to "tilemoe" then raises transformers' error for an unknown name.

    ValueError: transformers is missing or too old, as for `register`.

    Examples:
        >>> from tilemoe.integrations import transformers as tilemoe_transformers
        >>> tilemoe_transformers.register()
        >>> tilemoe_transformers.unregister()
    """
    for table, _ in _tables():
        table.pop(NAME, None)


def use(model: nn.Module) -> int:
    """Switch the experts of an existing ``model`` to tilemoe; returns the number of its MoE layers.

    ``model`` may be wrapped (DistributedDataParallel, torch.compile, PEFT); copies of a layer's experts, as PEFT's
    ``modules_to_save`` makes, are switched with it. Also calls `register`. Whatever the first forward would refuse is
    refused here, before the model is changed. To go back: ``model.set_experts_implementation("grouped_mm")``, which
    does not reach copies that PEFT made.

    Raises:
        ValueError: as for `register`; or ``model`` is not a whole model, has no experts that transformers dispatches,
            has Liger's experts in their place, or has experts that tilemoe does not compute. The message names the
            model and what works instead.

    Examples:
        >>> from tilemoe.integrations import transformers as tilemoe_transformers
        >>> from transformers import AutoModelForCausalLM, OlmoeConfig
        >>> config = OlmoeConfig(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        ...                      num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
        >>> tilemoe_transformers.use(AutoModelForCausalLM.from_config(config))
        2
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"use takes a model that is loaded, got {type(model).__name__}; load it, or call register()")
    register()
    _refuse_liger(model)
    modules = dict(experts_modules(model))
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no experts whose implementation transformers lets one choose (a dense model, "
            "quantised experts, or a class without that interface in this release); it works as it is, without tilemoe"
        )
    owners = hf_models(model)
    owned = {module for owner in owners for module in owner.modules()}
    for module in modules.values():
        _stored_weights(module)
        activation_of(module)
        if module not in owned and module.config._experts_implementation != NAME:  # type: ignore[union-attr]
            raise ValueError(
                f"{name_of(module)} did not take up the implementation: pass the whole model, not a part of it, or "
                f"load it with experts_implementation={NAME!r}"
            )
    for owner in owners:
        owner.set_experts_implementation(NAME)
    for module in modules.values():  # a copy of experts has a configuration of its own, which the model cannot reach
        module.config._experts_implementation = NAME  # type: ignore[union-attr]
    for name in modules:
        block = model.get_submodule(outermost(name).rpartition(".")[0])
        if _take_adapters not in block._forward_pre_hooks.values():
            block.register_forward_pre_hook(_take_adapters)
    return len({layer_of(name) for name in modules})


def _take_adapters(block: nn.Module, *_: Any) -> None:
    """Forward pre-hook of the module that calls the experts: if PEFT has wrapped them, its wrappers lend the factors
    of their adapters. Any number of adapters may then be active, and ``W + scale B A`` is never materialised.
    """
    for child in () if torch.compiler.is_compiling() else block.children():
        wrappers, inner = [], child
        while "base_layer" in inner._modules:
            wrappers.append(inner)
            inner = inner.get_submodule("base_layer")
        if wrappers and is_experts_module(inner) and _DISPATCHER not in vars(inner):
            take_adapters(inner, wrappers)


def _refuse_liger(model: nn.Module) -> None:
    """ValueError if Liger's patch of a class or module computes the experts: transformers would not call tilemoe."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward", type(module).forward)
        if "gate_up_proj" in module._parameters and forward.__module__.startswith("liger_kernel."):
            raise ValueError(
                f"{type(model).__name__} has Liger's experts in {name}, so tilemoe would not be asked; apply Liger's "
                "patch with swiglu=False, and make the model anew"
            )


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' output (..., d), like hidden_states; transformers calls this instead of the experts' own forward.

    hidden_states (..., d); top_k_weights (T, K); top_k_index (T, K) numbers all experts under
    `tilemoe.expert_parallel`, otherwise those of this rank; the number after the last then marks a pair of another
    rank, which is skipped. Computes in the weights' dtype, as grouped_mm does, or under autocast in autocast's.

    Raises:
        ValueError: tilemoe does not compute these experts.
    """
    if torch.compiler.is_compiling() and (UNCOMPILED in vars(self) or vars(self).get(LENT)):
        return _uncompiled(self, hidden_states, top_k_index, top_k_weights)
    weights = _weights(self)
    activation = activation_of(self)
    x = hidden_states if hidden_states.ndim == 2 else hidden_states.reshape(-1, hidden_states.shape[-1])
    if x.dtype != weights.w1.dtype and autocast_dtype(x.device.type) is None:
        x = x.to(weights.w1.dtype)
    dispatcher, out = _dispatcher_of(self), None
    if isinstance(dispatcher, LocalDispatcher) and not _has_frozen(weights):
        out = infer_experts(x, *weights, top_k_index, top_k_weights, activation)
    if out is None:
        down_proj: Any = self.down_proj  # its shape counts all experts; `weights` has those of this process
        here = dispatcher.dispatch(x, plan_topk(top_k_index, down_proj.shape[0]), top_k_weights)
        out = dispatcher.combine(_moe(here, weights, activation), here)
    if out.dtype != hidden_states.dtype:
        out = out.to(hidden_states.dtype)
    # No view: an in-place change of a view would drop FSDP2's hook on the module's output. No backward reads ``out``.
    if hidden_states.ndim != 2:
        out = torch.ops.aten._unsafe_view.default(out, hidden_states.shape)
    return out


# torch.compile does not trace these experts: a compiled model breaks its graph around the call.
_uncompiled = torch.compiler.disable(experts_forward, reason="experts in 4 bit, or with adapters, are not compiled")


def _moe(here: Dispatched, weights: _Weights, activation: Activation) -> Tensor:
    """The experts' output (M, d) for the M dispatched tokens, with autograd."""
    settings: dict[str, Any] = {
        "activation": activation.name,
        "gate_up": activation.gate_up,
        "b1": weights.b1,
        "b2": weights.b2,
        "activation_limit": activation.limit,
        "activation_alpha": activation.alpha,
    }
    w1, w2 = weights.w1, weights.w2
    if _has_frozen(weights):
        w1, w2 = (each if isinstance(each, FrozenWeight) else FrozenWeight(each, each.dtype) for each in (w1, w2))
        adapters = adapters_of(w1, w2)
        return moe_lora(here.x, w1.stored, w2.stored, here.plan, here.scores, adapters, **settings)
    return moe(here.x, w1, w2, here.plan, here.scores, **settings)


def _has_frozen(weights: _Weights) -> bool:
    """Whether a weight is in 4 bit, or has adapters that are kept apart from it."""
    return isinstance(weights.w1, FrozenWeight) or isinstance(weights.w2, FrozenWeight)


def check_experts(module: nn.Module) -> None:
    """ValueError unless tilemoe computes ``module``, one of `experts_modules`, whose weights are not sharded yet."""
    implementation = module.config._experts_implementation  # type: ignore[union-attr]
    if implementation != NAME:
        raise ValueError(
            f"{name_of(module)} computes its experts by {implementation!r}, which does not dispatch tokens; call "
            "tilemoe.integrations.transformers.use(model) first"
        )
    if getattr(module, "_is_expert_parallel", False):
        raise ValueError(
            f"{name_of(module)} is divided by transformers' own expert parallelism; load it without distributed_config"
        )
    _stored_weights(module)
    activation_of(module)


# Attribute of an experts module that is sharded over processes: its dispatcher.
_DISPATCHER = "_tilemoe_dispatcher"
_NOTHING_MOVES = LocalDispatcher()


def set_dispatcher(module: nn.Module, dispatcher: Dispatcher) -> None:
    """Set the dispatcher of an experts module; its ``local_weight`` returns this process' shard of each parameter."""
    vars(module)[_DISPATCHER] = dispatcher


def _dispatcher_of(module: nn.Module) -> Dispatcher:
    return vars(module).get(_DISPATCHER, _NOTHING_MOVES)


class _Weights(NamedTuple):
    """The experts' weights and biases; in tilemoe's shapes w1 (E, w, d), w2 (E, d, n), b1 (E, w), b2 (E, d)."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None


def _weights(module: nn.Module) -> _Weights:
    """The module's weights in tilemoe's shapes, as views. ValueError: as for `_stored_weights`."""
    w1, w2, b1, b2 = _stored_weights(module)
    if getattr(module, "is_transposed", False):
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    return _Weights(w1, w2, b1, b2)


def _stored_weights(module: nn.Module) -> _Weights:
    """The module's weights as stored, perhaps transposed; outside a forward FSDP and ZeRO-3 may empty them.

    ValueError: tilemoe does not take such weights, or does not compute what the module does with them.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise refusal(module, "each expert's output is normalised before the scores, which tilemoe does not compute")
    up = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    has_bias = getattr(module, "has_bias", False)
    w1, w2 = _weight(module, up), _weight(module, "down_proj")
    b1 = _weight(module, f"{up}_bias") if has_bias else None
    b2 = _weight(module, "down_proj_bias") if has_bias else None
    return _Weights(w1, w2, b1, b2)


def _weight(module: nn.Module, name: str) -> Tensor:
    try:  # no default: to see if it is needed, torch.compile would read PEFT's property, which caches a tensor
        tensor = getattr(module, name)
    except AttributeError:
        tensor = None
    if not isinstance(tensor, Tensor):
        raise refusal(module, f"it has no weight {name}; quantised weights are not computed")
    tensor = _dispatcher_of(module).local_weight(tensor)
    if tensor.requires_grad and UNCOMPILED in vars(module):
        raise ValueError(
            f"{name_of(module)} is in 4 bit, and its {name} cannot be trained; leave it out of PEFT's modules_to_save "
            f"and target_parameters, or call {name}.requires_grad_(False)"
        )
    if isinstance(tensor, FrozenWeight):
        return with_adapters(module, name, tensor)
    # Wrapper subclasses are refused, too: some quantised tensors report bf16 as their dtype.
    if tensor.dtype not in FLOAT_DTYPES or bool(is_traceable_wrapper_subclass(tensor)):
        why = "quantised weights are not computed"
        if hasattr(tensor, "device_mesh"):  # a DTensor: FSDP gathers it for the forward, tensor parallelism does not
            why = "set 'tilemoe' before FSDP shards the model; weights that tensor parallelism divides are not computed"
        raise refusal(module, f"{name} is a {type(tensor).__name__} of {tensor.dtype}; {why}")
    return with_adapters(module, name, tensor)


def _refuse_quantised(self: nn.Module, *_: Any, **__: Any) -> Tensor:
    """tilemoe's entry in transformers' table of FP8 experts: raises a ValueError that says why they are refused."""
    raise refusal(self, "its weights are quantised to FP8")


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of each module whose forward transformers chooses by ``experts_implementation``."""
    for name, module in model.named_modules():
        if is_experts_module(module):
            yield name, module


def is_experts_module(module: nn.Module) -> bool:
    """Whether it is one of `experts_modules`, by the attributes that transformers' decorator sets."""
    return vars(module).keys() >= {"has_gate", "is_transposed", "config"}  # not getattr, which wrappers pass on


# The parts of a module's name under which PEFT, torch.compile, checkpoint_wrapper and FSDP keep the wrapped module.
_WRAPPED = (
    r"(^|\.)(base_layer|original_module|modules_to_save\.[^.]+|_orig_mod|_checkpoint_wrapped_module|"
    r"_fsdp_wrapped_module)(?=\.|$)"
)


def layer_of(name: str) -> str:
    """The module's name without its wrappers; the copies that PEFT makes of one module share it."""
    return re.sub(_WRAPPED, "", name).removeprefix(".")


def outermost(name: str) -> str:
    """The name of the outermost wrapper of this module, which the layer calls; without wrappers the module's own."""
    return re.sub(rf"({_WRAPPED})+$", "", name)


def hf_models(model: nn.Module) -> list[Any]:
    """The outermost transformers models in ``model``: ``model`` itself, or those that it wraps."""
    found: list[Any] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and hasattr(type(module), "set_experts_implementation"):
            found.append(module)
            inside.update(module.modules())
    return found


class _Unread:
    """Stands for `TilemoeConfig`, without which transformers draws the experts of a folder in 4 bit at random."""

    @staticmethod
    def from_dict(*_: Any, **__: Any) -> None:
        raise ValueError("the folder has experts in 4 bit; call tilemoe.integrations.quantized.register_quantizer()")


def _tables() -> list[tuple[Any, Any]]:
    """transformers' tables and tilemoe's entries: experts' implementations, those for FP8 weights, and quantizers.

    All models share each table. Entries are set and deleted as in a dict; they lie over transformers' own entries,
    which stay as they are.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"transformers is not installed; {_UPGRADE}") from error
    found = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    if found < OLDEST:
        raise ValueError(
            f"transformers {transformers.__version__} does not let others compute a model's experts; {_UPGRADE}"
        )
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS as FP8
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as EXPERTS
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as CONFIGS

    return [(EXPERTS, experts_forward), (FP8, _refuse_quantised), (CONFIGS, _Unread)]
