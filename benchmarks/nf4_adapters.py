"""A step of adapters on frozen experts in NF4 against the same step on the same experts in bf16.

    python benchmarks/nf4_adapters.py --rounds 7
    python benchmarks/nf4_adapters.py --kernels OLMoE-1B-7B
    python benchmarks/nf4_adapters.py --report

A layer of routed experts with adapters of rank 16, router and all, forward and backward, no optimiser. Both are checked
first, with fresh random inputs, against the torch backend in fp64 on the very weights that each multiplies (NF4's
decoded); rows of a wrong one are not timed. Then they are timed in the same rounds, in changing order, by the GPU alone
(`tilemoe.bench.gpu_time`). Memory: bytes of the frozen experts' storages, and the peak of a step beyond what is
allocated before it.
The bars: NF4's experts take at most 0.30 of bf16's bytes, and its steps are at least 0.7 times as fast.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import profiles
import torch
from torch import Tensor

import tilemoe
from tilemoe.bench import gpu_time, record, timing
from tilemoe.layers.lora import LoRAExperts, Nf4LoRAExperts, add_lora
from tilemoe.layers.moe import MoE
from tilemoe.shape import MoEShape
from tilemoe.testing import relative_error

NAME, MODE = "nf4_adapters", "step"
RANK, ALPHA = 16, 32.0
MOST_BYTES, LEAST_SPEED = 0.30, 0.70
LIMIT = 2e-2  # of an RMS-relative error in bf16, as the package's tests have it
TOKENS_CHECKED = 1024  # fp64 is slow
KERNEL_STEPS = 5
BF16, NF4 = "bf16", "nf4"

# Tokens of a step, d, n, experts, experts per token.
SIZES = {
    "OLMoE-1B-7B": MoEShape(16384, 2048, 1024, 64, 8),
    "OLMoE-1B-7B, 4096 tokens": MoEShape(4096, 2048, 1024, 64, 8),
    "Qwen3-30B-A3B": MoEShape(16384, 2048, 768, 128, 8),
    "Qwen3-30B-A3B, 4096 tokens": MoEShape(4096, 2048, 768, 128, 8),
}
TOYS = {"toy": MoEShape(96, 128, 64, 8, 2)}

Row = dict[str, Any]


def make(shape: MoEShape, device: torch.device) -> dict[str, MoE]:
    """Both layers, of the same weights: trained adapters, whose b's are not zero."""
    torch.manual_seed(0)
    cfg = tilemoe.MoEConfig(
        shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.num_experts_per_tok, initializer_range=0.02
    )
    plain = MoE(cfg, device=device, dtype=torch.bfloat16)
    layers = {BF16: plain, NF4: copy.deepcopy(plain)}
    for storage, layer in zip(("dense", "nf4"), layers.values(), strict=True):
        torch.manual_seed(1)
        with torch.no_grad():
            for adapter in add_lora(layer, RANK, ALPHA, storage=storage):
                adapter.copy_(torch.randn(adapter.shape, device=device) * 0.02)
    return layers


def frozen_bytes(layer: MoE) -> int:
    """Of the storages that hold w1 and w2."""
    experts = layer.experts.named_parameters()
    return sum(each.untyped_storage().nbytes() for name, each in experts if name.startswith(("w1", "w2")))


def in_fp64(layer: MoE) -> MoE:
    """A dense copy that computes in fp64 with what the kernels multiply."""
    cfg, experts = layer.cfg, layer.experts
    assert isinstance(experts, LoRAExperts)
    exact = MoE(cfg, device=experts.up_a.device, dtype=torch.float64, kernels="torch")
    add_lora(exact, experts.rank, experts.alpha)
    weights = dict(layer.state_dict())
    if isinstance(experts, Nf4LoRAExperts):
        for name, weight in zip(("w1", "w2"), experts._frozen(lambda t: t), strict=True):
            decoded = [weight.expert(index, experts.up_a.dtype) for index in range(cfg.num_experts)]
            weights[f"experts.{name}"] = torch.stack(decoded)
            del weights[f"experts.{name}_codes"], weights[f"experts.{name}_absmax"]
    exact.load_state_dict(weights)
    return exact


def gradients(layer: MoE, x: Tensor, expert_ids: Tensor | None, do: Tensor) -> dict[str, Tensor]:
    """The output and the gradients of x and the adapters, of tokens that go where ``expert_ids`` says, or where
    the router says."""
    x = x.detach().requires_grad_()
    adapters = {name: each for name, each in layer.named_parameters() if each.requires_grad}
    hidden = layer(x, expert_ids=expert_ids).hidden
    found = torch.autograd.grad(hidden, [x, *adapters.values()], do)
    return {"o": hidden.detach(), **dict(zip(["dx", *adapters], found, strict=True))}


def errors_of(layer: MoE, tokens: int) -> dict[str, float]:
    """RMS-relative, against fp64, of inputs that nobody has seen before."""
    like, d = layer.get_parameter("router.weight"), layer.cfg.hidden_size
    device = like.device
    seed = time.time_ns() % 2**31
    generator = torch.Generator(device).manual_seed(seed)
    x, do = (torch.randn(tokens, d, device=device, generator=generator).to(like) for _ in range(2))
    scores = torch.rand(tokens, layer.cfg.num_experts, device=device, generator=generator)
    ids = scores.topk(layer.cfg.num_experts_per_tok, dim=1).indices
    found = gradients(layer, x, ids, do)
    exact = gradients(in_fp64(layer), x.double(), ids, do.double())
    return {name: relative_error(each, exact[name]) for name, each in found.items()}


