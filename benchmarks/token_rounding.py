"""Token rounding against plain top-K: the whole layer with its router, and its parts.

    python benchmarks/token_rounding.py --cases all --modes nearest
    python benchmarks/token_rounding.py --cases E256-d4096-n1024,Qwen3-Next-16k --kernels triton

T tokens · E experts · f rows of an expert under top-K · r rows that it computes

Rows go to results/token_rounding.jsonl, a case as soon as it is measured. With ``--device cpu`` toy cases run, to see
that everything works. All contestants share the weights, the input and the kernels, and are checked first: routing
against plain PyTorch on the CPU from the same logits, by pairs, scores and gradient; experts, by output and gradients,
against the torch backend on the same rows, of the very size that is timed.

"forward" and "backward" are the layer as a model calls it. The six parts are timed apart, in the same rounds. All of
it runs behind other work, so that the host is ahead and the GPU's time is measured; ``host_ms`` is what launching took.
The Hopper kernels pass by the lower half of a last tile that has no rows there, so top-K pads less with them than the
tile says; ``--kernels triton`` computes whole tiles.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

import tilemoe
from tilemoe.bench import check, peers, timing
from tilemoe.bench.record import Row, each_case, selected
from tilemoe.config import ROUNDING_MODES, MoEConfig, RouterConfig, TokenRounding
from tilemoe.plan import RoutingPlan
from tilemoe.shape import MoEShape

NAME, TOPK = "token_rounding", "top-K"
WHOLE = ("forward", "backward")
PARTS = ("logits", "routing", "experts", "experts_grad", "routing_grad", "logits_grad")
CHOSEN = "chosen"  # the backend that a user gets
TILES = MappingProxyType({"cuda": 128, "cpu": 16})
DTYPES = MappingProxyType({"cuda": torch.bfloat16, "cpu": torch.float32})
MATMUL_MS = 1.4  # of 8192^3 in bf16 on an H200
DRAWING = ("stochastic", "nearest_score")  # a GPU draws other numbers than a CPU
# Scores that differ in their last bit may change places: so many pairs may be others, or such a share of them.
MAX_OTHER_PAIRS, MAX_OTHER_SHARE = 16, 1e-4
GRAD_TOLERANCE = 1e-3
T = 16384
CASES = MappingProxyType(  # those with a promise of their own first
    {
        "E256-d4096-n1024": MoEShape(T, 4096, 1024, 256, 4),
        "Qwen3-Next-16k": MoEShape(T, 2048, 512, 512, 10),
        "Qwen3-Next-32k": MoEShape(2 * T, 2048, 512, 512, 10),
        **{f"E{e}-d1536-n256": MoEShape(T, 1536, 256, e, 8) for e in (512, 256, 128, 64)},
        **{f"E{e}-d4096-n1024": MoEShape(T, 4096, 1024, e, 4) for e in (128, 64, 32)},
        **{f"E{e}-d1536-n1024": MoEShape(T, 1536, 1024, e, 2) for e in (128, 64, 32, 16)},
    }
)
TOYS = MappingProxyType({"toy-E8": MoEShape(256, 32, 16, 8, 2), "toy-E16": MoEShape(256, 32, 16, 16, 2)})


# --------------------------------------------------------------------------------------------------- the contestants


def build(shape: MoEShape, weights: peers.Weights, rounding: TokenRounding | None, kernels: str | None) -> tilemoe.MoE:
    cfg = replace(peers.layer_config(shape), router=RouterConfig(), rounding=rounding)
    layer = tilemoe.MoE(cfg, device="meta", kernels=kernels)
    layer.router.weight, layer.experts.w1, layer.experts.w2 = weights.router, weights.w1, weights.w2
    return layer


def contestants(shape: MoEShape, modes: list[str], kernels: str, x: Tensor, do: Tensor) -> dict[str, tilemoe.MoE]:
    """Top-K and the modes, all on one set of weights. What is wrong is reported and left out."""
    weights = peers.make_weights(shape, x.device, x.dtype)
    found = {}
    for name in (TOPK, *modes):
        rounding = None if name == TOPK else TokenRounding(name, TILES[x.device.type])  # type: ignore[arg-type]
        layer = build(shape, weights, rounding, None if kernels == CHOSEN else kernels)
        problem = problem_of(layer, x, do)
        if problem is None:
            found[name] = layer
        else:
            print(f"{name} is left out: {problem}", flush=True)
    return found


def problem_of(layer: tilemoe.MoE, x: Tensor, do: Tensor) -> str | None:
    """None if its routing and its experts are right, else what is not."""
    with torch.no_grad():
        logits = layer.router(x).logits
        routing = tilemoe.route(logits, layer.cfg)
    problem = problem_of_routing(logits, layer.cfg)
    return problem or problem_of_experts(layer, x, do, routing.plan, routing.scores)


def problem_of_routing(logits: Tensor, cfg: MoEConfig) -> str | None:
    """None if ``cfg`` routes logits (T, E) as plain PyTorch does, else what is off."""
    leaves = [logits.detach().requires_grad_(), logits.detach().cpu().requires_grad_()]
    found = tilemoe.route(leaves[0], cfg)
    if cfg.rounding is not None:
        tile = cfg.rounding.tile
        r = found.tokens_per_expert.cpu()
        f = tilemoe.route(leaves[1].detach(), replace(cfg, rounding=None)).tokens_per_expert
        if bool((r % tile).any()):
            return "an expert's rows are no multiple of the tile"
        if bool(((r - f).abs() >= tile).any()):
            return "an expert's rows are a tile or more from top-K's"
        if cfg.rounding.mode in DRAWING:
            return None
    expected = tilemoe.route(leaves[1], cfg)
    dense, wanted = found.dense().cpu(), expected.dense()
    differs = (dense != 0) != (wanted != 0)
    if int(differs.sum()) > max(MAX_OTHER_PAIRS, MAX_OTHER_SHARE * found.plan.num_pairs):
        return f"{int(differs.sum())} pairs are not those of plain PyTorch"
    if not torch.allclose(dense[~differs], wanted[~differs], rtol=1e-4, atol=1e-7):
        return "the scores are not those of plain PyTorch"
    weight = torch.randn_like(wanted).masked_fill(differs, 0.0)
    (grad,) = torch.autograd.grad(found.dense(), leaves[0], weight.to(logits.device))
    (exact,) = torch.autograd.grad(wanted, leaves[1], weight)
    return check.first_off({"the gradient of the logits": check.relative(grad.cpu(), exact)}, GRAD_TOLERANCE)


def problem_of_experts(layer: tilemoe.MoE, x: Tensor, do: Tensor, plan: RoutingPlan, scores: Tensor) -> str | None:
    """None if output and gradients agree with the torch backend on the rows of ``plan``, else what does not."""
    w1, w2 = layer.experts.w1, layer.experts.w2
    inputs = {"dx": x.detach().requires_grad_(), "dw1": w1, "dw2": w2, "ds": scores.detach().requires_grad_()}
    of_set = []
    for kernels in (layer.experts.kernels, "torch"):
        check.poison(x.device)
        out = tilemoe.moe(inputs["dx"], w1, w2, plan, inputs["ds"], kernels=kernels)
        of_set.append((out.detach(), *torch.autograd.grad(out, list(inputs.values()), do)))
    errors = dict(zip(("output", *inputs), map(check.relative, *of_set), strict=True))
    return check.first_off(errors, peers.TOLERANCES["bf16"])


# ------------------------------------------------------------------------------------------------------- the clock


def whole_step(layer: tilemoe.MoE, x: Tensor, do: Tensor, ahead: Callable[[], None] = lambda: None) -> timing.Step:
    """The layer as a model calls it. Every gradient is made anew."""
    inputs = [x, layer.router.weight, layer.experts.w1, layer.experts.w2]
    return timing.forward_and_backward(lambda: layer(x).hidden, inputs, do, ahead=ahead)


def parts_step(layer: tilemoe.MoE, x: Tensor, do: Tensor, ahead: Callable[[], None]) -> timing.Step:
    """The same in six parts."""

    def work() -> Iterator[object]:
        logits, handed_on = layer.router(x)
        yield
        leaf = logits.detach().requires_grad_()
        routing = tilemoe.route(leaf, layer.cfg)
        yield
        inner, scores = handed_on.detach().requires_grad_(), routing.scores.detach().requires_grad_()
        out = layer.experts(inner, routing.plan, scores)
        yield
        d_inner, *_, d_scores = torch.autograd.grad(out, [inner, layer.experts.w1, layer.experts.w2, scores], do)
        yield
        (d_logits,) = torch.autograd.grad(routing.scores, leaf, d_scores)
        yield
        yield torch.autograd.grad((logits, handed_on), [x, layer.router.weight], (d_logits, d_inner))

    return timing.in_parts(work, ahead)


def busy(device: torch.device, milliseconds: float) -> Callable[[], None]:
    """What keeps a GPU busy for about that long, and launches in no time."""
    if device.type == "cpu":
        return lambda: None
    square = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(square)

    def run() -> None:
        for _ in range(math.ceil(milliseconds / MATMUL_MS)):
            torch.mm(square, square, out=out)

    return run


def measure(layers: dict[str, tilemoe.MoE], x: Tensor, do: Tensor, rounds: int) -> tuple[dict[str, list[Row]], Row]:
    """Contestant to, for each round, the median milliseconds of the whole and of each part; and to its host's."""
    host = {}
    for name, layer in layers.items():
        launched = timing.one_part(whole_step(layer, x, do), mark=timing.HostEvent)
        (host[name],) = timing.host_ms(launched)
    ahead = busy(x.device, 1.5 * max(host.values()))
    steps = {}
    for name, layer in layers.items():
        steps[f"{name}, whole"] = whole_step(layer, x, do, ahead)
        steps[f"{name}, parts"] = parts_step(layer, x, do, ahead)
    found = timing.rounds(steps, "sustained", rounds)
    samples = {}
    for name in layers:
        both = zip(found[f"{name}, whole"], found[f"{name}, parts"], strict=True)
        samples[name] = [dict(zip((*WHOLE, *PARTS), whole + parts, strict=True)) for whole, parts in both]
    return samples, host


