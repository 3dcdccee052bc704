"""The public API with right arguments, one entry a way to call it, from which wrong calls are made.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

import tilemoe
from tilemoe.config import ModelConfig, MoEConfig, ParallelConfig, RouterConfig, TokenRounding
from tilemoe.integrations.peft import load_adapter, save_adapter
from tilemoe.kernels.experts import registry
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.lm.documents import Documents
from tilemoe.layers.attention import KVCache
from tilemoe.layers.experts import Experts
from tilemoe.layers.lora import add_lora
from tilemoe.layers.moe import MoE
from tilemoe.layers.router import Router
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.generate import generate
from tilemoe.models.huggingface import save_hf
from tilemoe.models.loss import chunked_cross_entropy
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.plan import PLAN_ARRAYS
from tilemoe.routing.balance import update_selection_bias

T, D, N, E, K, V = 6, 8, 4, 4, 2, 20
LAYER = MoEConfig(D, N, E, K)
BIASED = MoEConfig(D, N, E, K, router=RouterConfig(selection_bias=True, aux_loss_coef=0.1))
ROUNDED = MoEConfig(D, N, E, K, rounding=TokenRounding("stochastic", 16))
MODEL = ModelConfig(V, D, 2, 2, 1, 4, 16, moe=LAYER)
UNSHARDED = ParallelConfig(param_dtype=None, reduce_dtype=None)


@dataclass(frozen=True)
class Call:
    """``function(**arguments())`` is right; ``called``: what messages call its arguments beside their names."""

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    called: tuple[str, ...] = ()


class Mine(TorchBackend):
    name = "mine"


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(*shape: int, below: int = E) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) % below


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def layer(cfg: MoEConfig = LAYER) -> MoE:
    torch.manual_seed(0)
    return MoE(cfg)


def model() -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(MODEL)


@cache
def saved_model() -> TemporaryDirectory[str]:
    folder = TemporaryDirectory()
    save_hf(model(), folder.name)
    return folder


def adapted_model() -> DecoderLM:
    adapted = model()
    add_lora(adapted, 2, 4.0)
    return adapted


@cache
def saved_adapter() -> TemporaryDirectory[str]:
    folder = TemporaryDirectory()
    save_adapter(adapted_model(), folder.name)
    return folder


def weights() -> dict[str, Any]:
    return {
        "x": numbers(T, D),
        "w1": numbers(E, 2 * N, D),
        "w2": numbers(E, D, N),
        "plan": tilemoe.plan_topk(ids(T, K), E),
        "scores": numbers(T, K),
        "activation": "swiglu_oai",
        "gate_up": "interleaved",
        "b1": numbers(E, 2 * N),
        "b2": numbers(E, D),
        "kernels": "torch",
        "activation_limit": 3.0,
        "activation_alpha": 1.5,
    }


def adapters() -> Adapters:
    return Adapters(numbers(E, 2, D), numbers(E, 2 * N, 2), numbers(E, 2, N), numbers(E, D, 2), 0.5)


def routed(**more: Any) -> dict[str, Any]:
    arguments = {"logits": numbers(T, E), "cfg": LAYER, "training": True, "token_mask": torch.arange(T) != 2}
    return {**arguments, "group": None, **more}


def of_layer() -> dict[str, Any]:
    mask = (torch.arange(T) != 2).view(2, 3)
    return {"x": numbers(2, 3, D), "token_mask": mask, "generator": generator(), "expert_ids": ids(2, 3, K)}


def of_decoder() -> dict[str, Any]:
    return {
        "input_ids": ids(2, 4, below=V),
        "labels": ids(2, 4, below=V),
        "documents": Documents.of(torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])),
        "expert_ids": ids(2, 2, 4, K),
        "record": tilemoe.RoutingRecord(),
    }


def of_generate() -> dict[str, Any]:
    numbered = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 3, "num_ids": 19}
    record = tilemoe.RoutingRecord()
    return {"model": model(), "input_ids": ids(2, 4, below=V), **numbered, "generator": generator(), "record": record}


def of_module() -> dict[str, Any]:
    return {"device": "cpu", "dtype": torch.float32, "recompute": None, "kernels": "torch"}


def of_adapters() -> dict[str, Any]:
    return {"rank": 2, "alpha": 4.0, "dtype": torch.float32}


def of_cache() -> dict[str, Any]:
    return {"input_ids": ids(2, 4, below=V), "cache": KVCache(2, 8), "record": tilemoe.RoutingRecord()}


def of_parallelize() -> dict[str, Any]:
    meshes = tilemoe.build_meshes(UNSHARDED, MODEL, "cpu")
    return {"model": model(), "meshes": meshes, "device": "cpu", "generator": None, "compile_backend": None}


def of_plan() -> dict[str, Any]:
    plan = tilemoe.plan_pairs(ids(9, below=T), ids(9), T, E)
    arrays = dict(zip(PLAN_ARRAYS, plan.arrays, strict=True))
    return {**arrays, "num_experts": E, "num_tokens": T, "error_bits": plan.error_bits}


def of_routing() -> dict[str, Any]:
    return dict(vars(tilemoe.route(**routed(cfg=BIASED, selection_bias=numbers(E)))))


def of_expert_parallel() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("expert",))
    policies = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}
    more = {"gradient_divide_factor": 2.0, "reshard_after_forward": True, **policies, "exchange": "collective"}
    return {"module": layer(), "mesh": mesh, "dim": "expert", **more}


def register(**given: Any) -> None:
    """And forget it again."""
    before = dict(registry._BACKENDS)
    try:
        tilemoe.register_backend(**given)
    finally:
        registry._BACKENDS.clear()
        registry._BACKENDS.update(before)


def updated_bias(**given: Any) -> Tensor | None:
    moe = layer(BIASED)
    moe.update_selection_bias(**given)
    return moe.selection_bias


def updated_biases(biases: Any, **given: Any) -> Any:
    update_selection_bias(biases, **given)
    return biases


def recorded(**given: Any) -> Tensor:
    record = tilemoe.RoutingRecord()
    record.add(**given)
    return record.expert_ids(1)


def recorded_ids(**given: Any) -> Tensor:
    record = tilemoe.RoutingRecord()
    record.add(0, ids(T, K))
    return record.expert_ids(**given)


def settings(cls: type, **given: Any) -> Call:
    """Of a dataclass of settings: every field, at its default unless it is given."""
    return Call(cls, lambda: {**{f.name: f.default for f in fields(cls) if f.default is not MISSING}, **given})


SIZES = {"hidden_size": D, "intermediate_size": N, "num_experts": E, "num_experts_per_tok": K}
MODEL_SIZES = {"vocab_size": V, "hidden_size": D, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
SETTINGS = {
    "RouterConfig": settings(RouterConfig),
    "TokenRounding": settings(TokenRounding),
    "ParallelConfig": settings(ParallelConfig),
    "MoEConfig": settings(MoEConfig, **SIZES, router=RouterConfig()),
    "ModelConfig": settings(ModelConfig, **MODEL_SIZES, max_seq_len=16, moe=LAYER),
    "moe_preset": Call(tilemoe.moe_preset, lambda: {"name": "olmoe-1b-7b"}, ("preset",)),
    "model_preset": Call(tilemoe.model_preset, lambda: {"name": "qwen3-30b-a3b"}, ("preset",)),
    "RouterConfig.preset": Call(RouterConfig.preset, lambda: {"name": "olmoe"}, ("preset",)),
    "select_kernels": Call(tilemoe.select_kernels, lambda: {"device": "cpu", "dtype": torch.float32, "cfg": LAYER}),
    "register_backend": Call(register, lambda: {"name": "mine", "cls": Mine}),
}
OPERATORS = {
    "moe": Call(
        tilemoe.moe,
        lambda: {**weights(), "recompute": "up_proj", "precision": "bf16", "accumulate": False, "save": "full"},
    ),
    "moe_lora": Call(moe_lora, lambda: {**weights(), "adapters": adapters()}),
    "route": Call(tilemoe.route, lambda: routed(generator=generator())),
    "route_biased": Call(tilemoe.route, lambda: routed(cfg=BIASED, selection_bias=numbers(E))),
    "route_replayed": Call(tilemoe.route, lambda: routed(expert_ids=ids(T, K))),
    "route_rounded": Call(tilemoe.route, lambda: {"logits": numbers(40, E), "cfg": ROUNDED, "generator": generator()}),
    "plan_topk": Call(tilemoe.plan_topk, lambda: {"expert_ids": ids(T, K), "num_experts": E}, ("expert ids",)),
    "plan_pairs": Call(
        tilemoe.plan_pairs, lambda: {"token": ids(9, below=T), "expert": ids(9), "num_tokens": T, "num_experts": E}
    ),
    "update_selection_bias": Call(
        updated_biases,
        lambda: {"biases": [numbers(E)], "pairs_per_expert": ids(1, E), "rate": 0.1, "group": None},
    ),
    "RoutingPlan": Call(tilemoe.RoutingPlan, of_plan),
    "Routing": Call(tilemoe.Routing, of_routing),
    "RoutingRecord": Call(tilemoe.RoutingRecord, dict),
    "RoutingRecord.add": Call(recorded, lambda: {"layer": 0, "expert_ids": ids(T, K)}),
    "RoutingRecord.expert_ids": Call(recorded_ids, lambda: {"batch_size": 2}),
    "chunked_cross_entropy": Call(
        chunked_cross_entropy,
        lambda: {"hidden": numbers(T, D), "weight": numbers(V, D), "labels": ids(T), "max_chunk_logits": 40},
    ),
    "Documents.of": Call(Documents.of, lambda: {"positions": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])}),
}
MODULES = {
    "MoE": Call(MoE, lambda: {"cfg": LAYER, **of_module(), "router": Router(LAYER), "group": None}),
    "MoE.forward": Call(lambda **given: layer()(**given), of_layer, ("logits",)),
    "MoE.update_selection_bias": Call(updated_bias, lambda: {"pairs_per_expert": ids(E), "rate": 0.1}),
    "MoE.reset_parameters": Call(lambda **given: layer().reset_parameters(**given), lambda: {"generator": generator()}),
    "accumulate_grads": Call(tilemoe.accumulate_grads, lambda: {"module": layer()}),
    "Experts": Call(Experts, lambda: {"cfg": LAYER, **of_module()}),
    "Experts.forward": Call(
        lambda **given: layer().experts(**given),
        lambda: {"x": numbers(T, D), "plan": tilemoe.plan_topk(ids(T, K), E), "scores": numbers(T, K)},
    ),
    "Router": Call(Router, lambda: {"cfg": LAYER, "device": "cpu", "dtype": torch.float32}),
    "Router.forward": Call(lambda **given: layer().router(**given), lambda: {"x": numbers(T, D)}),
    "add_lora": Call(
        add_lora,
        lambda: {"model": model(), **of_adapters(), "modules": ("experts", "attention"), "storage": "dense"},
        ("MoE",),
    ),
    "DecoderLM": Call(DecoderLM, lambda: {"config": MODEL, **of_module()}),
    "DecoderLM.forward": Call(lambda **given: model()(**given), of_decoder),
    "DecoderLM.forward_cached": Call(lambda **given: model()(**given), of_cache),
    "DecoderLM.next_logits": Call(lambda **given: model().next_logits(**given), of_cache),
    "DecoderLM.set_checkpointing": Call(
        lambda **given: model().set_checkpointing(**given), lambda: {"mode": "block"}, ("checkpointing",)
    ),
    "generate": Call(generate, of_generate),
    "load_hf": Call(tilemoe.load_hf, lambda: {"folder": saved_model().name, "device": "cpu", "dtype": torch.float32}),
    "save_adapter": Call(
        save_adapter, lambda: {"model": adapted_model(), "folder": saved_adapter().name, "base": "mine"}
    ),
    "load_adapter": Call(load_adapter, lambda: {"model": model(), "folder": saved_adapter().name}),
    "build_meshes": Call(
        tilemoe.build_meshes, lambda: {"config": ParallelConfig(), "model": MODEL, "device_type": "cpu"}
    ),
    "parallelize": Call(tilemoe.parallelize, of_parallelize),
    "expert_parallel": Call(tilemoe.expert_parallel, of_expert_parallel),
}
CALLS: Mapping[str, Call] = MappingProxyType({**SETTINGS, **OPERATORS, **MODULES})
