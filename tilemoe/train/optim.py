"""The optimiser and its parameter groups; its state as named tensors; the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tilemoe.layers.experts import Experts
from tilemoe.layers.lora import LoRAExperts
from tilemoe.layers.mlp import MLP
from tilemoe.runtime.random import local_of, shared_as
from tilemoe.train.config import OptimConfig
from tilemoe.train.muon import MuonWithAdamW, adamw_group, muon_group

# Biases, although b1 and b2 are two-dimensional: they are stacked by expert.
_BIAS_NAMES = frozenset({"bias", "b1", "b2"})
_ADAMW_MODULES = frozenset({"head", "router", "shared_gate"})
# An 8-bit moment of a parameter of at least 4,096 elements, a multiple of 256: codes (parameter's shape) uint8, scale
# (elements / 256) fp32; `value = table[code] * scale` of its block (arXiv 2110.02861). The table is torchao's.
PARTS, BLOCK, _LEAST = ("codes", "scale"), 256, 4096
_STORED = ({""}, {".codes", ".scale"})  # the parts of a tensor of its state: in fp32 or in 8 bits
_KEYS_OF = MappingProxyType(  # of a parameter's state
    {"adamw": frozenset({"exp_avg", "exp_avg_sq", "step"}), "muon": frozenset({"momentum_buffer"})}
)


def decays(name: str, parameter: Tensor, embeddings: set[int]) -> bool:
    """Whether weight decay applies: to weight matrices (experts, router, attention, head) only.

    Not to norms and biases, whose magnitude has a meaning, and not to the embedding table: a token's row would shrink
    in every step without that token. A head tied to the table counts as the table.
    """
    return parameter.ndim >= 2 and name.rpartition(".")[2] not in _BIAS_NAMES and id(parameter) not in embeddings


def is_for_muon(name: str, parameter: Tensor, embeddings: set[int]) -> bool:
    """Whether Muon updates ``parameter`` if ``optim.name`` is muon: it does for weight matrices in the blocks.

    AdamW updates the rest: the embedding table and the head, whose rows are tokens; the router and the shared expert's
    gate, whose rows are independent scores; norms and biases.
    """
    return decays(name, parameter, embeddings) and _ADAMW_MODULES.isdisjoint(name.split("."))


def gate_up_orders(model: nn.Module) -> dict[int, str]:
    """The order of rows ("concatenated", "interleaved") of each parameter that holds gate and up, by its id."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    mlps = [module for module in model.modules() if isinstance(module, MLP)]
    layouts = [(each.w1, each.cfg) for each in experts] + [(each.w1, each.spec) for each in mlps]
    layouts += [(each.up_b, each.cfg) for each in experts if isinstance(each, LoRAExperts)]
    return {id(weight): layout.gate_up for weight, layout in layouts if layout.is_gated}


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser that ``config.name`` names. AdamW, also in 8 bits: group 0 has weight decay, group 1 has none.
    Muon: group 0 has its matrices; the two AdamW groups follow, with all other parameters.

    ``fused`` is the fastest form on a CPU too (docs/lab/cpu.md).
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: list[Tensor] = []
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if config.name == "muon" and is_for_muon(name, parameter, embeddings):
            matrices.append(parameter)
        else:
            (decayed if decays(name, parameter, embeddings) else others).append(parameter)
    of_adamw = [adamw_group(decayed, config, config.weight_decay), adamw_group(others, config, 0.0)]
    if config.name == "muon":
        orders = gate_up_orders(model)
        return MuonWithAdamW([muon_group(matrices, config, [orders.get(id(p)) for p in matrices]), *of_adamw])
    return torch.optim.AdamW(of_adamw) if config.name == "adamw" else _make_adamw8bit(of_adamw)


def require_torchao() -> None:
    """ValueError unless torchao is installed."""
    if find_spec("torchao") is None:
        raise ValueError("optim.name 'adamw8bit' needs torchao: pip install 'tilemoe[fp8]', or use --optim.name adamw")


