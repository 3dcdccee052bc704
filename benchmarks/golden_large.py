"""The larger cases of `golden`: many tiles, waves and bands, in 16 bits. On a CPU a few of middling size.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from golden_cases import (
    A_CHOICE,
    BF16,
    FP16,
    FP32,
    LOSSES,
    MODES,
    PRESETS,
    Case,
    layer_configs,
    layouts,
    make,
    model_config,
    small_cases,
)
from golden_runs import GATED, UNGATED, Experts, Layer, Loss, Model, Plan, Route, Shape

from tilemoe import MoEConfig, RouterConfig, TokenRounding

MIDDLE = Shape(1037, 512, 256, 8, 2)
LARGE = {
    "d=512 n=256": Shape(4096, 512, 256, 8, 2),
    "d=1024 n=512": Shape(4096, 1024, 512, 32, 4),
    "d=2048 n=256, fine": Shape(4096, 2048, 256, 64, 8),
    "d=2048 n=1024": Shape(4096, 2048, 1024, 16, 4),
    "one expert": Shape(4096, 1024, 512, 1, 1),
    "ragged widths": Shape(2500, 1000, 296, 12, 3),
    "narrow": Shape(777, 64, 72, 6, 2),
    "bands of n": Shape(900, 1160, 8456, 4, 2),  # 67 column tiles of F1, 34 of B1, which have a contraction of 1160
    "bands of d": Shape(900, 2200, 1096, 4, 2),  # 18 column tiles of F2 and B3, with contractions of 1096 and 2192
    "long contraction": Shape(700, 4608, 2304, 4, 2),
}
FEW = (1, 2, 7, 8, 33, 64, 256)
FEW_OF = {"fine": Shape(1, 2048, 768, 64, 8), "coarse": Shape(1, 1024, 1408, 8, 2)}


def middling_cases() -> Iterator[Case]:
    """On a CPU, too: hundreds of rows of an expert."""
    for dtype in (FP32, FP16, BF16):
        yield from layouts("middle", Shape(300, 64, 96, 8, 2), dtype, ("swiglu", "swiglu_oai", "gelu"))


def gpu_cases() -> Iterator[Case]:
    """`small_cases` in bf16, a choice of them in fp16 and fp32, and the large ones.

    To compile less, a layout is that of the middle size, but for a few activations.
    """
    yield from (case for case in small_cases((BF16,)) if not _LAYOUTS_AT_THE_MIDDLE.match(case.name))
    for dtype in (FP16, FP32):
        yield from (case for case in small_cases((dtype,)) if case.dtype == dtype and A_CHOICE.match(case.name))
    yield from large_cases()


_LAYOUTS_AT_THE_MIDDLE = re.compile("layout/(geglu|geglu_tanh|reglu|gelu_tanh|relu|relu2|silu) ")


def large_cases() -> Iterator[Case]:
    for dtype in (BF16, FP16):
        yield from _experts(dtype)
        yield from _few_tokens(dtype)
        yield from _layers(dtype)
        yield from _others(dtype)
        every = (*GATED, *UNGATED)
        yield from layouts("middle", MIDDLE, dtype, every if dtype == BF16 else ("swiglu", "swiglu_oai", "gelu"))
    yield make("large", "fp32", Experts(MIDDLE, FP32, bias=True), FP32)
    yield from _routing()


def _experts(dtype: torch.dtype) -> Iterator[Case]:
    for what, shape in LARGE.items():
        plain = Experts(shape, dtype)
        gpt_oss = Experts(shape, dtype, "random", "swiglu_oai", "interleaved", ("w1", "w2"), bias=True)
        yield make("large", what, plain, dtype)
        yield make("large", f"{what}, ungated, bias", replace(plain, activation="relu2", bias=True), dtype)
        yield make("large", f"{what}, as gpt-oss", gpt_oss, dtype)
        yield make("large", f"{what}, inference", replace(plain, wanted=()), dtype)
        yield make("large", f"{what}, recomputed", replace(plain, options={"recompute": "up_proj"}), dtype)
    shape = LARGE["d=1024 n=512"]
    for routing in ("first and last expert empty", "all on the last", "sentinels", "pairs", "pairs, sentinels"):
        yield make("large", routing, Experts(shape, dtype, routing, bias=True), dtype)
    for spoilt in ("nan in x", "inf in w1", "large in x"):
        yield make("large", spoilt, Experts(shape, dtype, bias=True, spoilt=spoilt), dtype)


def _few_tokens(dtype: torch.dtype) -> Iterator[Case]:
    for what, shape in FEW_OF.items():
        for tokens in FEW:
            plain = Experts(replace(shape, tokens=tokens), dtype, wanted=())
            gpt_oss = replace(plain, activation="swiglu_oai", gate_up="interleaved", transposed=("w1", "w2"), bias=True)
            yield make("few", f"{what}, {tokens} tokens", plain, dtype)
            yield make("few", f"{what}, {tokens} tokens, as gpt-oss", gpt_oss, dtype)
            yield make("few", f"{what}, {tokens} tokens, training", replace(plain, wanted=None), dtype)


def _layers(dtype: torch.dtype) -> Iterator[Case]:
    for what, cfg in layer_configs(512, 256, 16, 4, 128).items():
        base = Layer(cfg, (2, 1029), dtype)
        yield make("large layer", what, base, dtype)
        yield make("large layer", f"{what}, token mask", replace(base, mask=True), dtype)
        yield make("large layer", f"{what}, inference", replace(base, inference=True, training=False), dtype)
        if not what.startswith("rounded"):
            yield make("large lora", what, replace(base, lora=(16, 32.0)), dtype)


def _others(dtype: torch.dtype) -> Iterator[Case]:
    for classes in (1000, 32000, 50257):
        yield make("large loss", f"{classes} classes", Loss(1029, 256, classes, dtype, chunk=400 * classes), dtype)
    config = model_config(256, 128, 16, 4, vocab_size=4096, max_seq_len=512)
    yield make("large model", "training", Model(config, (2, 509), dtype), dtype)
    yield make("large model", "inference", Model(config, (2, 130), dtype, tokens=4), dtype)


def _routing() -> Iterator[Case]:
    for experts, k in ((8, 2), (128, 8), (512, 10), (300, 33)):
        router = RouterConfig(**LOSSES)
        cfg = MoEConfig(64, 64, experts, k, router=router)
        for logits in ("plain", "ties", "masked"):
            spec = Route(cfg, 4099, logits=logits, mask=logits == "ties")
            yield make("large router", f"{k} of {experts}, {logits}", spec, FP32)
    for preset in PRESETS:
        cfg = MoEConfig(64, 64, 256, 8, router=RouterConfig.preset(preset))
        yield make("large router", preset, Route(cfg, 2050), FP32)
    for mode in MODES:
        for tile in (64, 128):
            cfg = MoEConfig(64, 64, 32, 4, router=RouterConfig(**LOSSES), rounding=TokenRounding(mode, tile))
            for mask in (False, True):
                spec = Route(cfg, 4099, mask=mask)
                yield make("large rounding", f"{mode}, {tile}{', token mask' if mask else ''}", spec, FP32)
    for tokens, experts, k in ((1, 128, 8), (256, 512, 10), (5000, 8, 2), (30000, 128, 8)):
        shape = Shape(tokens, 8, 8, experts, k)
        for inference in (False, True):
            name = f"{tokens} tokens, {k} of {experts}{', inference' if inference else ''}"
            yield make("large plan", name, Plan("random", shape, inference), FP32)
