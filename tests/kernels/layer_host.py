"""Microseconds of the host for routing and experts of one layer, forward and backward, where nothing is launched.

    python tests/kernels/layer_host.py [checkout ...]

One process for each checkout (default: this one), in turns, ``ROUNDS`` times, of which the second lowest counts.
Triton's Python and PyTorch's bookkeeping are real; the GPU's allocator, its driver and the router's product are not
there, so differences count, not sums.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import fake_driver
import torch

import tilemoe.kernels.experts.hopper.backend  # before the fake is installed, as all that launches
import tilemoe.kernels.plan.triton
import tilemoe.kernels.router.triton  # noqa: F401
from tilemoe import MoEConfig, RouterConfig, route
from tilemoe.kernels import choose
from tilemoe.kernels.experts import table
from tilemoe.layers.experts import Experts

HERE = Path(__file__).resolve()
ROUNDS, WARM_UP, CALLS = 8, 50, 700
T, D, N, E, K = 64, 128, 64, 16, 4  # the host's time does not follow the sizes
CFG = MoEConfig(D, N, num_experts=E, num_experts_per_tok=K, router=RouterConfig(aux_loss_coef=0.01))


def pretend() -> None:
    """From now on, CPU tensors are a Hopper GPU's, and launches do nothing."""
    fake_driver.install_silent()
    # no reason against a kernel
    choose.why_no_triton = table.why_no_triton = table.why_not_hopper_gpu = fake_driver.nothing


def measure() -> tuple[float, float]:
    """Forward and backward: the first quartile of ``CALLS``, which a busy machine moves less than the median."""
    experts = Experts(CFG, dtype=torch.bfloat16)
    x = torch.zeros(T, D, dtype=torch.bfloat16, requires_grad=True)
    logits = torch.randn(T, E, requires_grad=True)
    given = [torch.zeros(T, D, dtype=torch.bfloat16), torch.ones(())]
    times: list[tuple[float, float]] = []
    for _ in range(WARM_UP + CALLS):
        start = time.perf_counter()
        routing = route(logits, CFG, training=True)
        made = [experts(x, routing.plan, routing.scores), routing.aux_loss]
        middle = time.perf_counter()
        torch.autograd.backward(made, given)
        times.append((1e6 * (middle - start), 1e6 * (time.perf_counter() - middle)))
        for tensor in (x, logits, *experts.parameters()):
            tensor.grad = None
    forward, backward = (sorted(part)[CALLS // 4] for part in zip(*times[WARM_UP:], strict=True))
    return forward, backward


def main() -> None:
    if sys.argv[1:] == ["--here"]:
        pretend()
        print(*measure())
        return
    checkouts = [Path(name).resolve() for name in sys.argv[1:]] or [HERE.parents[2]]
    found: dict[Path, list[list[float]]] = {checkout: [] for checkout in checkouts}
    for _ in range(ROUNDS):
        for checkout in checkouts:
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            printed = subprocess.check_output([sys.executable, str(HERE), "--here"], env=environment, text=True)
            found[checkout].append([float(number) for number in printed.split()])
    for checkout, times in found.items():
        forward, backward = (sorted(part)[1] for part in zip(*times, strict=True))
        print(f"{checkout}: forward {forward:.0f} us, backward {backward:.0f} us")


if __name__ == "__main__":
    main()
