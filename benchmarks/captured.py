"""A contestant's forward and backward as two CUDA graphs: timed so, it is its kernels that count and no host.

T tokens · d hidden_size
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peers
import timing
import torch
from torch import Tensor

TOLERANCE = 1e-2  # RMS, of a replay to a call: sums by atomics differ from call to call


def step(contestant: peers.Contestant, x: Tensor, do: Tensor) -> timing.Step | str:
    """Forward and backward of x (T, d) as two parts, replayed; or why not."""
    wanted = call(contestant, x, do)
    try:
        forward, backward, outputs = capture(contestant, x, do)
    except RuntimeError as error:  # it waits for the GPU, for one
        return f"it cannot be captured: {str(error).splitlines()[0]}"
    for output in outputs:  # what a replay does not write shows
        output.fill_(float("nan"))
    forward()
    backward()
    for name, found, want in zip(("output", "dx", "drouter", "dw1", "dw2"), outputs, wanted, strict=True):
        error = float((found - want).float().norm() / want.float().norm())
        if not error <= TOLERANCE:
            return f"{name} of a replay is off by {error:.1e}"
    del wanted

    def replay() -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        start = timing.event()
        forward()
        middle = timing.event()
        backward()
        return [(start, middle), (middle, timing.event())]

    return replay


def call(contestant: peers.Contestant, x: Tensor, do: Tensor) -> list[Tensor]:
    """The output and the gradients of x, router, w1 and w2, launched as ever."""
    out = contestant.run(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *contestant.leaves], do)]


def capture(
    contestant: peers.Contestant, x: Tensor, do: Tensor
) -> tuple[Callable[[], Any], Callable[[], Any], list[Tensor]]:
    """What replays the forward, what replays the backward after it, and what they write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # whatever is recorded for a layout the second time it comes
            call(contestant, x, do)
    torch.cuda.current_stream().wait_stream(side)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        out = contestant.run(x)
    with torch.cuda.graph(backward, pool=forward.pool()):
        grads = torch.autograd.grad(out, [x, *contestant.leaves], do)
    return forward.replay, backward.replay, [out.detach(), *grads]
