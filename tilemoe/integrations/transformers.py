"""The experts of Hugging Face's models, computed by tilemoe: ``register()``, then ``experts_implementation="tilemoe"``.

T tokens · d hidden_size · n intermediate_size · E experts of this rank · K experts per token · w = 2n gated, n ungated

transformers looks up the function that computes a model's experts in a table; `register` adds an entry to it, and to
the table of FP8 experts one that refuses. Nothing else of transformers changes, except that each experts module keeps
as an attribute which activation was found in it. The router stays the model's own. Weights are read where they lie,
(E, w, d) or transposed, without a copy. The model's own gate function is evaluated to find out which activation it is;
a model that tilemoe does not compute exactly is refused.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from tilemoe.activations import REGISTRY
from tilemoe.dispatch.base import Dispatcher, LocalDispatcher
from tilemoe.integrations.gates import recognised_activation
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.ops.inference import Activation
from tilemoe.ops.inference import experts as infer_experts
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.tracing import autocast_dtype, constant_when_traced

NAME = "tilemoe"
OLDEST = (5, 7)  # transformers; before it the names of experts' implementations were a fixed list
_UPGRADE = "pip install -U 'transformers>=5.7'"

_INSTEAD = "use experts_implementation='grouped_mm' or 'eager' for it"
# Where models keep the bound and the slope of a clamped gate.
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")


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
    tables = _tables()
    tables[0][NAME] = experts_forward
    for table in tables[1:]:
        table[NAME] = _refuse_quantised


def unregister() -> None:
    """Undo `register`; transformers is as it was. A model still set to "tilemoe" then raises its unknown-name error.

    ValueError: transformers is missing or too old, as for `register`.

    Examples:
        >>> from tilemoe.integrations import transformers as tilemoe_transformers
        >>> tilemoe_transformers.register()
        >>> tilemoe_transformers.unregister()
    """
    for table in _tables():
        if NAME in table:
            del table[NAME]


def use(model: nn.Module) -> int:
    """Switch the experts of an existing ``model`` to tilemoe; returns the number of its MoE layers.

    ``model`` may be wrapped (DistributedDataParallel, torch.compile, PEFT); copies of a layer's experts, as PEFT's
    ``modules_to_save`` makes, are switched with it. Calls `register`, too. Everything is checked before the model is
    changed: what the first forward would refuse is refused here. To go back:
    ``model.set_experts_implementation("grouped_mm")``, which reaches no copies that PEFT made.

    Raises:
        ValueError: as `register`, or this is no model, or a part of one, or it has no experts that transformers
            dispatches, or tilemoe does not compute them; the message names the model and what works instead.

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
    modules = dict(experts_modules(model))
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no experts whose implementation transformers lets one choose (a dense model, "
            "quantised experts, or a class without that interface in this release); it works as it is, without tilemoe"
        )
    owners = _owners(model)
    owned = {module for owner in owners for module in owner.modules()}
    for module in modules.values():
        _weights(module)
        _activation_of(module)
        if module not in owned and module.config._experts_implementation != NAME:  # type: ignore[union-attr]
            raise ValueError(
                f"{_name(module)} did not take up the implementation: pass the whole model, not a part of it, or load "
                f"it with experts_implementation={NAME!r}"
            )
    for owner in owners:
        owner.set_experts_implementation(NAME)  # type: ignore[operator]  # a method of PreTrainedModel
    for module in modules.values():
        config: Any = module.config
        if config._experts_implementation != NAME:  # a copy of experts has one of its own, which the model cannot reach
            config._experts_implementation = NAME
    return len({layer_of(name) for name in modules})


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of an experts module's forward: (..., d) like hidden_states.

    hidden_states (..., d); top_k_index (T, K) of all experts under `tilemoe.expert_parallel`, else of this rank's, one
    past the last of them for a pair that is another rank's, which is skipped; top_k_weights (T, K). Computed in the
    weights' dtype, to which hidden_states is cast, as transformers' grouped_mm does; under autocast in autocast's.

    Raises:
        ValueError: tilemoe does not compute these experts.
    """
    weights = _weights(self)
    activation = _activation_of(self)
    x = hidden_states if hidden_states.ndim == 2 else hidden_states.reshape(-1, hidden_states.shape[-1])
    if x.dtype != weights.w1.dtype and autocast_dtype(x.device.type) is None:
        x = x.to(weights.w1.dtype)
    dispatcher, out = _dispatcher_of(self), None
    if isinstance(dispatcher, LocalDispatcher):
        out = infer_experts(x, *weights, top_k_index, top_k_weights, activation)
    if out is None:
        down_proj: Any = self.down_proj  # of all experts, where `weights` are those of this process
        here = dispatcher.dispatch(x, plan_topk(top_k_index, down_proj.shape[0]), top_k_weights)
        with here.saving():
            out = moe(
                here.x,
                weights.w1,
                weights.w2,
                here.plan,
                here.scores,
                activation=activation.name,
                gate_up=activation.gate_up,
                b1=weights.b1,
                b2=weights.b2,
                activation_limit=activation.limit,
                activation_alpha=activation.alpha,
            )
        out = dispatcher.combine(out, here)
    if out.dtype != hidden_states.dtype:
        out = out.to(hidden_states.dtype)
    # No view: an in-place change of a view would drop FSDP2's hook on the module's output. No backward reads ``out``.
    if hidden_states.ndim != 2:
        out = torch.ops.aten._unsafe_view.default(out, hidden_states.shape)
    return out


def check_experts(module: nn.Module) -> None:
    """ValueError unless tilemoe computes these experts, one of `experts_modules`, and nothing divides them."""
    implementation = module.config._experts_implementation  # type: ignore[union-attr]
    if implementation != NAME:
        raise ValueError(
            f"{_name(module)} computes its experts by {implementation!r}, which does not dispatch tokens; call "
            "tilemoe.integrations.transformers.use(model) first"
        )
    if getattr(module, "_is_expert_parallel", False):
        raise ValueError(
            f"{_name(module)} is divided by transformers' own expert parallelism; load it without distributed_config"
        )
    _weights(module)
    _activation_of(module)


# Attribute of an experts module that is sharded over processes: its dispatcher.
_DISPATCHER = "_tilemoe_dispatcher"
_NOTHING_MOVES = LocalDispatcher()


def set_dispatcher(module: nn.Module, dispatcher: Dispatcher) -> None:
    """Set the dispatcher of an experts module; its ``local_weight`` gives this process' shard of each parameter."""
    vars(module)[_DISPATCHER] = dispatcher


