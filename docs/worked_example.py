"""The worked example of docs/algorithm.md: 8 tokens, 4 experts, 2 per token, tiles of 2 rows, d = 2, n = 1, ReLU.

Prints the page's blocks, each step by the function of the package that computes it in training.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

import tilemoe
from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.reference.rounding import round_rows

TILE = 2
# Softmax gives p / 10, and the two kept scores are 0.75 and 0.25.
WEIGHTS = [
    [6, 2, 1, 1], [2, 6, 1, 1], [6, 1, 2, 1], [6, 2, 1, 1], [1, 2, 6, 1], [2, 1, 1, 6], [6, 2, 1, 1], [1, 1, 6, 2],
]  # fmt: skip
X = [[1, 2], [2, -1], [0, 3], [4, 0], [1, 1], [3, -2], [-1, 2], [2, 2]]
W1 = [[[1, 1]], [[2, -1]], [[0, 1]], [[1, 0]]]
W2 = [[[1], [2]], [[3], [0]], [[-1], [1]], [[2], [2]]]
DO = [[1, 0], [0, 1], [1, 1], [2, 0], [0, 2], [1, -1], [1, 2], [0, 1]]


def line(name: str, values: Tensor | list[int]) -> str:
    """One tensor: a row of numbers, or rows in brackets, without trailing zeros."""
    numbers = torch.as_tensor(values, dtype=torch.float64) + 0.0  # no -0
    rows = [" ".join(f"{value:g}" for value in row) for row in numbers.reshape(-1, numbers.shape[-1])]
    return f"{name:<22}" + (rows[0] if numbers.ndim == 1 else " ".join(f"[{row}]" for row in rows))


class Example(NamedTuple):
    """The layer's inputs and do, and what the router decided."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    do: Tensor
    logits: Tensor
    expert_ids: Tensor
    scores: Tensor
    plan: tilemoe.RoutingPlan


def example() -> Example:
    cfg = tilemoe.MoEConfig(hidden_size=2, intermediate_size=1, num_experts=4, num_experts_per_tok=2, activation="relu")
    given = (torch.tensor(values, dtype=torch.float64) for values in (X, W1, W2, DO))
    logits = torch.tensor(WEIGHTS, dtype=torch.float64).log()
    routing = tilemoe.route(logits, cfg)
    assert routing.expert_ids is not None
    scores = routing.scores.round(decimals=9)  # 0.25 and 0.75 to the last bit
    return Example(*given, logits, routing.expert_ids, scores, routing.plan)


def routed(the: Example) -> list[str]:
    counts = the.plan.rows_per_expert
    return [
        line("expert_ids", the.expert_ids),
        line("scores", the.scores),
        line("rows_per_expert", counts),
        line("padded to tiles of 2", (counts + TILE - 1) // TILE * TILE),
        line("row_start_of_expert", the.plan.row_start_of_expert),
        line("token_of_row", the.plan.token_of_row),
        line("pair_of_row", the.plan.pair_of_row),
    ]


def computed(the: Example) -> dict[str, list[str]]:
    """Forward and backward by the torch backend's kernels, and what the plain backward computes for ds."""
    kernels, spec, plan, s = TorchBackend(), activation_spec("relu"), the.plan, the.scores.flatten()
    a, h = kernels.up_proj_act(the.x, the.w1, None, plan, spec)
    y, o = kernels.down_proj(a, the.w2, None, plan), torch.empty_like(the.x)
    kernels.combine(y, s, plan, o)
    dh, ds, a_scaled = kernels.down_proj_dgrad_dact(the.do, the.w2, None, h, s, plan, spec)
    dx_rows, dx = kernels.up_proj_dgrad(dh, the.w1, plan), torch.empty_like(the.x)
    kernels.combine_grad(dx_rows, plan, dx)
    do_rows = the.do[plan.token_of_row.long()]
    ranges = enumerate(pairwise(plan.row_start_of_expert.tolist()))
    da = torch.cat([do_rows[start:end] @ the.w2[expert] for expert, (start, end) in ranges])
    backward = [
        line("da' = do w2", da.flatten()),
        line("ds of each row", ds[plan.pair_of_row.long()]),
        line("dh", dh.flatten()),
        line("a_scaled", a_scaled.flatten()),
        line("dw2", kernels.down_proj_wgrad(the.do, a_scaled, plan).flatten(1)),
        line("dx_rows", dx_rows),
        line("dw1", kernels.up_proj_wgrad(the.x, dh, plan).flatten(1)),
        line("dx", dx),
    ]
    forward = [line("h", h.flatten()), line("a", a.flatten()), line("y", y), line("o", o)]
    naive = [line("<do, y> of each row", (do_rows * y).sum(dim=1))]
    return {"forward": forward, "backward": backward, "naive": naive}


def rounded(the: Example) -> list[str]:
    lines = []
    for mode in ("nearest", "up"):
        rounding = SimpleNamespace(mode=mode, tile=TILE)  # `TokenRounding` itself has no tile below 16
        tokens = round_rows(the.logits.softmax(1).round(decimals=9), the.expert_ids, the.scores, rounding)
        lines += [f"{f'tokens of {e}, {mode}':<22}" + " ".join(map(str, mine)) for e, mine in enumerate(tokens)]
    return lines


def blocks() -> dict[str, str]:
    """Title of a block to its text."""
    the = example()
    inputs = [line("x", the.x), line("w1", the.w1.flatten(1)), line("w2", the.w2.flatten(1)), line("do", the.do)]
    named = {"routing": routed(the), "inputs": inputs, **computed(the), "rounding": rounded(the)}
    return {title: "\n".join(lines) for title, lines in named.items()}


if __name__ == "__main__":
    for title, text in blocks().items():
        print(f"{title}\n{text}\n")
