"""Low-rank adapters (LoRA, arXiv 2106.09685) for a model's experts and attention: adding, training and merging them.

T tokens · d hidden_size · n intermediate_size · E experts · r rank · w = 2n gated, n ungated
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tilemoe.checks import require_choice, require_finite, require_int, require_type, shown
from tilemoe.dispatch.base import LocalDispatcher
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.kernels.experts.formats.packed import PackedWeight, Weight
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.layers.attention import Attention
from tilemoe.layers.experts import Experts
from tilemoe.layers.lora_linear import LoRALinear, add_product, reset_pair
from tilemoe.layers.moe import MoE
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.random import local_part, shared_as
from tilemoe.runtime.tensors import require_factory

EXPERTS, ATTENTION = "experts", "attention"  # the choices of ``modules``
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_WEIGHTS = ("w1", "w2")
_DENSE = "dense"
_BYTE = torch.float8_e4m3fn  # a floating-point dtype of one byte
_OF_TRANSFORMERS = (
    "on a model of transformers use PEFT: get_peft_model(model, LoraConfig(target_modules=['q_proj', 'v_proj'], "
    "target_parameters=['experts.gate_up_proj', 'experts.down_proj']))"
)


class LoRAExperts(Experts):
    """The `Experts` ``base`` with a low-rank adapter per expert and matrix. It takes over and freezes base's weights.

    up_a (E, r, d), up_b (E, w, r) · down_a (E, r, n), down_b (E, d, r). Expert e's matrices become
    ``w1_e + alpha/r up_b_e up_a_e`` and ``w2_e + alpha/r down_b_e down_a_e``. up_b and down_b start at zero, so that
    the initial output is the base's. ``dtype``: the adapters' dtype; None: the base's. They are cast to the input's
    dtype to compute. `add_lora` makes this module and checks the arguments.
    """

    adapters = ("up_a", "up_b", "down_a", "down_b")

    def __init__(self, base: Experts, rank: int, alpha: float, *, dtype: torch.dtype | None) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(base), _parameters=dict(base._parameters))
        self.requires_grad_(False)
        self.rank, self.alpha = rank, alpha
        cfg = base.cfg
        num, d, n, width = cfg.num_experts, cfg.hidden_size, cfg.intermediate_size, cfg.up_rows

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=base.w1.device, dtype=dtype or base.w1.dtype))

        self.up_a, self.up_b = empty(num, rank, d), empty(num, width, rank)
        self.down_a, self.down_b = empty(num, rank, n), empty(num, d, rank)
        self.reset_adapters()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def reset_adapters(self, generator: torch.Generator | None = None) -> None:
        """up_a and down_a uniform with variance 1 / (3 inputs), as in torch.nn.Linear; up_b and down_b zero."""
        reset_pair(self.up_a, self.up_b, generator)
        reset_pair(self.down_a, self.down_b, generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        super().reset_parameters(generator)
        self.reset_adapters(generator)

    def forward(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Tensor:
        """As `Experts`: x (T, d), scores (T, K) or (P,) as the plan needs -> (T, d)."""
        local = self.dispatcher.local_weight  # before the dispatch, as in `Experts`
        w1, w2 = self._frozen("w1", local), self._frozen("w2", local)
        low_rank = local(self.up_a), local(self.up_b), local(self.down_a), local(self.down_b)
        b1, b2 = (None if bias is None else local(bias) for bias in (self.b1, self.b2))
        here = self.dispatcher.dispatch(x, plan, scores)
        o = moe_lora(
            here.x,
            w1,
            w2,
            here.plan,
            here.scores,
            Adapters(*low_rank, self.scale),
            activation=self.cfg.activation,
            activation_limit=self.cfg.activation_limit,
            activation_alpha=self.cfg.activation_alpha,
            gate_up=self.cfg.gate_up,
            b1=b1 if b1 is None else b1.to(here.x.dtype),
            b2=b2 if b2 is None else b2.to(here.x.dtype),
            kernels=self.kernels,
        )
        return self.dispatcher.combine(o, here)

    def _frozen(self, name: str, local: Callable[[Tensor], Tensor]) -> Weight:
        """The frozen w1 or w2, its parameters passed through ``local``."""
        return local(getattr(self, name))

    def merged(self) -> Experts:
        """Plain frozen `Experts` with the adapters merged into the weights, one expert at a time: summed in fp32 or
        better, rounded once to the weights' dtype. Dense weights are changed in place.
        """
        plain = Experts(self.cfg, device="meta", kernels=self.kernels)
        plain.w1 = self._merged("w1", self.up_b, self.up_a)
        plain.w2 = self._merged("w2", self.down_b, self.down_a)
        plain.b1, plain.b2, plain.dispatcher = self.b1, self.b2, self.dispatcher
        plain.save, plain.compute = self.save, self.compute
        return plain

    def _merged(self, name: str, b: Tensor, a: Tensor) -> nn.Parameter:
        weight: nn.Parameter = getattr(self, name)
        for expert in range(weight.shape[0]):
            add_product(weight[expert], b[expert], a[expert], self.scale)
        return weight

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank {self.rank}, scale {self.scale:g}"


class PackedLoRAExperts(LoRAExperts):
    """`LoRAExperts` whose w1 and w2 are stored in 4 bits, as ``storage`` of `tilemoe.kernels.experts.table` says.

    w1 and w2 are None; in their place each tensor of a packed weight is a frozen parameter: w1_codes (E, w, d / 2),
    w2_codes (E, d, n / 2) uint8; for NF4 w1_absmax (E, w, d / 64), w2_absmax (E, d, n / 64), fp32, or with double
    quantisation uint8, plus w1_nested, w2_nested fp32; for MXFP4 w1_exponents (E, w, d / 32), w2_exponents (E, d,
    n / 32) uint8. fp32 parameters stay so through ``to(dtype)``. `merged` returns dense w1 and w2 in the base's dtype.
    After `as_floats`, uint8 parameters are views of a dtype that FSDP2 shards; in state dicts they stay uint8.
    """

    def __init__(self, base: Experts, rank: int, alpha: float, *, dtype: torch.dtype | None, storage: str) -> None:
        super().__init__(base, rank, alpha, dtype=dtype)
        self.storage, self.merged_dtype = storage, base.w1.dtype
        for name in _WEIGHTS:
            weight: Tensor = getattr(base, name)
            # On meta, quantise one expert and expand the result: quantising 128 would take 0.4 s even there.
            some = weight[:1] if weight.is_meta else weight
            for part, tensor in STORAGES[storage].quantize(some).tensors.items():
                whole = tensor.expand(len(weight), *tensor.shape[1:]).contiguous()
                setattr(self, f"{name}_{part}", nn.Parameter(whole, requires_grad=False))
            setattr(self, name, None)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        home = self.get_parameter("w1_codes").device
        plain = Experts(self.cfg, device="meta", dtype=self.merged_dtype).to_empty(device=home)
        plain.reset_parameters(generator)
        for name in _WEIGHTS if home.type != "meta" else ():
            self.pack(name, getattr(plain, name))
        for bias in (self.b1, self.b2):
            if bias is not None:
                nn.init.zeros_(bias)
        self.reset_adapters(generator)

    @torch.no_grad()
    def pack(self, name: str, weight: Tensor) -> None:
        """Quantise the dense ``weight``, from any device, on the module's device, and store it as w1 or w2: this
        process' shard of it if the module is sharded.
        """
        for part, tensor in STORAGES[self.storage].quantize(weight.to(self.up_a.device)).tensors.items():
            own, starts = local_part(self.get_parameter(f"{name}_{part}"))
            where = tuple(slice(start, start + size) for start, size in zip(starts, own.shape, strict=True))
            own.view(tensor.dtype).copy_(tensor[where])

    def as_floats(self) -> None:
        """Make the uint8 parameters views of `_BYTE`; in state dicts they stay uint8. Call it before FSDP2 shards them:
        in PyTorch 2.11 it accepts only floating-point parameters.
        """
        for names in self.packed_names().values():
            for name in names:
                if (stored := self.get_parameter(name)).dtype == torch.uint8:
                    setattr(self, name, nn.Parameter(stored.view(_BYTE), requires_grad=False))
        self.register_state_dict_post_hook(_give_bytes)
        self.register_load_state_dict_pre_hook(_take_bytes)

    def packed_names(self) -> dict[str, tuple[str, ...]]:
        """The names of the parameters that store w1 and w2."""
        return {name: tuple(f"{name}_{part}" for part in STORAGES[self.storage].parts) for name in _WEIGHTS}

    def _frozen(self, name: str, local: Callable[[Tensor], Tensor]) -> PackedWeight:
        weight, _, parts = STORAGES[self.storage]
        return weight(*[_viewed(local(getattr(self, f"{name}_{part}")), _BYTE, torch.uint8) for part in parts])

    @torch.no_grad()
    def _merged(self, name: str, b: Tensor, a: Tensor) -> nn.Parameter:
        frozen = self._frozen(name, lambda t: t)
        dense = b.new_empty(frozen.shape, dtype=self.merged_dtype)
        for expert in range(frozen.shape[0]):
            matrix = frozen.expert(expert, torch.float32)
            add_product(matrix, b[expert], a[expert], self.scale)
            dense[expert] = matrix
        return nn.Parameter(dense, requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLoRAExperts:
        """As in `torch.nn.Module`, but packed parameters keep their dtype."""
        scales = {name: self.get_parameter(name).detach() for names in self.packed_names().values() for name in names}
        super()._apply(fn, recurse)
        for name, scale in scales.items():
            if (found := getattr(self, name)).dtype != scale.dtype:
                found.data = scale.to(found.device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, storage {self.storage}"


def _viewed(stored: Tensor, given: torch.dtype, wanted: torch.dtype) -> Tensor:
    """A view of ``stored`` in the dtype ``wanted`` if its dtype is ``given``; otherwise ``stored``."""
    return shared_as(stored, local_part(stored)[0].view(wanted)) if stored.dtype == given else stored


def _give_bytes(experts: PackedLoRAExperts, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for names in experts.packed_names().values():
        for name in names:
            state[prefix + name] = _viewed(state[prefix + name], _BYTE, torch.uint8)


def _take_bytes(experts: PackedLoRAExperts, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for names in experts.packed_names().values():
        for name in filter(state.__contains__, (prefix + name for name in names)):
            state[name] = _viewed(state[name], torch.uint8, _BYTE)


def _check_storage(base: Experts, storage: str) -> None:
    weight = STORAGES[storage].weight
    why, of = weight.why_not(base.cfg.hidden_size, base.cfg.intermediate_size), weight.name.upper()
    if why is None and base.w1.dtype == torch.float64:
        why = f"experts in fp64 cannot be kept in {of}, whose values are fp32; cast the model, or leave {of} out"
    if why is not None:
        raise ValueError(why)


def _check(base: Experts, rank: int) -> None:
    if rank > base.cfg.hidden_size:
        raise ValueError(f"rank must be at most hidden_size ({base.cfg.hidden_size}), got {rank}")
    if not isinstance(base.dispatcher, LocalDispatcher):
        raise ValueError(
            "experts under expert parallelism cannot have adapters; add them before the model is parallelized"
        )
    if base.recompute is not None:
        raise ValueError("experts with recompute cannot have adapters; build the model with recompute=None")
    if base.save != "full":
        raise ValueError(f"experts with save {base.save!r} cannot have adapters; build the model with save='full'")
    for name, plain in (("precision", "bf16"), ("invariance", "none")):
        if (own := getattr(base.cfg, name)) != plain:
            raise ValueError(f"experts with {name} {own!r} cannot have adapters; build the model with {name}={plain!r}")


def add_lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    *,
    attention_rank: int | None = None,
    dtype: torch.dtype | None = None,
    modules: Collection[str] = (EXPERTS,),
    storage: str = _DENSE,
) -> list[nn.Parameter]:
    """Freeze ``model`` and add trainable low-rank adapters to the modules that ``modules`` names; returns the adapters.

    "experts": the routed experts of every `MoE`. "attention": the four projections of every `Attention`. The weights
    keep their names. Add adapters before `tilemoe.parallelize`; the model may be on any device, meta too.

    ``rank`` is r; ``attention_rank``, if given, is attention's. All adapters are scaled by alpha / rank. ``dtype``: the
    adapters'; None: the weights'. ``storage`` of the frozen experts: "dense", in their own dtype, or in 4 bits
    (`PackedLoRAExperts`): "nf4", 4.5 bits per value, "nf4_double", with double quantisation, 4.13, or "mxfp4", 4.25.

    Raises:
        ValueError: the model has none of the named modules or has adapters already; ``rank``, ``alpha`` or another
            argument is invalid; or experts are divided by expert parallelism, have ``recompute``, FP8 ``save``, FP8
            ``precision`` or ``invariance``, or cannot be stored in ``storage``.

    Source: arXiv 2106.09685. For w1 (E, 2n, d) and rank r, A is (E, r, d) and B is (E, 2n, r).

    Examples:
        >>> from tilemoe.layers.lora import add_lora
        >>> layer = tilemoe.MoE(tilemoe.MoEConfig(16, 8, num_experts=4, num_experts_per_tok=2))
        >>> adapters = add_lora(layer, rank=2, alpha=4.0)
        >>> [tuple(adapter.shape) for adapter in adapters]
        [(4, 2, 16), (4, 16, 2), (4, 2, 8), (4, 16, 2)]
    """
    require_type("model", model, nn.Module)
    if not isinstance(modules, (list, tuple, set, frozenset)) or not modules or set(modules) - {EXPERTS, ATTENTION}:
        raise ValueError(f"modules must be a list of 'experts', 'attention' or both, got {shown(modules)}")
    layers = [module for module in model.modules() if isinstance(module, MoE)] if EXPERTS in modules else []
    attentions = [m for m in model.modules() if isinstance(m, Attention)] if ATTENTION in modules else []
    for name, kind, found in ((EXPERTS, "tilemoe.MoE", layers), (ATTENTION, "Attention of tilemoe", attentions)):
        if name in modules and not found:
            raise ValueError(f"{type(model).__name__} has no {kind} to put adapters on; {_OF_TRANSFORMERS}")
    if has_lora(model):
        raise ValueError("the model has adapters already; call merge_lora first")
    require_int("rank", rank, 1)
    if attention_rank is not None:
        require_int("attention_rank", attention_rank, 1)
        if not attentions:
            raise ValueError("attention_rank is for attention; add 'attention' to modules, or leave attention_rank out")
    require_factory(None, dtype, FLOAT_DTYPES)
    require_finite("alpha", alpha, positive=True)
    require_choice("storage", storage, (_DENSE, *STORAGES))
    if storage != _DENSE and not layers:
        raise ValueError(f"storage={storage!r} is for experts; add 'experts' to modules, or leave storage out")
    for layer in layers:  # before anything changes
        _check(layer.experts, rank)
        if storage != _DENSE:
            _check_storage(layer.experts, storage)
    model.requires_grad_(False)
    adapted: list[LoRAExperts | LoRALinear] = []
    for layer in layers:
        if storage == _DENSE:
            layer.experts = LoRAExperts(layer.experts, rank, alpha, dtype=dtype)
        else:
            layer.experts = PackedLoRAExperts(layer.experts, rank, alpha, dtype=dtype, storage=storage)
        adapted.append(layer.experts)
    of_attention = rank if attention_rank is None else attention_rank
    attention_alpha = alpha if of_attention == rank else alpha * of_attention / rank
    for attention in attentions:
        for name in _PROJECTIONS:
            linear = getattr(attention, name)
            adapted.append(LoRALinear(linear, of_attention, attention_alpha, dtype=dtype))
            setattr(attention, name, adapted[-1])
    return [module.get_parameter(name) for module in adapted for name in module.adapters]


def merge_lora(model: nn.Module) -> None:
    """Merge every adapter into its weight and remove it, in place: the model has its modules from before `add_lora`.

    Parameters stay frozen; ``model.requires_grad_(True)`` makes them trainable.

    ValueError: the model is sharded over processes; then it is unchanged.

    Examples:
        >>> from tilemoe.layers.lora import add_lora, merge_lora
        >>> layer = tilemoe.MoE(tilemoe.MoEConfig(16, 8, num_experts=4, num_experts_per_tok=2))
        >>> adapters = add_lora(layer, rank=2, alpha=4.0)
        >>> merge_lora(layer)
        >>> sorted(layer.experts.state_dict())
        ['w1', 'w2']
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):  # indexing it would give copies
        raise ValueError(
            "adapters of a sharded model cannot be merged; save a checkpoint, then merge them with tilemoe export"
        )
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, (LoRAExperts, LoRALinear)):
                setattr(module, name, child.merged())


def adapted_modules(model: nn.Module) -> dict[str, LoRAExperts | LoRALinear]:
    """The modules of ``model`` that have adapters, by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, (LoRAExperts, LoRALinear))}


def packed_weights(model: nn.Module) -> dict[str, tuple[PackedLoRAExperts, tuple[str, ...]]]:
    """{a 4-bit weight's name in a dense model: (its module, the names of the parameters that store it)}."""
    return {
        f"{prefix}.{name}": (module, tuple(f"{prefix}.{each}" for each in names))
        for prefix, module in adapted_modules(model).items()
        if isinstance(module, PackedLoRAExperts)
        for name, names in module.packed_names().items()
    }


def has_lora(model: nn.Module) -> bool:
    """Whether any module of ``model`` has adapters."""
    return bool(adapted_modules(model))


def adapter_names(model: nn.Module) -> set[str]:
    """The names of the adapters, as in ``model.named_parameters()``."""
    return {f"{prefix}.{name}" for prefix, module in adapted_modules(model).items() for name in module.adapters}