def _dispatcher_of(module: nn.Module) -> Dispatcher:
    return vars(module).get(_DISPATCHER, _NOTHING_MOVES)


class _Weights(NamedTuple):
    """Views in tilemoe's shapes: w1 (E, w, d), w2 (E, d, n), b1 (E, w), b2 (E, d)."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None


def _weights(module: nn.Module) -> _Weights:
    """The module's weights; ValueError if they, or what is done with them, are not what tilemoe computes."""
    if getattr(module, "has_post_expert_norm", False):
        raise _refusal(module, "each expert's output is normalised before the scores, which tilemoe does not compute")
    up = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    has_bias = getattr(module, "has_bias", False)
    w1, w2 = _weight(module, up), _weight(module, "down_proj")
    b1 = _weight(module, f"{up}_bias") if has_bias else None
    b2 = _weight(module, "down_proj_bias") if has_bias else None
    # Before a forward, FSDP and ZeRO-3 may keep shards without these dimensions.
    if getattr(module, "is_transposed", False) and w1.ndim == w2.ndim == 3:
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    return _Weights(w1, w2, b1, b2)


def _weight(module: nn.Module, name: str) -> Tensor:
    try:  # no default: to see whether one is needed, torch.compile reads PEFT's property, which caches a real tensor
        tensor = getattr(module, name)
    except AttributeError:
        tensor = None
    if not isinstance(tensor, Tensor):
        raise _refusal(module, f"it has no weight {name}; quantised weights are not computed")
    tensor = _dispatcher_of(module).local_weight(tensor)
    # A tensor that stands for others, too: some quantised ones say bf16 of themselves.
    if tensor.dtype not in FLOAT_DTYPES or bool(is_traceable_wrapper_subclass(tensor)):
        why = "quantised weights are not computed"
        if hasattr(tensor, "device_mesh"):  # a DTensor: FSDP gathers it for the forward, tensor parallelism does not
            why = "set 'tilemoe' before FSDP shards the model; weights that tensor parallelism divides are not computed"
        raise _refusal(module, f"{name} is a {type(tensor).__name__} of {tensor.dtype}; {why}")
    return tensor