# -------------------------------------------------------------------------------------------------------- the rows


def waste(tokens_per_expert: Tensor, tile: int) -> float:
    """Percent by which rows padded to ``tile`` exceed the rows."""
    rows = tokens_per_expert.double()
    padded = torch.ceil(rows / tile) * tile
    return round(100 * float(padded.sum() / rows.sum() - 1), 3)


def summarise(samples: dict[str, list[Row]], counts: dict[str, Tensor], tile: int) -> dict[str, Row]:
    """Contestant to its row: medians, and ratios round by round against top-K."""

    def totals(name: str, parts: tuple[str, ...]) -> list[float]:
        return [sum(sample[part] for part in parts) for sample in samples[name]]

    rows = {}
    for name in samples:
        row: Row = {"contestant": name, "rows": int(counts[name].sum())}
        row |= {f"{part}_ms": timing.summary(totals(name, (part,))) for part in PARTS}
        change = counts[name] - counts[TOPK]
        row |= {"added": int(change.clamp(min=0).sum()), "dropped": int((-change).clamp(min=0).sum())}
        # Some kernels pad to half the tile.
        row |= {"waste_percent": waste(counts[name], tile), "waste_half_tile_percent": waste(counts[name], tile // 2)}
        for label, parts in (("forward", WHOLE[:1]), ("backward", WHOLE[1:]), ("total", WHOLE)):
            row[f"{label}_ms"] = timing.summary(totals(name, parts))
            row[f"{label}_speedup"] = timing.ratio(totals(name, parts), totals(TOPK, parts))
        routing, total = totals(name, ("routing", "routing_grad")), totals(name, WHOLE)
        shares = [100 * a / b for a, b in zip(routing, total, strict=True)]
        rows[name] = {**row, "routing_percent": round(statistics.median(shares), 3)}
    return rows


def describe(row: Row) -> str:
    whole = " + ".join(f"{row[f'{part}_ms']['median']:.3f}" for part in WHOLE)
    parts = " ".join(f"{part} {row[f'{part}_ms']['median']:.3f}" for part in PARTS)
    speed = " ".join(f"{row[f'{part}_speedup']:.3f}x" for part in ("forward", "backward", "total"))
    pads = f"{row['waste_percent']:.1f}% / {row['waste_half_tile_percent']:.1f}%"
    line = (
        f"{row['case']} {row['kernels']} {row['contestant']}: {whole} ms, {speed}; {parts}, host {row['host_ms']:.2f}"
    )
    return f"{line}; routing {row['routing_percent']:.1f}%, padding to tiles / halves {pads}"


def one_case(kernels: str, args: argparse.Namespace, name: str, shape: MoEShape) -> Iterator[list[Row]]:
    """The rows of a case; none where top-K is wrong."""
    torch.manual_seed(0)
    tile = TILES[args.device]
    x = torch.randn(shape.num_tokens, shape.hidden_size, device=args.device, dtype=DTYPES[args.device])
    x, do = x.requires_grad_(), torch.randn_like(x)
    layers = contestants(shape, args.modes, kernels, x, do)
    if TOPK not in layers:
        return
    with torch.no_grad():
        logits = layers[TOPK].router(x).logits  # of all of them
        counts = {each: tilemoe.route(logits, layer.cfg).plan.rows_per_expert.cpu() for each, layer in layers.items()}
    samples, host = measure(layers, x, do, args.rounds)
    chosen = tilemoe.select_kernels(x.device, x.dtype, layers[TOPK].cfg).name
    where = {
        "case": name, **asdict(shape), "mode": "sustained", "kernels": kernels,
        "kernel_set": chosen if kernels == CHOSEN else kernels, "tile": tile, "rounds": args.rounds,
    }  # fmt: skip
    rows = summarise(samples, counts, tile)
    yield [{**where, **row, "host_ms": round(host[each], 3)} for each, row in rows.items()]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(TILES), default="cuda")
    parser.add_argument("--cases", default="all", help='"all" or names, separated by commas')
    parser.add_argument("--modes", default="nearest", help='"all" or modes, separated by commas')
    parser.add_argument("--kernels", default=CHOSEN, help='"chosen", or names of backends, separated by commas')
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    shapes = selected("case", args.cases, CASES if args.device == "cuda" else TOYS)
    args.modes = list(selected("mode", args.modes, dict.fromkeys(ROUNDING_MODES)))
    for kernels in args.kernels.split(","):
        each_case(NAME, shapes, partial(one_case, kernels, args), describe)


if __name__ == "__main__":
    main()