def step_of(layer: MoE, shape: MoEShape) -> Callable[[Callable[[], Any]], list[Any]]:
    device = layer.get_parameter("router.weight").device
    generator = torch.Generator(device).manual_seed(2)
    x, do = (
        torch.randn(shape.num_tokens, shape.hidden_size, device=device, generator=generator).bfloat16()
        for _ in range(2)
    )
    x.requires_grad_()
    leaves = [x, *(each for each in layer.parameters() if each.requires_grad)]

    def step() -> list[timing.Event]:
        for leaf in leaves:
            leaf.grad = None
        start = timing.event()
        hidden = layer(x).hidden
        middle = timing.event()
        hidden.backward(do)
        return [start, middle, timing.event()]

    return step


def one_size(args: argparse.Namespace, size: str, shape: MoEShape) -> list[Row]:
    device = torch.device(args.device)
    layers = make(shape, device)
    errors = {name: errors_of(layer, min(shape.num_tokens, TOKENS_CHECKED)) for name, layer in layers.items()}
    problems = {
        name: max(found, key=found.__getitem__) for name, found in errors.items() if max(found.values()) > LIMIT
    }
    chosen = tilemoe.select_kernels(device, torch.bfloat16, layers[BF16].cfg).name
    where: Row = {"mode": MODE, "size": size, **asdict(shape), "rank": RANK, "kernels": chosen, "rounds": args.rounds}
    rows = {
        name: {
            **where,
            "storage": name,
            "problem": f"{problems[name]} is wrong" if name in problems else None,
            "errors": {key: float(f"{error:.3g}") for key, error in errors[name].items()},
            "frozen_bytes": frozen_bytes(layer),
        }
        for name, layer in layers.items()
    }
    if problems:
        return list(rows.values())
    steps = {name: step_of(layer, shape) for name, layer in layers.items()}
    found = gpu_time.rounds(steps, args.rounds, args.spell, args.milliseconds)
    for name, step in steps.items():
        for part, values in zip(("fwd", "bwd"), zip(*found[name], strict=True), strict=True):
            rows[name][f"{part}_ms"] = timing.summary(list(values))
        rows[name]["ms"] = timing.summary([sum(parts) for parts in found[name]])
        rows[name]["peak_bytes"] = timing.memory_of(lambda step=step: step())[2] if device.type == "cuda" else None
    speeds = [sum(plain) / sum(ours) for plain, ours in zip(found[BF16], found[NF4], strict=True)]
    speed = round(statistics.median(speeds), 4)
    share = round(rows[NF4]["frozen_bytes"] / rows[BF16]["frozen_bytes"], 4)
    rows[NF4] |= {"speed": speed, "bytes": share, "held": speed >= LEAST_SPEED and share <= MOST_BYTES}
    return list(rows.values())


def each_kernel(args: argparse.Namespace, size: str, shape: MoEShape) -> None:
    """Print each kernel's milliseconds in a step of both."""
    for name, layer in make(shape, torch.device(args.device)).items():
        step = step_of(layer, shape)

        def work(step: timing.Step = step) -> None:
            for _ in range(KERNEL_STEPS):
                step()

        work()
        rows = profiles.of_kernels(work)
        print(f"{size} {name}: {sum(ms for _, ms, _ in rows) / KERNEL_STEPS:.3f} ms of kernels a step")
        for kernel, milliseconds, launches in rows:
            print(f"{milliseconds / KERNEL_STEPS:9.3f} ms {launches / KERNEL_STEPS:5.1f}  {kernel[:100]}", flush=True)


def describe(row: Row) -> str:
    head = f"{row['size']:28} {row['storage']:5}"
    if row["problem"]:
        return f"{head} is not timed: {row['problem']} {row['errors']}"
    times = " ".join(f"{part} {row[f'{part}_ms']['median']:.3f}" for part in ("fwd", "bwd"))
    peak = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / 2**30:.2f} GiB"
    error = max(row["errors"].values())
    text = f"{head} {times} ms, frozen {row['frozen_bytes'] / 2**20:.0f} MiB{peak}, error {error:.1e}"
    if "speed" in row:
        text += f"; speed {row['speed']:.3f}, bytes {row['bytes']:.3f}, {'held' if row['held'] else 'MISSED'}"
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="all", help="names, between semicolons")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--milliseconds", type=float, default=200.0, help="of a window that is measured")
    parser.add_argument("--spell", type=float, default=200.0, help="milliseconds of the same work before it")
    parser.add_argument("--kernels", metavar="SIZE", help="print this size's kernels and measure nothing")
    parser.add_argument("--device", default="cuda", help='"cpu" runs a toy size, to see that everything works')
    parser.add_argument("--report", action="store_true", help="print the newest rows")
    args = parser.parse_args(arguments)
    if args.report:
        for row in record.latest(NAME, MODE, None, "size", "storage").values():
            print(describe(row))
        return
    known = TOYS if args.device == "cpu" else SIZES
    asked = args.kernels or args.sizes
    names = list(known) if asked == "all" else asked.split(";")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no size called {unknown[0]!r}; known are all, {'; '.join(known)}")
    for name in names:
        if args.kernels:
            each_kernel(args, name, known[name])
            continue
        rows = one_size(args, name, known[name])
        for row in rows:
            print(describe(row), flush=True)
        record.append(NAME, rows)


if __name__ == "__main__":
    main()