# Attribute of a module whose activation is known: what it was found from, then what was found,
# (act_fn, its gate's function, limit, alpha, act_fn's own numbers, *activation).
_TRIED = "_tilemoe_activation"


def _activation_of(module: nn.Module) -> Activation:
    """The module's activation. It is tried out once, and again after something that it depends on was replaced.

    If the module was tried before, a trace reads the result: PyTorch guards its values, so that one graph serves all
    layers. Else the graph is for this module alone, and PyTorch keeps few graphs of one function (8 by default).
    """
    function = getattr(module, "act_fn", None)
    limit, alpha = _limit_and_alpha(module)
    tried: tuple[Any, ...] | None = vars(module).get(_TRIED)
    if (
        tried is not None
        and (tried[0] is function and tried[1] is _gate(module) and tried[2:4] == (limit, alpha))
        and all(getattr(function, name, None) == value for name, value in tried[4])
    ):
        return Activation(*tried[5:])
    if torch.compiler.is_compiling():
        return _activation_at(id(module))
    activation = _try(module, limit, alpha)
    # Plain values and the module's own attributes: unpickling them imports no tilemoe.
    vars(module)[_TRIED] = (function, _gate(module), limit, alpha, _settings(function), *activation)
    return activation


def _gate(module: nn.Module) -> Any:
    """The function that the module, or else its class, has for its gate; None if ungated."""
    own = vars(module)
    return own["_apply_gate"] if "_apply_gate" in own else getattr(type(module), "_apply_gate", None)


def _settings(function: Any) -> tuple[tuple[str, Any], ...]:
    """An activation's own numbers by name, such as a slope. `training` is left out: `_try` looks at both modes."""
    if not isinstance(function, nn.Module):
        return ()
    kinds = (bool, int, float, str)
    return tuple((k, v) for k, v in vars(function).items() if isinstance(v, kinds) and k[0] != "_" and k != "training")


@constant_when_traced
def _activation_at(address: int) -> Activation:
    """The activation of the module at this address: PyTorch 2.11 passes no modules to what it runs while it traces.

    The module is alive, and PyTorch guards the address, so that the graph is for this module alone.
    """
    module = ctypes.cast(address, ctypes.py_object).value
    return _try(module, *_limit_and_alpha(module))


def _try(module: nn.Module, limit: float | None, alpha: float | None) -> Activation:
    is_gated = getattr(module, "has_gate", True)
    function: Any = module._apply_gate if is_gated else module.act_fn
    inner = getattr(module, "act_fn", None)
    if isinstance(inner, nn.Module) and any(True for _ in inner.parameters()):
        raise _refusal(module, f"its activation {type(inner).__name__} has parameters, which tilemoe would not train")
    if isinstance(inner, nn.Module) and any(True for _ in inner.buffers()):
        raise _refusal(module, f"its activation {type(inner).__name__} has buffers, which could change unseen")

    reason = "its gate is none of tilemoe's activations" if is_gated else "its activation is none of tilemoe's"
    try:
        with _disable_current_modes():  # some have no values to try, and torch.export's puts them into its graph
            spec = recognised_activation(_in_both_modes(module, function), is_gated=is_gated, limit=limit, alpha=alpha)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise _refusal(module, f"{reason}: trying it out failed with {error!r}") from error
    if spec is None:
        raise _refusal(module, reason)
    entry = REGISTRY[spec.name]
    return Activation(spec.name, spec.gate_up, spec.limit if entry.limit else None, spec.alpha if entry.alpha else None)