def _make_adamw8bit(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW with 8-bit moments, with torchao's arithmetic (extra ``fp8``). ValueError: torchao is not installed."""
    require_torchao()
    from torchao.optim import AdamW8bit

    class _AdamW8bit(AdamW8bit):
        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            local = local_of(p)
            return shared_as(p, _zeros8bit(local, signed)) if in_blocks(p) else torch.zeros_like(p)

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            """Replaces torchao's step, which compiles its update for each shape; each takes 5 s of a core."""
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)

        def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state |= {
                    "exp_avg": self._new_buffer(parameter, True),
                    "exp_avg_sq": self._new_buffer(parameter, False),
                }
            state["step"] += 1
            shared: list[Any] = [parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
            local: list[Any] = [local_of(each) for each in shared]
            weight, gradient, *moments = local
            if not weight.numel():
                return
            if hasattr(moments[0], "codes"):
                shape: tuple[int, ...] = (-1, BLOCK)
                parts = [[_rows(each.codes, shape), _rows(each.scale, (-1,)), each.qmap] for each in moments]
            else:
                shape = (-1,)
                parts = [[_rows(each, shape)] for each in moments]
            settings = (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
            tensors = (_rows(weight, shape), _rows(gradient.contiguous(), shape), state["step"], parts)
            update_on(weight.device.type)(*tensors, *settings)

    return _AdamW8bit([group for group in groups if group["params"]])


def _rows(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of ``shape`` whose number of rows is dynamic, so that torch.compile does not recompile for it."""
    view = tensor.view(shape)
    torch._dynamo.maybe_mark_dynamic(view, 0)
    return view


@cache
def update_on(device_type: str) -> Callable[..., None]:
    """torchao's in-place AdamW for one weight. Each moment: [codes (blocks, `BLOCK`), scales, table] or [values]."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

    def update(weight: Tensor, gradient: Tensor, step: Tensor, moments: list[list[Tensor]], *settings: Any) -> None:
        values = [dequant_with_qmap(of[0], of[2], of[1]) if len(of) > 1 else of[0] for of in moments]
        single_param_adam(weight, gradient, step, *values, None, *settings, True, False)
        for of, value in zip(moments, values, strict=True):
            if len(of) > 1:
                scaled, scale = scale_tensor(value, BLOCK)
                of[0].copy_(quantize_8bit_with_qmap(scaled, of[2]))
                of[1].copy_(scale)

    return update if device_type == "cpu" else torch.compile(update, fullgraph=True)  # a CPU may lack a compiler


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set ``lr`` in every group, times ``optim.muon.lr_scale`` for Muon's; in place if the group has a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr * group.get("lr_scale", 1.0)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by parameter name: ``<parameter>.exp_avg``, ``.exp_avg_sq``, ``.step``; for Muon's matrices
    ``.momentum_buffer``; for an 8-bit moment ``.exp_avg.codes`` and ``.exp_avg.scale``.
    """
    return {
        f"{name}.{key}{part}": tensor
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        for part, tensor in _parts_of(value).items()
    }


def in_blocks(parameter: Tensor) -> bool:
    """Whether its moments are stored in 8 bits: it has at least 4,096 elements, and each process has whole blocks."""
    if not isinstance(parameter, DTensor):
        return parameter.numel() >= _LEAST and parameter.numel() % BLOCK == 0
    sizes = parameter.device_mesh.shape
    shards = [(at, size) for at, size in zip(parameter.placements, sizes, strict=True) if not at.is_replicate()]
    processes = math.prod(size for _, size in shards)
    # `dim` is that of `Shard`, or of the strided shard that FSDP2 makes beside another sharding.
    is_even = parameter.shape[0] % processes == 0 and all(getattr(at, "dim", None) == 0 for at, _ in shards)
    return parameter.numel() >= _LEAST and is_even and parameter.numel() % (processes * BLOCK) == 0


def blocks_like(parameter: Tensor) -> Tensor:
    """Empty memory for the scales of a moment that is `in_blocks`; sharded like the parameter, in its row order."""
    local = local_of(parameter)
    return shared_as(parameter, torch.empty(local.numel() // BLOCK, device=local.device), parameter.numel() // BLOCK)


def _zeros8bit(like: Tensor, is_signed: bool) -> Any:
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit.zeros(like.shape, is_signed, BLOCK, like.device, torch.float32)


def _parts_of(moment: Tensor) -> dict[str, Tensor]:
    """The plain tensors of a moment by name suffix: ".codes" and ".scale" in 8 bits, else "" for the moment itself."""
    local: Any = local_of(moment)
    if not hasattr(local, "codes"):
        return {"": moment}
    scale = shared_as(moment, local.scale, moment.numel() // BLOCK)
    return {".codes": shared_as(moment, local.codes), ".scale": scale}


def _moment_of(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The inverse of `_parts_of`; ``name``: "exp_avg", whose codes are signed, or "exp_avg_sq"."""
    if "" in parts:
        return parts[""]
    codes = local_of(parts[".codes"])
    made = _zeros8bit(codes, name == "exp_avg")
    made.codes, made.scale = codes, local_of(parts[".scale"])
    return shared_as(parts[".codes"], made)


def split_name(full_name: str) -> tuple[str, str, str]:
    """(parameter, key, part) of a name from `optimizer_tensors`; the part is "" or begins with a dot."""
    whole, _, last = full_name.rpartition(".")
    part = f".{last}" if last in PARTS else ""
    name, _, key = (whole if part else full_name).rpartition(".")
    return name, key, part


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of ``optimizer_tensors``; hyper-parameters keep the values that the optimiser was made with.

    tensors: of parameters of the model. ValueError: a parameter's state is another optimiser's, or incomplete.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    has_parts = not isinstance(optimizer, (torch.optim.AdamW, MuonWithAdamW))
    parts: dict[str, dict[str, dict[str, Tensor]]] = {}
    for full_name, tensor in tensors.items():
        name, key, part = split_name(full_name)
        key, part = (key, part) if has_parts else (key + part, "")
        parts.setdefault(name, {}).setdefault(key, {})[part] = tensor
    groups = [(group["params"], _KEYS_OF[group["algorithm"]]) for group in optimizer.param_groups]
    order = [(name_of[id(parameter)], keys) for parameters, keys in groups for parameter in parameters]
    for name, keys in order:
        given = parts.get(name, {})
        if given and (keys != set(given) or any(set(each) not in _STORED for each in given.values())):
            held = sorted(key + part for key, each in given.items() for part in each)
            raise ValueError(f"the optimiser's state of {name} has {held} instead of {sorted(keys)}")
    state = {
        i: {key: _moment_of(key, each) for key, each in parts[name].items()}
        for i, (name, _) in enumerate(order)
        if name in parts
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of optimiser step ``step`` (from 0) of ``steps``; a resumed run needs no state for it.

    Linear warm-up over ``warmup_steps`` (the first step already learns), then ``config.schedule``:

    * ``cosine``: half a cosine from 1 down to ``min_lr_ratio``, reached at the last step;
    * ``wsd``: constant, then over the last ``decay_fraction`` of all steps ``1 - sqrt(progress)`` down to
      ``min_lr_ratio`` (warm-up, stable, decay; Hägele et al. 2024, arXiv 2405.18392);
    * ``constant``: stays at the peak.
    """
    assert 0 <= step < steps, (step, steps)
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    factor = 1.0  # from 1 (peak) to 0 (min_lr_ratio)
    span = steps - 1 - config.warmup_steps
    if config.schedule == "cosine" and span > 0:
        factor = 0.5 * (1.0 + math.cos(math.pi * (step - config.warmup_steps) / span))
    elif config.schedule == "wsd":
        decay_steps = min(round(config.decay_fraction * steps), steps - config.warmup_steps)
        done = step - (steps - decay_steps) + 1
        factor = 1.0 - math.sqrt(done / decay_steps) if done > 0 else 1.0
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)
