"""What a layout of the weights, a bias or an activation costs in `tilemoe.moe`: GPU time against the plain layer's.

    python benchmarks/layouts.py                                   # all sizes, all cells
    python benchmarks/layouts.py --sizes OLMoE --cells transposed,gpt-oss --rounds 3
    python benchmarks/layouts.py --sizes gpt-oss-20b --kernels gpt-oss
    python benchmarks/layouts.py --report

T tokens · d hidden_size · n intermediate_size · w rows of an expert's w1 · E experts · K experts per token

The plain layer has w1 (E, 2n, d) with rows [gate; up], w2 (E, d, n), no bias, swiglu; a cell differs from it as `CELLS`
says. Random routing. Every cell is checked first (`layout_gate`) and not timed if it is wrong. Then it runs forward and
backward in the same rounds as the plain layer, `GROUP` cells at a time; a ratio is the median over the rounds of its
time over the plain layer's, per FLOP. The leaves are the parameters as they are stored, so a gradient that has to be
transposed is transposed within the time that is measured; ``copies`` says whether one is.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import profiles
import torch
from layout_gate import Cell, Operands, Verdict, judge
from torch import Tensor

import tilemoe
from tilemoe.bench import gate, gpu_time, record, timing
from tilemoe.shape import MoEShape

NAME, MODE = "layouts", "gpu"
PLAIN = "plain"
GROUP = 4  # cells in the rounds with one plain layer: neighbours in time are what a ratio compares
KERNEL_STEPS = 5
SIZES = MappingProxyType(
    {
        "gpt-oss-20b": MoEShape(8192, 2880, 2880, 32, 4),
        "Qwen3-30B": MoEShape(16384, 2048, 768, 128, 8),
        "OLMoE": MoEShape(16384, 2048, 1024, 64, 8),
        "Mixtral-8x7B": MoEShape(8192, 4096, 14336, 8, 2),
    }
)
TOYS = MappingProxyType({"toy": MoEShape(256, 64, 48, 8, 2)})
CELLS = MappingProxyType(
    {
        PLAIN: Cell(),
        "interleaved": Cell(gate_up="interleaved"),
        "transposed": Cell(transposed=True),
        "transposed+interleaved": Cell(transposed=True, gate_up="interleaved"),
        # as transformers stores it
        "gpt-oss": Cell(transposed=True, gate_up="interleaved", bias=True, activation="swiglu_oai"),
        "bias": Cell(bias=True),
        "transposed+bias": Cell(transposed=True, bias=True),
        "interleaved+bias": Cell(gate_up="interleaved", bias=True),
        **{name: Cell(activation=name) for name in ("geglu", "geglu_tanh", "reglu", "swiglu_oai", "swiglu_clamped")},
        **{name: Cell(activation=name) for name in ("relu2", "gelu", "silu")},
    }
)
BOUNDS = (1.08, 1.10)  # of the ratio, forward and backward
BOUNDS_OF = MappingProxyType({"geglu": (1.08, 1.15)})  # erf and its gradient

Row = dict[str, Any]


class Layers:
    """Every cell of one size, on one input and one routing; cells that store a weight alike share it."""

    def __init__(self, shape: MoEShape, device: torch.device, dtype: torch.dtype, kernels: str | None) -> None:
        self.shape, self.kernels = shape, kernels
        self._device, self._dtype = device, dtype
        self._weights: dict[tuple[str, bool, int], Tensor] = {}
        tokens, d = shape.num_tokens, shape.hidden_size
        self.x, self.do = self._normal(tokens, d).requires_grad_(), self._normal(tokens, d)
        kept, self.ids = torch.rand(tokens, shape.num_experts, device=device).topk(shape.num_experts_per_tok, dim=1)
        self.scores = (2 * kept).softmax(dim=1).requires_grad_()
        self.plan = tilemoe.plan_topk(self.ids, shape.num_experts)

    def leaves(self, cell: Cell) -> dict[str, Tensor]:
        """x, scores and the parameters as they are stored, by the names of `tilemoe.moe`."""
        d, n, experts = self.shape.hidden_size, self.shape.intermediate_size, self.shape.num_experts
        width = self.width(cell)
        leaves = {"x": self.x, "scores": self.scores}
        leaves["w1"] = self._parameter("w1", cell.transposed, (experts, width, d), d**-0.5)
        leaves["w2"] = self._parameter("w2", cell.transposed, (experts, d, n), n**-0.5)
        if cell.bias:
            leaves["b1"] = self._parameter("b1", False, (experts, width), 0.5)
            leaves["b2"] = self._parameter("b2", False, (experts, d), 0.5)
        return leaves

    def run(self, cell: Cell) -> Tensor:
        operands: dict[str, Any] = self.leaves(cell)
        if cell.transposed:
            operands |= {name: operands[name].transpose(1, 2) for name in ("w1", "w2")}
        operands |= {"activation": cell.activation, "gate_up": cell.gate_up, "kernels": self.kernels}
        return tilemoe.moe(plan=self.plan, **operands)

    def width(self, cell: Cell) -> int:
        return self.shape.intermediate_size * (2 if cell.is_gated else 1)

    def flops(self, cell: Cell) -> int:
        """Of a routed row, in some unit."""
        return self.width(cell) + self.shape.intermediate_size

    def _normal(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self._device, dtype=self._dtype)

    def _parameter(self, name: str, transposed: bool, sizes: tuple[int, ...], scale: float) -> Tensor:
        stored = (sizes[0], *sizes[:0:-1]) if transposed else sizes
        key = (name, transposed, sizes[1])
        if key not in self._weights:
            self._weights[key] = self._normal(*stored).mul_(scale).requires_grad_()
        return self._weights[key]


def check(layers: Layers, cell: Cell, exact: torch.dtype) -> tuple[Verdict, bool]:
    """The verdict on the cell, and whether a gradient has other strides than its parameter, which costs a copy."""
    gate.poison(layers.x.device)
    leaves = layers.leaves(cell)
    out = layers.run(cell)
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), layers.do), strict=True))
    copies = any(grad.stride() != leaves[name].stride() for name, grad in grads.items())

    def plainly(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        transposed = ("w1", "w2") if cell.transposed else ()
        return {name: each.transpose(1, 2) if name in transposed else each for name, each in tensors.items()}

    found = {"o": out.detach(), **{f"d{name}": grad for name, grad in plainly(grads).items()}}
    return judge(found, Operands(plainly(leaves), layers.ids, layers.do), cell, exact), copies


def step_of(layers: Layers, cell: Cell) -> timing.Step:
    """Forward and backward as two parts; every gradient is made anew, and lies where training wants it."""
    leaves = layers.leaves(cell)

    def step() -> list[timing.Event]:
        for leaf in leaves.values():
            leaf.grad = None
        start = timing.event()
        out = layers.run(cell)
        middle = timing.event()
        out.backward(layers.do)
        return [start, middle, timing.event()]

    return step


def admitted(layers: Layers, names: list[str], exact: torch.dtype) -> dict[str, Row]:
    """Cell to what its check found; ``problem`` is None for one that may be timed."""
    found: dict[str, Row] = {}
    for name in names:
        start = time.perf_counter()
        try:
            verdict, copies = check(layers, CELLS[name], exact)
        except ValueError as error:  # the package does not compute it
            found[name] = {"problem": str(error)}
        else:
            worst = {"errors": verdict.errors, "eager_errors": verdict.eager}
            rounded = {kind: {key: float(f"{e:.3g}") for key, e in of.items()} for kind, of in worst.items()}
            found[name] = {"problem": verdict.problem, "copies": copies, **rounded}
        outcome = found[name]["problem"] or "right"
        print(f"  {name}: {outcome}, {time.perf_counter() - start:.1f} s", flush=True)
    return found


def measure(layers: Layers, names: list[str], args: argparse.Namespace) -> dict[str, Row]:
    """Times of the cells and their ratios to the plain layer, which is timed beside them."""
    steps = {name: step_of(layers, CELLS[name]) for name in dict.fromkeys([PLAIN, *names])}
    found = gpu_time.rounds(steps, args.rounds, args.spell, args.milliseconds)
    plain = list(zip(*found[PLAIN], strict=True))
    rows = {}
    for name in names:
        row: Row = {"rounds": args.rounds}
        for part, ours, theirs in zip(("fwd", "bwd"), zip(*found[name], strict=True), plain, strict=True):
            per_flop = layers.flops(CELLS[PLAIN]) / layers.flops(CELLS[name])
            row[f"{part}_ms"] = timing.summary(list(ours))
            row[f"plain_{part}_ms"] = timing.summary(list(theirs))
            row[f"ratio_{part}"] = round(per_flop * timing.ratio(list(theirs), list(ours)), 4)
        bounds = BOUNDS_OF.get(name, BOUNDS)
        row |= {"bounds": bounds, "held": row["ratio_fwd"] <= bounds[0] and row["ratio_bwd"] <= bounds[1]}
        rows[name] = row
    return rows


def one_size(args: argparse.Namespace, size: str, shape: MoEShape, names: list[str]) -> Iterator[list[Row]]:
    """Rows of a few cells at a time, those of a wrong cell with its problem alone."""
    device, dtype = torch.device(args.device), {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    layers = Layers(shape, device, dtype, args.kernel_set)
    chosen = args.kernel_set or tilemoe.select_kernels(device, dtype).name
    where = {"mode": MODE, "size": size, **asdict(shape), "dtype": args.dtype, "kernels": chosen}
    exact = torch.float64 if args.fp64 else torch.float32
    left = iter(names)
    while group := list(itertools.islice(left, GROUP)):
        start = time.perf_counter()
        checked = admitted(layers, group, exact)
        right = [name for name in group if checked[name]["problem"] is None]
        timed = measure(layers, right, args) if right else {}
        rows = [{**where, "cell": name, **checked[name], **timed.get(name, {})} for name in group]
        for row in rows:
            print(describe(row), flush=True)
        print(f"{size}: {len(group)} cells in {time.perf_counter() - start:.0f} s", flush=True)
        yield rows


def describe(row: Row) -> str:
    head = f"{row['size']:12} {row['cell']:18}"
    if row["problem"]:
        return f"{head} is left out: {row['problem']}"
    times = " ".join(f"{row[f'{part}_ms']['median']:7.3f}" for part in ("fwd", "bwd"))
    ratios = " ".join(f"{row[f'ratio_{part}']:.3f}" for part in ("fwd", "bwd"))
    worst = max(row["errors"], key=lambda name: row["errors"][name] / row["eager_errors"][name])
    error = f"{worst} {row['errors'][worst]:.2e} (eager {row['eager_errors'][worst]:.2e})"
    held, copies = "held" if row["held"] else "MISSED", ", copies" if row["copies"] else ""
    return f"{head} {times} ms, ratio {ratios} {held}{copies}; {error}"


def report(args: argparse.Namespace) -> str:
    """The matrix of the newest rows: cells by sizes, ratios forward / backward; the plain layer's milliseconds."""
    rows = record.latest(NAME, MODE, None, "dtype", "cell", "size")
    sizes = list(dict.fromkeys(size for _, _, size in rows))
    lines = [f"| {args.dtype} | {' | '.join(sizes)} |", "|---" * (len(sizes) + 1) + "|"]
    for cell in dict.fromkeys(cell for _, cell, _ in rows):
        found = [rows.get((args.dtype, cell, size)) for size in sizes]
        if any(found):
            lines.append(f"| {cell} | {' | '.join(_entry(row) for row in found)} |")
    return "\n".join(lines)