def _in_both_modes(module: nn.Module, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function`` of the module, computed in training and in evaluation. ValueError if the two differ."""
    inner = getattr(module, "act_fn", None)
    parts = [module, *(inner.modules() if isinstance(inner, nn.Module) else ())]

    def compute(h: Tensor) -> Tensor:
        modes, given = [part.training for part in parts], []
        try:
            for mode in (True, False):
                for part in parts:
                    part.training = mode
                given.append(function(h.clone()))
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode
        if not torch.equal(*given):
            raise ValueError("it computes something else in training than in evaluation")
        return given[0]

    return compute


def _limit_and_alpha(module: nn.Module) -> tuple[float | None, float | None]:
    """The limit and the alpha of a clamped gate, None where it has none."""
    return _number(module, _LIMITS), _number(module, _ALPHAS)


def _number(module: nn.Module, names: tuple[str, ...]) -> float | None:
    """The first of these attributes that is a positive number, which is what a limit or an alpha is."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"):
            return float(value)
    return None


def _refuse_quantised(self: nn.Module, *_: Any, **__: Any) -> Tensor:
    """Stands in the table of transformers' FP8 experts, so that asking for tilemoe there says why not."""
    raise _refusal(self, "its weights are quantised to FP8")


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose forward transformers chooses by ``experts_implementation``; its decorator marks them so."""
    for name, module in model.named_modules():
        if vars(module).keys() >= {"has_gate", "is_transposed", "config"}:  # its own: wrappers pass on what they wrap
            yield name, module


# Where PEFT, torch.compile, checkpoint_wrapper and FSDP keep what they wrap, as a part of a module's name.
_WRAPPED = (
    r"(^|\.)(base_layer|original_module|modules_to_save\.[^.]+|_orig_mod|_checkpoint_wrapped_module|"
    r"_fsdp_wrapped_module)(?=\.|$)"
)


def layer_of(name: str) -> str:
    """What a module of this name is called without wrappers: the copies that PEFT makes of one share it."""
    return re.sub(_WRAPPED, "", name).removeprefix(".")


def outermost(name: str) -> str:
    """The name of the wrapper around this module that its layer calls, or its own."""
    return re.sub(rf"({_WRAPPED})+$", "", name)


def _owners(model: nn.Module) -> list[nn.Module]:
    """The outermost modules whose experts transformers lets one choose: ``model``, or those that it wraps."""
    owners: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and hasattr(module, "set_experts_implementation"):
            owners.append(module)
            inside.update(module.modules())
    return owners


def _refusal(module: nn.Module, reason: str) -> ValueError:
    return ValueError(f"experts_implementation='tilemoe' cannot compute {_name(module)}: {reason}; {_INSTEAD}")


def _name(module: nn.Module) -> str:
    kind = getattr(getattr(module, "config", None), "model_type", "a model of unknown type")
    return f"{type(module).__name__} ({kind})"


def _tables() -> list[Any]:
    """transformers' tables of experts' implementations: of ordinary weights, and of FP8 ones.

    Each is one object that every model looks in. Its own entries, set and deleted as in a dict, lie over the ones that
    transformers has defined and leave those as they are.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"transformers is not installed; {_UPGRADE}") from error
    _require_version(transformers)
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return [ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS]


def _require_version(transformers: ModuleType) -> None:
    found = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    if found < OLDEST:
        raise ValueError(
            f"transformers {transformers.__version__} does not let others compute a model's experts; {_UPGRADE}"
        )
