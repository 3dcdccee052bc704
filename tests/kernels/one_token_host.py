"""Microseconds of the host for the experts of one token, called by transformers, where nothing is launched.

    PYTHONPATH=benchmarks python tests/kernels/one_token_host.py [tokens]

T tokens
"""

import sys
import time
from functools import partial

import fake_driver
import small_tokens
import torch

import tilemoe.kernels.experts.hopper.backend  # noqa: F401  # before the fake is installed, as all that launches
from tilemoe.integrations import transformers as integration
from tilemoe.kernels.choose import Choice, PlanBuilder
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.plan import triton_small as plan_small
from tilemoe.ops import inference
from tilemoe.runtime import launch_cache as replayed
from tilemoe.shape import MoEShape

LAYERS, CALLS = 4, 500
SHAPE = MoEShape(1, 256, 128, 128, 8)  # the host's time does not follow the widths


def main() -> None:
    fake_driver.install_silent()
    inference.is_replayable = replayed.is_replayable
    inference.choose_experts = lambda *args: Choice("hopper", backend_named("hopper"), "")
    builder = PlanBuilder(plan_small.count_sort_small, plan_small.count_sort_small_in_one)
    inference.builder_for = lambda *args, **options: builder
    integration.register()
    layers = small_tokens.make_layers(SHAPE, LAYERS, torch.device("cpu"), torch.bfloat16)
    calls = small_tokens.make_calls(layers, int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    run = partial(small_tokens.run, layers, calls, "tilemoe")
    microseconds = []
    with torch.no_grad():
        for _ in range(CALLS):
            start = time.perf_counter()
            run()
            microseconds.append(1e6 * (time.perf_counter() - start) / LAYERS)
    microseconds.sort()
    print(f"a layer: {microseconds[0]:.1f} us at least, {microseconds[CALLS // 2]:.1f} in the median")


if __name__ == "__main__":
    main()