def _entry(row: Row | None) -> str:
    """Ratios, bold where a bound is missed."""
    if row is None:
        return ""
    if row["problem"]:
        return row["problem"]
    if row["cell"] == PLAIN:
        return " / ".join(f"{row[f'{part}_ms']['median']:.2f}" for part in ("fwd", "bwd")) + " ms"
    ratios = zip((row["ratio_fwd"], row["ratio_bwd"]), row["bounds"], strict=True)
    text = " / ".join(f"**{ratio:.2f}**" if ratio > bound else f"{ratio:.2f}" for ratio, bound in ratios)
    return text + (" (copies)" if row["copies"] else "")


def each_kernel(args: argparse.Namespace, size: str, shape: MoEShape) -> None:
    """Print each kernel's milliseconds in one step of a cell and of the plain layer."""
    layers = Layers(shape, torch.device(args.device), torch.bfloat16, args.kernel_set)
    for name in (PLAIN, args.kernels):
        step = step_of(layers, CELLS[name])

        def work(step: timing.Step = step) -> None:
            for _ in range(KERNEL_STEPS):
                step()

        work()
        rows = profiles.of_kernels(work)
        print(f"{size} {name}: {sum(ms for _, ms, _ in rows) / KERNEL_STEPS:.3f} ms of kernels a step")
        for kernel, milliseconds, launches in rows:
            print(f"{milliseconds / KERNEL_STEPS:9.3f} ms {launches / KERNEL_STEPS:5.1f}  {kernel[:100]}", flush=True)


