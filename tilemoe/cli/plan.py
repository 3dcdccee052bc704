"""``tilemoe plan``: FLOPs, bytes, memory and the time that a GPU cannot go below, of a layer of any size. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilemoe.cli.parsing import parse
from tilemoe.config import MoEConfig
from tilemoe.kernels.experts.memory import backward_peak_bytes, forward_peak_bytes, inference_peak_bytes, saved_bytes
from tilemoe.models.folder import CONFIG_FILE, find_folder, is_hf, read_config
from tilemoe.models.presets import moe_preset
from tilemoe.perf.costs import BACKWARD, FORWARD, kernel_costs, layer_roofline_ms, router_costs
from tilemoe.perf.hardware import DTYPE_BYTES, Gpu, find_gpu
from tilemoe.shape import MoEShape
from tilemoe.train.checkpoints.names import read_recipe

_LAYER = "olmoe-1b-7b"


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``tilemoe plan``. A width that is given replaces that of ``layer``."""

    layer: str | None = None  # public model whose layer is planned; default: olmoe-1b-7b, or that of checkpoint
    checkpoint: str | None = None  # transformers' folder, or a name on the hub, a run or a step_* folder, instead
    tokens: int = 32768  # of a call, on one GPU
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    dtype: str = "bf16"  # bf16, fp16, tf32 or fp32
    gpu: str = "H200"  # see tilemoe.perf.hardware


def run(arguments: Sequence[str]) -> None:
    options = parse(PlanOptions, arguments, prog="tilemoe plan", description="What a layer costs, by arithmetic.")
    gpu = find_gpu(options.gpu)
    shape = shape_of(options, layer_of(options))
    print("\n".join((*describe(shape, gpu, options.dtype), *kernel_table(shape, gpu, options.dtype))))


def layer_of(options: PlanOptions) -> MoEConfig:
    """The MoE layer of the folder or of the public model that the options name. ValueError: there is none."""
    if options.checkpoint is None:
        return moe_preset(options.layer or _LAYER)
    if options.layer is not None:
        raise ValueError("--checkpoint and --layer name a layer each; leave one of them out")
    folder = find_folder("--checkpoint", options.checkpoint, files=(CONFIG_FILE,))
    model = read_config(folder) if is_hf(folder) else read_recipe(folder).model
    if model.moe is None:
        raise ValueError(f"--checkpoint {options.checkpoint}: this model is dense; give one that has experts")
    return model.moe


def shape_of(options: PlanOptions, cfg: MoEConfig) -> MoEShape:
    """The layer's size, ``cfg``'s where an option does not say. ValueError names what is off."""
    if options.dtype not in DTYPE_BYTES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPE_BYTES)}; got {options.dtype!r}")
    names = ("hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")
    given = {name: getattr(options, name) for name in names}
    return MoEShape(
        num_tokens=options.tokens,
        **{name: getattr(cfg, name) if value is None else value for name, value in given.items()},
        is_gated=cfg.is_gated,
        element_bytes=DTYPE_BYTES[options.dtype],
    )


def describe(shape: MoEShape, gpu: Gpu, dtype: str) -> list[str]:
    """The layer, its weights, what it keeps and what it holds at most."""
    ceilings = gpu.ceilings(dtype)
    weights = shape.num_experts * shape.hidden_size * (shape.width + shape.intermediate_size)
    forward, backward = layer_roofline_ms(shape, ceilings)
    kind = "measured" if ceilings.is_measured else "stated"
    sizes = f"T={shape.num_tokens} d={shape.hidden_size} n={shape.intermediate_size} E={shape.num_experts}"
    rates = f"{ceilings.tflops:g} TFLOP/s and {ceilings.tbps:g} TB/s, {kind}"
    return [
        f"{sizes} K={shape.num_experts_per_tok}, {dtype}, {gpu.name} ({rates})",
        f"weights        {_gib(weights * shape.element_bytes)}   {weights / 1e6:,.0f} M parameters, the router's aside",
        f"saved          {_gib(saved_bytes(shape))}   between forward and backward, beside x",
        f"peak inference {_gib(inference_peak_bytes(shape))}   beside x and the weights",
        f"peak forward   {_gib(forward_peak_bytes(shape))}",
        f"peak backward  {_gib(backward_peak_bytes(shape))}   with all gradients",
        f"no faster than {forward:.3f} ms forward and {backward:.3f} ms backward",
    ]


def kernel_table(shape: MoEShape, gpu: Gpu, dtype: str) -> list[str]:
    """One line for each kernel and for the router's products: GFLOP, MiB, FLOP per byte, milliseconds, its bound."""
    ceilings = gpu.ceilings(dtype)
    costs = dict(kernel_costs(shape))
    costs["router, forward"], costs["router, backward"] = router_costs(shape)
    order = ("router, forward", *FORWARD, *BACKWARD, "router, backward")
    lines = [f"{'kernel':24}{'GFLOP':>10}{'MiB':>10}{'FLOP/byte':>11}{'ms':>9}  bound by"]
    for name in order:
        cost = costs[name]
        milliseconds = cost.roofline_ms(ceilings)
        by_memory = milliseconds > 1e3 * cost.flops / (ceilings.tflops * 1e12)
        lines.append(
            f"{name:24}{cost.flops / 1e9:10,.1f}{cost.bytes / 2**20:10,.0f}{cost.flops / max(cost.bytes, 1):11,.0f}"
            f"{milliseconds:9.3f}  {'memory' if by_memory else 'arithmetic'}"
        )
    return lines


def _gib(count: int) -> str:
    return f"{count / 2**30:8.2f} GiB"
