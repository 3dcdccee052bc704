"""What `golden`'s cases compute: each function runs one and returns its tensors by name.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · V vocabulary

A gradient is named d<tensor>. Beside a weight's gradient stands the order of its strides, as text.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import golden_seams as seams
import torch
from golden_inputs import Source, fill, make_routing
from torch import Tensor, nn

import tilemoe

Found = dict[str, Tensor | str]
GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_oai", "swiglu_clamped")
UNGATED = ("gelu", "gelu_tanh", "relu", "relu2", "silu")
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Shape:
    tokens: int
    d: int
    n: int
    experts: int
    k: int


@dataclass(frozen=True)
class Where:
    """``source`` of the inputs, on its device, and the name of the backend."""

    source: Source
    kernels: str

    @property
    def device(self) -> torch.device:
        return self.source.device


def autocast(where: Where, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(where.device.type, dtype)


@dataclass(frozen=True)
class Experts:
    """One call of `tilemoe.moe`. ``wanted``: whose gradients are asked for, None for all, () for inference.

    ``transposed``: which weights are transposed views. ``options`` go to `tilemoe.moe`. ``spoilt``: see `_spoil`.
    ``strides``: of x and the scores, "" where they are contiguous.
    """

    shape: Shape
    dtype: torch.dtype
    routing: str = "random"
    activation: str = "swiglu"
    gate_up: str = "concatenated"
    transposed: tuple[str, ...] = ()
    bias: bool = False
    wanted: tuple[str, ...] | None = None
    spoilt: str = ""
    strides: str = ""
    scores_dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def experts(case: Experts, where: Where) -> Found:
    source, size = where.source, case.shape
    routed = make_routing(source, case.routing, size.tokens, size.experts, size.k)
    tokens = routed.plan.num_tokens
    width = size.n * (2 if case.activation in GATED else 1)
    shapes = {"x": (tokens, size.d), "w1": (size.experts, width, size.d), "w2": (size.experts, size.d, size.n)}
    if case.bias:
        shapes |= {"b1": (size.experts, width), "b2": (size.experts, size.d)}
    leaves = {name: _operand(source, case, name, shape) for name, shape in shapes.items()}
    leaves["scores"] = source.uniform("scores", *routed.scores, low=0.0).to(case.scores_dtype)
    do = source.uniform("do", tokens, size.d).to(case.dtype)
    _spoil(case.spoilt, {**leaves, "do": do})
    wanted = tuple(leaves) if case.wanted is None else case.wanted
    for name in wanted:
        leaves[name].requires_grad_()
    given = {
        **leaves,
        **{name: leaves[name].transpose(1, 2) for name in case.transposed},
        **_with_strides(case, leaves),
    }
    options = {"activation": case.activation, "gate_up": case.gate_up, "kernels": where.kernels, **case.options}
    with torch.set_grad_enabled(bool(wanted)), autocast(where, case.autocast):
        o = tilemoe.moe(**given, plan=routed.plan, **options)
    found: Found = {"o": o.detach()}
    if wanted:
        grads = torch.autograd.grad(o, [leaves[name] for name in wanted], do.to(o.dtype))
        for name, grad in zip(wanted, grads, strict=True):
            found |= _gradient(name, grad)
    return found


def _operand(source: Source, case: Experts, name: str, shape: tuple[int, ...]) -> Tensor:
    if name in case.transposed:
        shape = (shape[0], shape[2], shape[1])
    scale = {"x": 1.7, "b1": 0.5, "b2": 0.5}.get(name)
    if scale is None:
        fan_in = case.shape.d if name == "w1" else case.shape.n
        scale = 1.7 * fan_in**-0.5
    return source.uniform(name, *shape, low=-scale, high=scale).to(case.dtype)


def _with_strides(case: Experts, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views or copies of other strides, of which the leaves are the origin."""
    x, scores, w1 = leaves["x"], leaves["scores"], leaves["w1"]
    if case.strides == "rows of x":
        return {"x": torch.nn.functional.pad(x, (0, 3))[:, : x.shape[1]]}
    if case.strides == "columns of x":
        return {"x": x.t().contiguous().t()}
    if case.strides == "scores":
        return {"scores": torch.nn.functional.pad(scores, (0, 2))[:, : scores.shape[1]]}
    if case.strides == "one score":
        return {"scores": scores[:1, :1].expand(scores.shape)}
    if case.strides == "elements of w1":
        return {"w1": torch.stack([w1, w1], dim=-1)[..., 0]}
    if case.strides == "experts inside rows of w1":
        return {"w1": w1.transpose(0, 1).contiguous().transpose(0, 1)}
    assert not case.strides, case.strides
    return {}


