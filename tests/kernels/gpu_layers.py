"""Whole layers for tests on a GPU; run as a program, one of each is made and differentiated, and what Triton compiled
is printed as JSON: {"compiled": kernels compiled, "cached": kernels found in its cache}.

T tokens · d hidden_size
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from tilemoe.config import MoEConfig, RouterConfig, TokenRounding
from tilemoe.layers.moe import MoE

_LOSSES = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01}
_SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 32, "num_experts_per_tok": 4}


def _config(router: dict[str, Any] | None = None, **changes: Any) -> MoEConfig:
    return MoEConfig(**{**_SIZES, **changes}, router=RouterConfig(**_LOSSES, **(router or {})))


_BIASED: dict[str, Any] = {"activation": "swiglu_oai", "gate_up": "interleaved", "expert_bias": True}
_GROUPS = {"score": "sigmoid", "scale": 2.5, "selection_bias": True, "num_groups": 8, "top_groups": 4}
_SHARED: dict[str, Any] = {"activation": "geglu", "shared_intermediate_size": 64, "shared_gate": True}
_LATE = {"softmax_after_topk": True, "bias": True}
# Name to configuration, dtype and backend: None is what is chosen on this GPU, which in fp32 is not Triton.
LAYERS: dict[str, tuple[MoEConfig, torch.dtype, str | None]] = {
    "softmax": (_config(), torch.bfloat16, None),
    "portable": (_config(), torch.bfloat16, "triton"),
    "invariant": (_config(invariance="batch"), torch.bfloat16, None),
    "biased": (
        _config(_LATE, **_BIASED, hidden_size=192, num_experts=12, num_experts_per_tok=3), torch.bfloat16, None,
    ),
    "rounded": (_config(rounding=TokenRounding("nearest", 16)), torch.bfloat16, None),
    "balanced": (_config(rounding=TokenRounding("balance", 16)), torch.bfloat16, None),
    "grouped": (_config(_GROUPS, **_SHARED, intermediate_size=72, num_experts_per_tok=6), torch.float16, None),
    "fp32": (_config(activation="gelu", num_experts=5, num_experts_per_tok=2), torch.float32, "triton"),
}  # fmt: skip
_OF_FP8: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 384, "num_experts": 8, "num_experts_per_tok": 2}
LAYERS_IN_FP8: dict[str, tuple[MoEConfig, torch.dtype, str | None]] = {
    "fp8": (_config(**_OF_FP8, precision="fp8"), torch.bfloat16, None),
    "fp8, wide": (
        _config(hidden_size=2304, intermediate_size=2048, num_experts=8, expert_bias=True, precision="fp8"),
        torch.bfloat16, None,
    ),
    "h in fp8": (_config(**_OF_FP8, save="fp8"), torch.bfloat16, None),
}  # fmt: skip


def make_layer(name: str, device: str = "cuda") -> MoE:
    """A layer of `LAYERS` or `LAYERS_IN_FP8` whose router is decided and whose biases are not zero."""
    cfg, dtype, kernels = (LAYERS | LAYERS_IN_FP8)[name]
    torch.manual_seed(0)
    layer = MoE(cfg, device=device, dtype=dtype, kernels=kernels)
    with torch.no_grad():
        for key, tensor in layer.state_dict().items():
            scale = 0.2 if key.endswith(("bias", "b1", "b2")) else tensor.shape[-1] ** -0.5
            tensor.copy_(torch.randn(tensor.shape) * scale)
    return layer


def make_input(layer: MoE, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """x and the gradient of the output, (T, d) each, on the layer's device and in its dtype."""
    weight = layer.experts.w1
    generator = torch.Generator().manual_seed(seed)
    x, do = (torch.randn(tokens, layer.cfg.hidden_size, generator=generator).to(weight) for _ in range(2))
    return x.requires_grad_(), do


def step(layer: Any, x: Tensor, do: Tensor) -> dict[str, Tensor]:
    """One forward and backward, router and losses included: the outputs and the gradients of x and of all parameters.

    ``layer``: a MoE, or its compiled form.
    """
    parameters = dict(layer.named_parameters())
    out = layer(x)
    grads = torch.autograd.grad((out.hidden, out.aux_loss), [x, *parameters.values()], (do, None))
    return {
        "hidden": out.hidden.detach(),
        "aux_loss": out.aux_loss.detach(),
        "tokens_per_expert": out.tokens_per_expert,
        **dict(zip(["dx", *parameters], grads, strict=True)),
    }


@contextmanager
def never_repeated() -> Iterator[None]:
    """No operator is repeated from a recording inside.

    Not by a Mock's return value: it would keep the tensors that it is asked about, so their graphs, so their streams.
    """

    def is_replayable(first: Tensor) -> bool:
        return False

    with mock.patch("tilemoe.runtime.operator.is_replayable", is_replayable):
        yield


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Whatever waits for the GPU inside is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def aside() -> Iterator[None]:
    """On a stream of its own, as what is to be captured has to run before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


@contextmanager
def compilations() -> Iterator[dict[str, list[str]]]:
    """Names of the kernels that Triton compiles inside, or finds on disk; those this process has met are in neither."""
    found: dict[str, list[str]] = {"compiled": [], "cached": []}

    def listen(*, src: Any, cache_hit: bool, **_rest: Any) -> None:
        found["cached" if cache_hit else "compiled"].append(src.name)

    before, triton.knobs.compilation.listener = triton.knobs.compilation.listener, listen
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = before


if __name__ == "__main__":
    with compilations() as names:
        for each in LAYERS:
            made = make_layer(each)
            step(made, *make_input(made, 300))
    print(json.dumps(names))
