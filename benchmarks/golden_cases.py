"""The matrix of `golden`'s cases, plain and hostile.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token

A case's inputs follow from its name. What the interpreter computes too is small; what is larger is in `golden_large`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import golden_runs as runs
import torch
from golden_inputs import PAIRS, ROUTINGS
from golden_runs import GATED, UNGATED, Experts, Found, Layer, Loss, Model, Plan, Rounded, Route, Shape, Where

import tilemoe
from tilemoe import MoEConfig, RouterConfig, TokenRounding

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
NAMES = {FP64: "fp64", FP32: "fp32", FP16: "fp16", BF16: "bf16"}
SMALL = Shape(17, 24, 16, 4, 2)
MODES: tuple[Any, ...] = ("nearest", "stochastic", "nearest_score", "balance", "up", "down")
PRESETS = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss", "granite_moe")
LOSSES: dict[str, Any] = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01}


@dataclass(frozen=True)
class Case:
    """``by_descriptor``: of the interpreter alone, see `golden_seams`."""

    name: str
    dtype: torch.dtype
    run: Callable[[Where], Found]
    by_descriptor: bool = False


def make(kind: str, what: str, spec: Any, dtype: torch.dtype, **more: Any) -> Case:
    """The case of a spec of `golden_runs`, which the function of the kind's name runs."""
    function = {
        Experts: runs.experts,
        Route: runs.route,
        Layer: runs.layer,
        Loss: runs.loss,
        Model: runs.model,
        Plan: runs.plan,
        Rounded: runs.rounded,
    }[type(spec)]
    return Case(f"{kind}/{what}/{NAMES[dtype]}", dtype, partial(function, spec), **more)


def layouts(
    kind: str, shape: Shape, dtype: torch.dtype, activations: tuple[str, ...] = (*GATED, *UNGATED)
) -> Iterator[Case]:
    """Every activation with every layout of gate and up, weights in either order, with and without biases."""
    for activation in activations:
        for gate_up in ("concatenated", "interleaved") if activation in GATED else ("concatenated",):
            for transposed in ((), ("w1", "w2")):
                for bias in (False, True):
                    spec = Experts(shape, dtype, "random", activation, gate_up, transposed, bias)
                    parts = [activation, gate_up, *(["turned"] if transposed else []), *(["bias"] if bias else [])]
                    yield make(kind, " ".join(parts), spec, dtype)  # "turned": the inputs are drawn from the name