def _spoil(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Write what is not finite, or nearly, into a tensor: "nan in x", say. "large" and "small" scale all of it."""
    if not what:
        return
    value, name = what.split(" in ")
    tensor = tensors[name]
    if value in ("large", "small"):
        tensor.mul_({"large": 3e4, "small": 1e-6}[value])
    elif value == "zero":
        tensor.zero_()
    else:
        flat = tensor.view(-1)
        flat[flat.numel() // 3] = float(value)
        flat[flat.numel() - 1] = float(value)


def _gradient(name: str, grad: Tensor | None) -> Found:
    if grad is None:
        return {f"d{name}": "none"}
    if grad.ndim < 3:
        return {f"d{name}": grad}
    return {f"d{name}": grad, f"d{name} strides": ",".join(map(str, grad.stride()))}


@dataclass(frozen=True)
class Route:
    """One call of `tilemoe.route`; ``logits``: "plain", "ties", "masked" or what to spoil them with."""

    config: tilemoe.MoEConfig
    tokens: int
    dtype: torch.dtype = torch.float32
    logits: str = "plain"
    mask: bool = False
    training: bool = True


def route(case: Route, where: Where) -> Found:
    source, cfg = where.source, case.config
    logits = source.uniform("logits", case.tokens, cfg.num_experts, low=-3.0, high=3.0)
    if case.logits == "ties":
        logits = (logits * 2).round() / 2
    elif case.logits == "masked":
        logits[1::2, ::3] = -INF
    elif case.logits != "plain":
        _spoil(f"{case.logits} in logits", {"logits": logits})
    logits = logits.to(case.dtype).requires_grad_()
    options: dict[str, Any] = {"training": case.training, "generator": source.generator("rounding", where.device)}
    if cfg.router.selection_bias:
        options["selection_bias"] = source.uniform("bias", cfg.num_experts, low=-0.2, high=0.2)
    if case.mask:
        options["token_mask"] = source.uniform("mask", case.tokens, low=0.0) < 0.7
    routing = tilemoe.route(logits, cfg, **options)
    d_scores = source.uniform("d_scores", *routing.scores.shape).to(routing.scores.dtype)
    outputs, grads = [routing.scores], [d_scores]
    if routing.aux_loss.requires_grad:
        outputs, grads = [*outputs, routing.aux_loss], [*grads, torch.ones_like(routing.aux_loss)]
    (d_logits,) = torch.autograd.grad(outputs, logits, grads)
    found: Found = {**seams.plan_tensors(routing.plan)}
    found |= {"scores": routing.scores.detach(), "tokens_per_expert": routing.tokens_per_expert}
    return found | {"aux_loss": routing.aux_loss.detach(), "dense": routing.dense().detach(), "dlogits": d_logits}


@dataclass(frozen=True)
class Layer:
    """Forward and backward of a `tilemoe.MoE`. ``frozen``: parameters whose names contain one of these."""

    config: tilemoe.MoEConfig
    tokens: tuple[int, ...]
    dtype: torch.dtype
    mask: bool = False
    training: bool = True
    inference: bool = False
    recompute: str | None = None
    frozen: tuple[str, ...] = ()
    freeze_x: bool = False
    spoilt: str = ""
    autocast: torch.dtype | None = None
    lora: tuple[int, float] | None = None
    lora_dtype: torch.dtype | None = None
    merged: bool = False


def layer(case: Layer, where: Where) -> Found:
    source = where.source
    options = {"device": where.device, "dtype": case.dtype, "recompute": case.recompute, "kernels": where.kernels}
    moe = tilemoe.MoE(case.config, **options).train(case.training)
    if case.lora is not None:
        seams.add_lora(moe, *case.lora, dtype=case.lora_dtype)
    fill(source, [*moe.named_parameters(), *moe.named_buffers()])
    if case.merged:
        seams.merge_lora(moe)
    for name, parameter in moe.named_parameters():
        if any(part in name for part in case.frozen):
            parameter.requires_grad_(False)
    x = source.uniform("x", *case.tokens, case.config.hidden_size, low=-1.7, high=1.7).to(case.dtype)
    _spoil(case.spoilt, {"x": x})
    x.requires_grad_(not case.freeze_x)
    mask = source.uniform("mask", *case.tokens, low=0.0) < 0.7 if case.mask else None
    with torch.set_grad_enabled(not case.inference), autocast(where, case.autocast):
        out = moe(x, mask, source.generator("rounding", where.device))
    found: Found = {name: value.detach() for name, value in out._asdict().items()}
    if case.inference:
        return found
    do = source.uniform("do", *x.shape).to(out.hidden.dtype)
    outputs = [(out.hidden, do), (out.aux_loss, torch.ones_like(out.aux_loss))]
    differentiable = [pair for pair in outputs if pair[0].requires_grad]
    if differentiable:
        torch.autograd.backward(*zip(*differentiable, strict=True))
    return found | _gradients(moe) | _gradient("x", x.grad)


def _gradients(module: nn.Module) -> Found:
    found: Found = {}
    for name, parameter in module.named_parameters():
        found |= _gradient(f" {name}", parameter.grad)
    return found


@dataclass(frozen=True)
class Loss:
    """The chunked cross-entropy. ``wanted`` as in `Experts`; ``labels``: "some", "all" or "none" are classes."""

    tokens: int
    d: int
    classes: int
    dtype: torch.dtype
    labels: str = "some"
    chunk: int | None = None
    wanted: tuple[str, ...] = ("hidden", "weight")
    spoilt: str = ""


def loss(case: Loss, where: Where) -> Found:
    source = where.source
    labels = source.integers("labels", case.tokens, high=case.classes)
    if case.labels != "all":
        labels[:: 3 if case.labels == "some" else 1] = -100
    leaves = {
        "hidden": source.uniform("hidden", case.tokens, case.d).to(case.dtype),
        "weight": source.uniform("weight", case.classes, case.d).to(case.dtype),
    }
    _spoil(case.spoilt, leaves)
    for name in case.wanted:
        leaves[name].requires_grad_()
    value = seams.chunked_cross_entropy(**leaves, labels=labels, max_chunk_logits=case.chunk)
    found: Found = {"loss": value.detach()}
    if case.wanted:
        grads = torch.autograd.grad(value, [leaves[name] for name in case.wanted])
        found |= {f"d{name}": grad for name, grad in zip(case.wanted, grads, strict=True)}
    return found


@dataclass(frozen=True)
class Model:
    """A `tilemoe.DecoderLM`: one training step by SGD, or with ``tokens`` > 0 logits and that many greedy tokens."""

    config: tilemoe.ModelConfig
    batch: tuple[int, int]
    dtype: torch.dtype
    checkpointing: str = "none"
    recompute: str | None = None
    autocast: torch.dtype | None = None
    tokens: int = 0


def model(case: Model, where: Where) -> Found:
    source, vocabulary = where.source, case.config.vocab_size
    options = {"device": where.device, "dtype": case.dtype, "recompute": case.recompute, "kernels": where.kernels}
    decoder = tilemoe.DecoderLM(case.config, **options)
    fill(source, [*decoder.named_parameters(), *decoder.named_buffers()])
    decoder.set_checkpointing(case.checkpointing)
    ids = source.integers("ids", *case.batch, high=vocabulary)
    if case.tokens:
        with torch.no_grad():
            out = decoder.eval()(ids)
        new = seams.generate(decoder, ids, case.tokens, temperature=0.0)
        return {"logits": out.logits, "tokens": new, "tokens_per_expert": out.tokens_per_expert}
    labels = source.integers("labels", *case.batch, high=vocabulary)
    labels[:, -1] = -100
    with autocast(where, case.autocast):
        out = decoder(ids, labels)
    (out.loss + out.aux_loss).backward()
    found: Found = {"loss": out.loss.detach(), "aux_loss": out.aux_loss.detach(), **_gradients(decoder)}
    torch.optim.SGD(decoder.parameters(), lr=0.1, foreach=False).step()
    decoder.update_selection_bias(out.tokens_per_expert, 0.01)
    state = itertools.chain(decoder.named_parameters(), decoder.named_buffers())
    after = {f"{name} after": tensor.detach() for name, tensor in state}
    return found | {"tokens_per_expert": out.tokens_per_expert} | after


@dataclass(frozen=True)
class Plan:
    """A plan alone; ``inference``: without autograd, where few pairs have a builder of their own."""

    routing: str
    shape: Shape
    inference: bool = False


def plan(case: Plan, where: Where) -> Found:
    size = case.shape
    with torch.set_grad_enabled(not case.inference):
        routed = make_routing(where.source, case.routing, size.tokens, size.experts, size.k)
    return dict(seams.plan_tensors(routed.plan))


@dataclass(frozen=True)
class Rounded:
    """A `tilemoe.MoE` whose routed rows are rounded goes through `layer`; here the plan feeds `tilemoe.moe`."""

    experts: Experts
    mode: str
    tile: int


def rounded(case: Rounded, where: Where) -> Found:
    source, size = where.source, case.experts.shape
    rounding = tilemoe.TokenRounding(mode=case.mode, tile=case.tile)
    cfg = tilemoe.MoEConfig(size.d, size.n, size.experts, size.k, rounding=rounding)
    logits = source.uniform("logits", size.tokens, size.experts, low=-3.0, high=3.0)
    routing = tilemoe.route(logits, cfg, generator=source.generator("rounding", where.device))
    inner = replace(case.experts, routing="random")
    shapes = {
        "x": (size.tokens, size.d),
        "w1": (size.experts, 2 * size.n, size.d),
        "w2": (size.experts, size.d, size.n),
    }
    leaves = {name: _operand(source, inner, name, shape).requires_grad_() for name, shape in shapes.items()}
    leaves["scores"] = routing.scores.detach().requires_grad_()
    o = tilemoe.moe(**leaves, plan=routing.plan, kernels=where.kernels)
    do = source.uniform("do", *o.shape).to(o.dtype)
    found: Found = {"o": o.detach()}
    for name, grad in zip(leaves, torch.autograd.grad(o, list(leaves.values()), do), strict=True):
        found |= _gradient(name, grad)
    return found
