"""Hashes of what tilemoe computes, to show that a change of the code changes no bit of it.

    python benchmarks/golden.py --write results/golden.json       # CPU: the torch backend, and Triton's interpreter
    python benchmarks/golden.py --check results/golden.json
    python benchmarks/golden.py --device cuda --write FILE        # a GPU: the backends triton and hopper

The file holds a hash for each tensor of each case: outputs and every gradient, NaN as one pattern. ``--check`` computes
them again and ends with 1 if any differs. Hashes hold on one kind of machine and one release of PyTorch and Triton; the
header names them. To compare two commits elsewhere, write a file at one and check it at the other.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tilemoe
from tilemoe import MoEConfig, RouterConfig, TokenRounding
from tilemoe.bench import record
from tilemoe.layers.lora import add_lora, merge_lora
from tilemoe.models.loss import chunked_cross_entropy
from tilemoe.testing import poisoned_memory

Found = dict[str, Tensor]
Hashes = dict[str, dict[str, str]]  # case -> tensor -> hash
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_oai", "swiglu_clamped")
UNGATED = ("gelu", "gelu_tanh", "relu", "relu2", "silu")
ROUTINGS = ("random", "empty experts", "all on the last", "sentinels", "pairs", "no tokens")
PRESETS = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss", "granite_moe")
MODES: tuple[Any, ...] = ("nearest", "stochastic", "nearest_score", "balance", "up", "down")
LOSSES: dict[str, Any] = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01}
SMALL = (17, 24, 16, 4, 2)  # T, d, n, E, K
BLOCKS = (40, 128, 256, 4, 2)  # widths that FP8 can quantise
LARGE = {  # on a GPU: many tiles, waves and bands
    "fine": (4096, 2048, 256, 64, 8),
    "coarse": (4096, 2048, 1024, 16, 4),
    "ragged widths": (2500, 1000, 296, 12, 3),
    "bands": (900, 1160, 8456, 4, 2),
    "long contraction": (700, 4608, 2304, 4, 2),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor) -> str:
    """Of dtype, shape, strides' order and bits; every NaN is the same one."""
    tensor = tensor.detach()
    head = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride() if tensor.ndim > 2 else ''}"
    bits = tensor.contiguous()
    if bits.dtype.is_floating_point:
        bits = torch.where(bits.isnan(), torch.full_like(bits, float("nan")), bits)
    found = hashlib.sha256(head.encode())
    found.update(bits.view(_INTEGERS[bits.element_size()]).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Draw:
    """Uniform numbers that follow from a case's name alone, to the bit: a normal's logarithms differ by processor."""

    case: str
    device: torch.device

    def __call__(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.rand(shape, generator=self.generator(name)).to(self.device)
        return drawn.mul_(2 * scale).sub_(scale)

    def generator(self, name: str) -> torch.Generator:
        seed = int.from_bytes(hashlib.sha256(f"{self.case}: {name}".encode()).digest()[:7], "big")
        return torch.Generator().manual_seed(seed)

    def fill(self, module: torch.nn.Module) -> None:
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                scale = 1.7 * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3
                tensor.copy_(self(name, *tensor.shape, scale=scale) + ("norm" in name))


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[Draw, str], Found]  # of the draws and the backend's name


@dataclass(frozen=True)
class Experts:
    """One call of `tilemoe.moe` and its gradients; ``spoilt`` is a value and the tensor it is written into."""

    sizes: tuple[int, int, int, int, int]
    dtype: torch.dtype
    routing: str = "random"
    activation: str = "swiglu"
    gate_up: str = "concatenated"
    transposed: bool = False
    bias: bool = True
    wanted: tuple[str, ...] | None = None
    spoilt: tuple[float, str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, draw: Draw, kernels: str) -> Found:
        _, d, n, experts, _ = self.sizes
        plan, scores = self._plan(draw)
        width = n * (2 if self.activation in GATED else 1)
        shapes = {"x": (plan.num_tokens, d), "w1": (experts, width, d), "w2": (experts, d, n)}
        shapes |= {"b1": (experts, width), "b2": (experts, d)} if self.bias else {}
        leaves = {name: draw(name, *shape, scale=1.7 * shape[-1] ** -0.5) for name, shape in shapes.items()}
        leaves["x"] *= d**0.5
        given = {name: leaf.to(self.dtype) for name, leaf in leaves.items()}
        if self.transposed:
            given |= {w: given[w].transpose(1, 2).contiguous().transpose(1, 2) for w in ("w1", "w2")}
        given["scores"] = draw("scores", *scores) + 1
        given["do"] = draw("do", plan.num_tokens, d).to(self.dtype)
        if self.spoilt is not None:
            flat = given[self.spoilt[1]].reshape(-1)  # a view: none of these is transposed
            flat[flat.numel() // 3] = self.spoilt[0]
        do = given.pop("do")
        wanted = tuple(given) if self.wanted is None else self.wanted
        for name in wanted:
            given[name].requires_grad_()
        options = {"kernels": None if "precision" in self.options else kernels, **self.options}
        o = tilemoe.moe(**given, plan=plan, activation=self.activation, gate_up=self.gate_up, **options)
        grads = torch.autograd.grad(o, [given[name] for name in wanted], do) if wanted else ()
        return {"o": o} | {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}

    def _plan(self, draw: Draw) -> tuple[tilemoe.RoutingPlan, tuple[int, ...]]:
        tokens, _, _, experts, k = self.sizes
        tokens = 0 if self.routing == "no tokens" else tokens
        if self.routing == "pairs":
            token = (draw("token", tokens * k).add_(1).mul_(tokens / 2)).long().clamp_(max=tokens - 1)
            expert = (draw("expert", tokens * k).add_(1).mul_(experts / 2)).long().clamp_(max=experts - 1)
            return tilemoe.plan_pairs(token, expert, tokens, experts), (tokens * k,)
        open_to = experts - 2 if self.routing == "empty experts" else experts
        ids = draw("ids", tokens, open_to).argsort(dim=1, stable=True)[:, :k].contiguous() + (experts - open_to) // 2
        if self.routing == "all on the last":
            ids = torch.full((tokens, 1), experts - 1, device=draw.device)
        if self.routing == "sentinels":
            ids[0], ids[-1, 0] = experts, 2**31 - 1
        return tilemoe.plan_topk(ids, experts), tuple(ids.shape)


@dataclass(frozen=True)
class Layer:
    """Forward and backward of a `tilemoe.MoE`."""

    config: MoEConfig
    dtype: torch.dtype
    mask: bool = False
    recompute: str | None = None
    lora_rank: int = 0
    merged: bool = False
    tokens: int = 40

    def __call__(self, draw: Draw, kernels: str) -> Found:
        cfg = self.config
        layer = tilemoe.MoE(cfg, draw.device, self.dtype, recompute=self.recompute, kernels=kernels)
        if self.lora_rank:
            add_lora(layer, self.lora_rank, 16.0)
        draw.fill(layer)
        if self.merged:
            merge_lora(layer)
        x = draw("x", self.tokens, cfg.hidden_size, scale=1.7).to(self.dtype).requires_grad_()
        mask = draw("mask", self.tokens) < 0.4 if self.mask else None
        torch.manual_seed(0)
        out = layer(x, mask)
        (out.hidden * draw("do", *x.shape).to(self.dtype)).sum().backward(retain_graph=True)
        if out.aux_loss.requires_grad:
            out.aux_loss.backward()
        assert x.grad is not None
        grads = {f"d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
        counts = {"tokens_per_expert": out.tokens_per_expert, "pairs_per_expert": out.pairs_per_expert}
        return {"hidden": out.hidden, "aux_loss": out.aux_loss, "dx": x.grad, **counts, **grads}


@dataclass(frozen=True)
class Model:
    """One training step of a `tilemoe.DecoderLM` by SGD."""

    dtype: torch.dtype
    checkpointing: str = "none"
    given: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, draw: Draw, kernels: str) -> Found:
        moe = MoEConfig(32, 16, 4, 2, router=RouterConfig(selection_bias=True, **LOSSES))
        config = tilemoe.ModelConfig(61, 32, 2, 4, 2, 8, 64, moe=moe, **self.given)
        model = tilemoe.DecoderLM(config, device=draw.device, dtype=self.dtype, kernels=kernels)
        draw.fill(model)
        model.set_checkpointing(self.checkpointing)
        ids = (draw("ids", 2, 13).add_(1).mul_(30)).long()
        out = model(ids[:, :-1], ids[:, 1:])
        (out.loss + out.aux_loss).backward()
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
        model.update_selection_bias(out.pairs_per_expert, 0.01)
        after = {f"{name} after": tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        return {"loss": out.loss, "aux_loss": out.aux_loss, "pairs": out.pairs_per_expert, **after}


def _loss(dtype: torch.dtype, chunk: int | None, draw: Draw, kernels: str) -> Found:
    hidden, weight = (draw(name, rows, 16).to(dtype).requires_grad_() for name, rows in (("h", 50), ("w", 37)))
    labels = (draw("labels", 50).add_(1).mul_(18)).long()
    labels[::3] = -100
    loss = chunked_cross_entropy(hidden, weight, labels=labels, max_chunk_logits=chunk)
    return {"loss": loss, **dict(zip(("dhidden", "dweight"), torch.autograd.grad(loss, [hidden, weight]), strict=True))}


def experts_cases(dtype: torch.dtype, sizes: tuple[int, int, int, int, int]) -> Iterator[tuple[str, Any]]:
    """Layouts, routings, values and options."""
    for activation in (*GATED, *UNGATED):
        for gate_up in ("concatenated", "interleaved") if activation in GATED else ("concatenated",):
            for transposed in (False, True):
                name = f"layout/{activation} {gate_up}{' transposed' if transposed else ''}"
                yield name, Experts(sizes, dtype, "random", activation, gate_up, transposed, bias=transposed)
    for routing in ROUTINGS:
        yield f"routing/{routing}", Experts(sizes, dtype, routing)
        yield f"routing/{routing}, inference", Experts(sizes, dtype, routing, wanted=())
    for name in ("x", "w1", "w2", "b1", "b2", "scores", "do"):
        for value in (float("nan"), float("inf")):
            yield f"values/{value} in {name}", Experts(sizes, dtype, spoilt=(value, name))
    for wanted in (("x",), ("w1",), ("w2",), ("scores",), ("b1", "b2")):
        yield f"options/{' '.join(wanted)} wanted", Experts(sizes, dtype, wanted=wanted)
    yield "options/recomputed", Experts(sizes, dtype, options={"recompute": "up_proj"})
    yield "options/limit", Experts(sizes, dtype, activation="swiglu_oai", options={"activation_limit": 0.5})
    if dtype is not torch.float64:
        yield "fp8/gemms", Experts(BLOCKS, dtype, options={"precision": "fp8"})
        yield "fp8/sentinels", Experts(BLOCKS, dtype, "sentinels", options={"precision": "fp8"})
        yield "fp8/saved", Experts(BLOCKS, dtype, options={"save": "fp8"})


def layer_cases(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    plain = MoEConfig(24, 16, 4, 2, router=RouterConfig(**LOSSES))
    shared = MoEConfig(24, 16, 4, 2, router=RouterConfig(**LOSSES), shared_intermediate_size=16, shared_gate=True)
    for preset in PRESETS:
        cfg = MoEConfig(24, 16, 16, 4, router=RouterConfig.preset(preset))
        yield f"router/{preset}", Layer(cfg, dtype)
        yield f"router/{preset}, mask", Layer(cfg, dtype, mask=True)
    for mode in MODES:
        cfg = MoEConfig(24, 16, 4, 2, router=RouterConfig(**LOSSES), rounding=TokenRounding(mode, 16))
        yield f"rounding/{mode}", Layer(cfg, dtype, tokens=70)
        yield f"rounding/{mode}, mask", Layer(cfg, dtype, mask=True, tokens=70)
    yield "layer/shared", Layer(shared, dtype)
    yield "layer/recomputed", Layer(shared, dtype, recompute="up_proj")
    yield "layer/one token", Layer(plain, dtype, tokens=1)
    yield "lora/plain", Layer(plain, dtype, lora_rank=8)
    yield "lora/merged", Layer(plain, dtype, lora_rank=8, merged=True)
    yield "loss/whole", lambda draw, kernels: _loss(dtype, None, draw, kernels)
    yield "loss/chunks", lambda draw, kernels: _loss(dtype, 7 * 37, draw, kernels)
    for mode in ("none", "attention", "block"):
        yield f"model/checkpointing {mode}", Model(dtype, mode)
    yield "model/tied, norm of all heads", Model(dtype, given={"tie_embeddings": True, "qk_norm": "full"})
    yield "model/first block dense", Model(dtype, given={"dense_intermediate_size": 40, "dense_layers": (0,)})


def cases(backend: str, on_gpu: bool) -> Iterator[Case]:
    """The interpreter's bf16 is wrong; on a GPU fp32 and fp64 are `torch`'s."""
    dtypes = ("bf16", "fp16") if on_gpu else ("fp32",) if backend == "triton" else tuple(DTYPES)
    for name in dtypes:
        dtype = DTYPES[name]
        for what, run in (*experts_cases(dtype, SMALL), *layer_cases(dtype)):
            if not (backend == "triton" and not on_gpu and what.startswith("fp8/")):  # e4m3: PyTorch on a CPU
                yield Case(f"{backend}/{what}/{name}", run)
        for what, sizes in LARGE.items() if on_gpu else ():
            for activation, gate_up in (
                ("swiglu", "concatenated"),
                ("swiglu_oai", "interleaved"),
                ("gelu", "concatenated"),
            ):
                run = Experts(sizes, dtype, "random", activation, gate_up)
                yield Case(f"{backend}/{what}/{activation}/{name}", run)
            if sizes[1] % 128 == sizes[2] % 128 == 0:
                yield Case(f"{backend}/{what}/fp8/{name}", Experts(sizes, dtype, options={"precision": "fp8"}))


@contextmanager
def let_triton_serve_the_cpu() -> Iterator[None]:
    """In Triton's interpreter router, plan, rounding and loss, which ask for a GPU, take their kernels, too."""
    from tilemoe.runtime.device import Device

    device = Device(0, shared_bytes=1 << 20, multiprocessors=3, interpreted=True)
    with (
        mock.patch("tilemoe.kernels.experts.triton.backend.device_of", return_value=device),
        mock.patch("tilemoe.kernels.choose.why_no_triton", return_value=None),
    ):
        yield


def compute(backend: str, device: torch.device, of: Iterable[Case] | None = None) -> Hashes:
    """Hashes by case and tensor, of all cases or those given; of a refused case the error's class."""
    found: Hashes = {}
    interpreted = backend == "triton" and device.type == "cpu"
    for case in cases(backend, device.type == "cuda") if of is None else of:
        with ExitStack() as stack:
            stack.enter_context(let_triton_serve_the_cpu() if interpreted else nullcontext())
            stack.enter_context(poisoned_memory() if device.type == "cpu" else nullcontext())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # numpy's, of padding; rounding's, of few tokens
            try:
                tensors = case.run(Draw(case.name, device), backend)
            except ValueError as error:
                found[case.name] = {"refused": type(error).__name__}
                continue
        found[case.name] = {name: digest(tensor) for name, tensor in tensors.items()}
    return found


def header(device: torch.device) -> dict[str, Any]:
    provenance = record.provenance()
    on_cpu = device.type == "cpu"
    machine = torch.backends.cpu.get_cpu_capability() if on_cpu else provenance["gpu"]
    return {"machine": machine, **{name: provenance[name] for name in ("commit", "torch", "triton")}}


def differences(old: Hashes, new: Hashes) -> list[str]:
    """Each case that is not the same, with the tensors that differ or that only one of them has."""
    lines = []
    for case in sorted(old.keys() | new.keys()):
        one, other = old.get(case, {}), new.get(case, {})
        names = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
        if names:
            lines.append(f"{case} differs: {', '.join(names)}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE")
    what.add_argument("--check", type=Path, metavar="FILE")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", help="this one alone")
    args = parser.parse_args(arguments)
    path, device = args.write or args.check, torch.device(args.device)
    if args.backend is None:  # Triton decides at import whether it interprets, so each backend has a process
        backends = ("torch", "triton") if args.device == "cpu" else ("triton", "hopper")
        hashes: Hashes = {}
        for backend in backends:
            interpret = str(int(args.device == "cpu" and backend == "triton"))
            one = {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
            part = Path(f"{path}.{backend}")
            command = [sys.executable, __file__, "--device", args.device, "--backend", backend, "--write", str(part)]
            subprocess.run(command, env={**os.environ, **one}, check=True)
            hashes |= json.loads(part.read_text())["cases"]
            part.unlink()
    else:
        hashes = compute(args.backend, device)
    if args.write:
        args.write.write_text(json.dumps({"header": header(device), "cases": hashes}, indent=0) + "\n")
        return 0
    kept = json.loads(args.check.read_text())
    of_these = {case: found for case, found in kept["cases"].items() if case.startswith(args.backend or "")}
    differing = differences(of_these, hashes)
    print("\n".join([*differing, f"{len(hashes)} cases, {len(differing)} differ"]))
    print(f"kept: {kept['header']}\nhere: {header(device)}")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