def of_layouts(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    for dtype in dtypes:
        some = ("swiglu", "swiglu_oai", "geglu", "gelu") if dtype == FP16 else (*GATED, *UNGATED)
        yield from layouts("layout", SMALL, dtype, some)
        for weight in ("w1", "w2"):
            spec = Experts(SMALL, dtype, transposed=(weight,))
            yield make("layout", f"{weight} turned", spec, dtype)
        for strides in (
            "rows of x",
            "columns of x",
            "scores",
            "one score",
            "elements of w1",
            "experts inside rows of w1",
        ):
            yield make("layout", strides, Experts(SMALL, dtype, bias=True, strides=strides), dtype)


def of_routings(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    """Hostile routings, differentiated and not, and numbers of tokens."""
    for dtype in dtypes:
        for routing in (*ROUTINGS, *PAIRS):
            spec = Experts(SMALL, dtype, routing, bias=True)
            yield make("routing", routing, spec, dtype)
            other = replace(spec, activation="gelu", transposed=("w1", "w2"), bias=False, wanted=())
            yield make("routing", f"{routing}, inference", other, dtype)
        for what, shape in COUNTS.items():
            yield make("tokens", what, Experts(shape, dtype, bias=True), dtype)
            yield make("tokens", f"{what}, inference", Experts(shape, dtype, bias=True, wanted=()), dtype)


COUNTS = {
    "0": Shape(0, 24, 16, 5, 2),
    "1": Shape(1, 24, 16, 5, 2),
    "3": Shape(3, 24, 16, 24, 8),
    "16": Shape(16, 32, 32, 1, 1),
    "17, K = E": Shape(17, 24, 16, 3, 3),
    "33 of one expert": Shape(33, 24, 16, 1, 1),
    "40, K = 1": Shape(40, 24, 16, 3, 1),
    "40 of many experts": Shape(40, 8, 8, 70, 1),
    "257": Shape(257, 16, 8, 3, 1),
}


def of_descriptors(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    """By descriptor, in the interpreter: a layout of each kind, and the routings that leave tiles ragged."""
    for case in of_layouts(dtypes):
        if any(what in case.name for what in ("/swiglu ", "/swiglu_oai interleaved", "/gelu ", "strides", "of w1")):
            yield replace(case, name=f"descriptor {case.name}", by_descriptor=True)
    for case in of_routings(dtypes[:1]):
        if any(what in case.name for what in ("ragged", "sentinels", "few", "empty", "40, K")):
            yield replace(case, name=f"descriptor {case.name}", by_descriptor=True)


def of_values(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    """What is not finite, too large or too small."""
    spoilt = [
        f"{value} in {name}" for value in ("nan", "inf") for name in ("x", "w1", "w2", "b1", "b2", "scores", "do")
    ]
    spoilt += ["-inf in x", "large in x", "large in do", "small in x", "small in scores", "zero in x", "zero in scores"]
    for dtype in dtypes:
        for what in spoilt:
            yield make("values", what, Experts(SMALL, dtype, bias=True, spoilt=what), dtype)
        for what in ("nan in x", "inf in w1", "large in x"):
            yield make("values", f"{what}, inference", Experts(SMALL, dtype, wanted=(), spoilt=what), dtype)
            other = Experts(SMALL, dtype, "sentinels", "swiglu_oai", "interleaved", spoilt=what)
            yield make("values", f"{what}, sentinels, swiglu_oai", other, dtype)
            yield make("values", f"{what}, relu2", Experts(SMALL, dtype, activation="relu2", spoilt=what), dtype)


def of_options(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    """Frozen tensors, recomputation, limits, and the scores' dtype."""
    wanted = (("x",), ("w1",), ("w2",), ("scores",), ("b1",), ("b2",), ("x", "scores"), ("w1", "w2"), ("b1", "b2"))
    options: dict[str, dict[str, Any]] = {
        "limit": {"activation_limit": 0.5},
        "limit and alpha": {"activation_limit": 0.5, "activation_alpha": 0.9},
    }
    for dtype in dtypes:
        for names in wanted:
            for recompute in (None, "up_proj"):
                spec = Experts(SMALL, dtype, bias=True, wanted=names, options={"recompute": recompute})
                yield make("options", f"{' and '.join(names)} wanted{', recomputed' if recompute else ''}", spec, dtype)
        for activation in ("swiglu", "swiglu_oai", "gelu"):
            spec = Experts(SMALL, dtype, activation=activation, bias=True, options={"recompute": "up_proj"})
            yield make("options", f"{activation}, recomputed", spec, dtype)
        for what, given in options.items():
            for gate_up in ("concatenated", "interleaved"):
                spec = Experts(SMALL, dtype, "random", "swiglu_oai", gate_up, spoilt="large in b1", bias=True)
                yield make("options", f"{what}, {gate_up}", replace(spec, options=given), dtype)
        for scores in (BF16, FP16, FP64):
            yield make("options", f"scores of {NAMES[scores]}", Experts(SMALL, dtype, scores_dtype=scores), dtype)
            spec = Experts(SMALL, dtype, scores_dtype=scores, wanted=())
            yield make("options", f"scores of {NAMES[scores]}, inference", spec, dtype)
    yield make("options", "widths that are odd", Experts(Shape(19, 13, 7, 5, 2), FP32), FP32)
    yield make("options", "autocast to fp16", Experts(SMALL, FP32, bias=True, autocast=FP16), FP32)


def of_routers() -> Iterator[Case]:
    for preset in PRESETS:
        router = RouterConfig.preset(preset)
        yield from _router(preset, router)
        yield from _router(f"{preset} with losses", replace(router, **LOSSES), masks=(True,))
    plain = RouterConfig(**LOSSES)
    for experts, k in ((1, 1), (5, 1), (5, 5), (70, 3)):
        yield from _router(f"softmax, {k} of {experts}", plain, experts, k)
    yield from _router("sigmoid", RouterConfig(score="sigmoid", normalize=False, **LOSSES), 6, 2)
    yield from _router("scaled", RouterConfig(normalize=False, scale=2.5, **LOSSES), 6, 2)
    cfg = MoEConfig(8, 8, 6, 2, router=plain)
    for tokens in (0, 1, 3, 257):
        yield make("router", f"{tokens} tokens", Route(cfg, tokens, mask=tokens == 257), FP32)
    for logits in ("nan", "inf"):
        yield make("router", f"{logits} in the logits", Route(cfg, 19, logits=logits), FP32)
    for dtype in (FP64, FP16, BF16):
        yield make("router", "softmax, logits", Route(cfg, 19, dtype), dtype)


def _router(
    what: str, router: RouterConfig, experts: int = 16, k: int = 4, masks: tuple[bool, ...] = (False, True)
) -> Iterator[Case]:
    cfg = MoEConfig(8, 8, experts, k, router=router)
    for mask in masks:
        masked = ", token mask" if mask else ""
        yield make("router", f"{what}{masked}", Route(cfg, 37, mask=mask), FP32)
        for logits in ("ties", "masked"):
            yield make("router", f"{what}, {logits}{masked}", Route(cfg, 37, logits=logits, mask=mask), FP32)
    yield make("router", f"{what}, evaluation", Route(cfg, 37, training=False), FP32)


def of_rounding() -> Iterator[Case]:
    routers = {"softmax": RouterConfig(**LOSSES), "sigmoid": RouterConfig.preset("glm4_moe"), "late": LATE}
    for mode in MODES:
        for name, router in routers.items():
            cfg = MoEConfig(8, 8, 5, 2, router=router, rounding=TokenRounding(mode, 16))
            for tokens in (10, 16, 70) if name == "softmax" else (70,):
                yield make("rounding", f"{mode}, {name}, {tokens} tokens", Route(cfg, tokens), FP32)
            yield make("rounding", f"{mode}, {name}, token mask", Route(cfg, 70, mask=True), FP32)
            yield make("rounding", f"{mode}, {name}, ties", Route(cfg, 70, logits="ties"), FP32)
        spec = Rounded(Experts(Shape(50, 24, 16, 3, 1), FP32), mode, 16)
        yield make("rounding", f"{mode}, experts", spec, FP32)


LATE = RouterConfig.preset("gpt_oss")


def of_plans() -> Iterator[Case]:
    for routing in (*ROUTINGS, *PAIRS):
        yield make("plan", routing, Plan(routing, SMALL), FP32)
        yield make("plan", f"{routing}, inference", Plan(routing, SMALL, inference=True), FP32)
    for what, shape in COUNTS.items():
        yield make("plan", f"{what} tokens", Plan("random", shape), FP32)
        yield make("plan", f"{what} tokens, inference", Plan("random", shape, inference=True), FP32)


def layer_configs(d: int, n: int, experts: int, k: int, tile: int) -> dict[str, MoEConfig]:
    plain = MoEConfig(d, n, experts, k, router=RouterConfig(**LOSSES))
    shared = replace(plain, shared_intermediate_size=n, shared_gate=True)
    late = replace(plain, router=replace(LATE, **LOSSES), activation="swiglu_oai", expert_bias=True)
    sigmoid = RouterConfig(score="sigmoid", scale=2.5, selection_bias=True, **LOSSES)
    return {
        "plain": plain,
        "shared, gated": shared,
        "shared, ungated activation": replace(shared, activation="relu2", shared_gate=False),
        "gpt-oss": replace(late, gate_up="interleaved"),
        "sigmoid, bias": replace(plain, router=sigmoid, activation="geglu"),
        "without losses": replace(plain, router=RouterConfig()),
        **{f"rounded {mode}": replace(plain, rounding=TokenRounding(mode, tile)) for mode in MODES},
    }


def of_layers(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    for dtype in dtypes:
        configs = layer_configs(24, 16, 4, 2, 16)
        for what, cfg in configs.items():
            base = Layer(cfg, (2, 13), dtype)
            yield make("layer", what, base, dtype)
            yield make("layer", f"{what}, token mask", replace(base, mask=True), dtype)
            if cfg.rounding is None or cfg.rounding.mode == "nearest":
                yield make("layer", f"{what}, inference", replace(base, inference=True, training=False), dtype)
        base = Layer(configs["shared, gated"], (2, 13), dtype)
        variants = {
            "recomputed": replace(base, recompute="up_proj"),
            "experts frozen": replace(base, frozen=("experts",)),
            "router frozen": replace(base, frozen=("router",)),
            "all frozen but the input": replace(base, frozen=("",)),
            "input without gradient": replace(base, freeze_x=True),
            "nan in x": replace(base, spoilt="nan in x"),
            "inf in x": replace(base, spoilt="inf in x"),
            "no tokens": replace(base, tokens=(0,)),
            "one token": replace(base, tokens=(1,)),
            "one token, inference": replace(base, tokens=(1,), inference=True, training=False),
            "autocast to fp16": replace(base, autocast=FP16),
        }
        for what, spec in variants.items():
            yield make("layer", what, spec, dtype)


def of_lora(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    for dtype in dtypes:
        configs = layer_configs(24, 16, 4, 2, 16)
        for what in ("plain", "gpt-oss", "shared, ungated activation", "rounded nearest"):
            base = Layer(configs[what], (20,), dtype, lora=(8, 16.0))
            yield make("lora", what, base, dtype)
            yield make("lora", f"{what}, merged", replace(base, merged=True), dtype)
            yield make("lora", f"{what}, inference", replace(base, inference=True, training=False), dtype)
        base = Layer(configs["plain"], (20,), dtype, lora=(8, 4.0))
        yield make("lora", "adapters of fp32", replace(base, lora_dtype=FP32), dtype)
        yield make("lora", "input without gradient", replace(base, freeze_x=True), dtype)
        yield make("lora", "rank that is odd", replace(base, lora=(3, 1.0)), dtype)


def of_losses(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    for dtype in dtypes:
        base = Loss(50, 16, 37, dtype)
        variants = {
            "all labels": replace(base, labels="all"),
            "some labels": base,
            "no labels": replace(base, labels="none"),
            "no tokens": replace(base, tokens=0),
            "chunks": replace(base, chunk=7 * 37),
            "hidden wanted": replace(base, wanted=("hidden",)),
            "weight wanted": replace(base, wanted=("weight",), chunk=7 * 37),
            "inference": replace(base, wanted=()),
            "nan in hidden": replace(base, spoilt="nan in hidden"),
            "inf in weight": replace(base, spoilt="inf in weight"),
            "large in hidden": replace(base, spoilt="large in hidden"),
            "many classes": replace(base, tokens=5, classes=9001),
        }
        for what, spec in variants.items():
            yield make("loss", what, spec, dtype)


def model_config(d: int, n: int, experts: int, k: int, **given: Any) -> tilemoe.ModelConfig:
    moe = given.pop("moe", MoEConfig(d, n, experts, k, router=RouterConfig(selection_bias=True, **LOSSES)))
    sizes = {"vocab_size": 61, "hidden_size": d, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": d // 4}
    return tilemoe.ModelConfig(**{**sizes, "max_seq_len": 64, "moe": moe, **given})


def of_models(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    base = model_config(32, 16, 4, 2)
    dense = replace(base, dense_intermediate_size=40, dense_layers=(0,))
    for dtype in dtypes:
        variants = {
            "as Qwen3-MoE": Model(base, (2, 12), dtype),
            "as OLMoE": Model(replace(base, qk_norm="full"), (2, 12), dtype),
            "as Mixtral, tied": Model(replace(base, qk_norm="none", tie_embeddings=True), (2, 12), dtype),
            "first block dense": Model(dense, (2, 12), dtype),
            "all dense": Model(replace(dense, moe=None), (2, 12), dtype),
            "recomputed": Model(base, (2, 12), dtype, recompute="up_proj"),
            "attention checkpointed": Model(base, (2, 12), dtype, "attention"),
            "blocks checkpointed": Model(base, (2, 12), dtype, "block"),
            "inference": Model(base, (2, 12), dtype, tokens=6),
            "autocast to fp16": Model(base, (2, 12), dtype, autocast=FP16),
        }
        for what, spec in variants.items():
            yield make("model", what, spec, dtype)


def small_cases(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    """What every backend computes: what has a dtype, in these, and routing, in fp32."""
    for kind in (of_layouts, of_routings, of_values, of_options, of_layers, of_lora, of_losses, of_models):
        yield from kind(dtypes)
    for kind_of_one_dtype in (of_routers, of_rounding, of_plans):
        yield from kind_of_one_dtype()


# Of the interpreter, whose every tile takes milliseconds.
_NOT_IN_FP32 = re.compile("values/|options/.*recomputed/|layer/rounded (up|down|balance), token mask")
# Of the dtypes that are not the first on a machine.
A_CHOICE = re.compile(
    "values/|loss/|layout/(swiglu_oai|gelu) |layer/(plain|gpt-oss)/|lora/plain|model/as Qwen3|options/(scores|x wanted)"
)


def interpreted_cases() -> Iterator[Case]:
    """A choice of `small_cases`, which takes minutes, and some by descriptor. The interpreter's bf16 is wrong."""
    yield from (case for case in small_cases((FP32,)) if not _NOT_IN_FP32.match(case.name))
    yield from (case for case in small_cases((FP16,)) if case.dtype == FP16 and A_CHOICE.match(case.name))
    yield from of_descriptors((FP16,))
