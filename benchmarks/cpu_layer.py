"""The layer on CPU, forward and backward, against transformers' MoE block with its `grouped_mm` experts.

    python benchmarks/cpu_layer.py

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token

Two comparisons, each in bf16 and fp32: the experts alone, given the same ids and scores, and the whole layer with its
router. Each is timed with one routing throughout, and with another one in every round, as in training, where no two
batches route alike. Both sides hold the same weights; a speed is printed only if outputs and gradients agree first.
Rounds are interleaved and the side that goes first alternates, because the clock moves more than the difference.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import tilemoe
from tilemoe.bench import check, record, timing

T, D, N, E, K = 2048, 512, 256, 32, 4
WARM_UP = 3  # rounds
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}  # RMS error over RMS value


@dataclass
class Side:
    """One contestant: ``run(x)`` gives the output; ``leaves`` get gradients, in the same order on both sides."""

    name: str
    run: Callable[[Tensor], Tensor]
    leaves: list[Tensor]

    def step(self, x: Tensor, do: Tensor) -> timing.Step:
        return timing.forward_and_backward(lambda: self.run(x), [x, *self.leaves], do)


def build(dtype: torch.dtype) -> tuple[nn.Module, tilemoe.MoE]:
    """transformers' block and ours, in ``dtype``, with equal weights."""
    hf_config = Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=N, num_experts=E, num_experts_per_tok=K, norm_topk_prob=True
    )
    hf_config._experts_implementation = "grouped_mm"
    theirs = Qwen3MoeSparseMoeBlock(hf_config).to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.02)
    ours = tilemoe.MoE(tilemoe.MoEConfig(D, N, E, K), dtype=dtype)
    with torch.no_grad():
        ours.router.weight.copy_(theirs.gate.weight)
        ours.experts.w1.copy_(theirs.experts.gate_up_proj)
        ours.experts.w2.copy_(theirs.experts.down_proj)
    return theirs, ours


@dataclass
class Comparison:
    """Two sides and ``reroute()``, which gives both the same new routing."""

    name: str
    sides: list[Side]
    reroute: Callable[[], None]


def experts_alone(theirs: nn.Module, ours: tilemoe.MoE, x: Tensor) -> Comparison:
    """Both get the same ids and scores; sorting them by expert is part of the work."""
    ids = torch.empty(T, K, dtype=torch.int64)
    scores_ours = torch.empty(T, K, requires_grad=True)
    scores_theirs = torch.empty(T, K, dtype=x.dtype, requires_grad=True)

    def reroute() -> None:
        scores, new_ids = torch.randn(T, E).softmax(-1).topk(K)
        with torch.no_grad():
            for old, new in ((ids, new_ids), (scores_ours, scores), (scores_theirs, scores)):
                old.copy_(new)

    def run_ours(x: Tensor) -> Tensor:
        return ours.experts(x, tilemoe.plan_topk(ids, E), scores_ours)

    def run_theirs(x: Tensor) -> Tensor:
        return theirs.experts(x, ids, scores_theirs)

    reroute()
    sides = [
        Side("tilemoe", run_ours, [ours.experts.w1, ours.experts.w2, scores_ours]),
        Side("transformers", run_theirs, [theirs.experts.gate_up_proj, theirs.experts.down_proj, scores_theirs]),
    ]
    return Comparison("experts", sides, reroute)


def whole_layer(theirs: nn.Module, ours: tilemoe.MoE, x: Tensor) -> Comparison:
    """Router included; another x is another routing."""

    def reroute() -> None:
        with torch.no_grad():
            x.copy_(torch.randn(x.shape))

    def run_ours(x: Tensor) -> Tensor:
        return ours(x).hidden

    def run_theirs(x: Tensor) -> Tensor:
        out = theirs(x[None])
        return (out[0] if isinstance(out, tuple) else out)[0]

    sides = [
        Side("tilemoe", run_ours, [ours.experts.w1, ours.experts.w2, ours.router.weight]),
        Side("transformers", run_theirs, [theirs.experts.gate_up_proj, theirs.experts.down_proj, theirs.gate.weight]),
    ]
    return Comparison("layer", sides, reroute)


def gradients(side: Side, x: Tensor, do: Tensor) -> list[Tensor]:
    out = side.run(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *side.leaves], do)]


def check_agreement(theirs: nn.Module, ours: tilemoe.MoE, x: Tensor, do: Tensor) -> None:
    """Raise SystemExit unless both comparisons agree, in outputs and in every gradient.

    The layers are compared in fp32: transformers computes the logits in the layer's dtype, and in bf16 that picks other
    experts for the tokens whose choice is close.
    """
    compare(experts_alone(theirs, ours, x).sides, x, do)
    theirs, ours = copy.deepcopy(theirs).float(), copy.deepcopy(ours).float()
    x = x.detach().float().requires_grad_()
    compare(whole_layer(theirs, ours, x).sides, x, do.float())


def compare(sides: list[Side], x: Tensor, do: Tensor) -> None:
    names = ("output", "dx", *(f"gradient {index}" for index in range(len(sides[0].leaves))))
    errors = map(check.relative, gradients(sides[0], x, do), gradients(sides[1], x, do))
    problem = check.first_off(dict(zip(names, errors, strict=True)), TOLERANCE[x.dtype])
    if problem is not None:
        raise SystemExit(f"the two sides disagree: {problem} in {x.dtype}; nothing was timed")


def measure(case: Comparison, routing: str, x: Tensor, do: Tensor, rounds: int) -> record.Row:
    def before(index: int) -> None:
        if routing == "new each round":
            case.reroute()

    steps = {side.name: side.step(x, do) for side in case.sides}
    found = timing.in_turn(steps, rounds + WARM_UP, before)
    row: record.Row = {"what": case.name, "routing": routing, "rounds": rounds}
    totals = {}
    for name, marks in found.items():
        forward, backward = timing.medians(marks[WARM_UP:])
        totals[name] = [start.elapsed_time(end) for start, _, end in marks[WARM_UP:]]
        total = timing.summary(totals[name])
        row[f"{name}_ms"] = {
            "forward": round(forward, 2),
            "backward": round(backward, 2),
            "total": round(total["median"], 2),
            "total_p20": round(total["p20"], 2),
            "total_p80": round(total["p80"], 2),
        }
    row["speedup"] = round(timing.ratio(totals["tilemoe"], totals["transformers"]), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        theirs, ours = build(dtype)
        x = torch.randn(T, D).to(dtype).requires_grad_()
        do = torch.randn(T, D).to(dtype)
        check_agreement(theirs, ours, x, do)
        shape = {"dtype": str(dtype).removeprefix("torch."), "T": T, "d": D, "n": N, "E": E, "K": K}
        for case in (experts_alone(theirs, ours, x), whole_layer(theirs, ours, x)):
            for routing in ("fixed", "new each round"):
                row = {**measure(case, routing, x, do, rounds), **shape, "transformers": transformers.__version__}
                print(json.dumps(row))
                rows.append(row)
    record.append("cpu_layer", rows)


if __name__ == "__main__":
    main()