def chosen(asked: str, known: Mapping[str, Any], what: str) -> list[str]:
    names = list(known) if asked == "all" else asked.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no {what} called {unknown[0]!r}; known are all, {', '.join(known)}")
    return names


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="all")
    parser.add_argument("--cells", default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=60.0, help="of a window that is measured")
    parser.add_argument("--spell", type=float, default=100.0, help="milliseconds of the same work before it")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--fp64", action="store_true", help="check against fp64 instead of fp32")
    parser.add_argument("--kernel-set", help="that computes the cells; default: the one that is chosen")
    parser.add_argument("--kernels", metavar="CELL", help="print this cell's kernels and measure nothing")
    parser.add_argument("--device", default="cuda", help='"cpu" runs a toy size, to see that everything works')
    parser.add_argument("--report", action="store_true", help="print the matrix of the newest rows")
    args = parser.parse_args(arguments)
    if args.report:
        print(report(args))
        return
    known = TOYS if args.device == "cpu" else SIZES
    cells = chosen(args.kernels or args.cells, CELLS, "cell")
    for size in chosen(args.sizes, known, "size"):
        torch.manual_seed(0)
        if args.kernels:
            each_kernel(args, size, known[size])
            continue
        for rows in one_size(args, size, known[size], cells):
            record.append(NAME, rows)
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
