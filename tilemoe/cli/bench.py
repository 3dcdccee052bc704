"""``tilemoe bench``: times and memory of the layer, its kernels or a step, against the peers that can be imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

from tyro.conf import Positional

from tilemoe.bench import cases
from tilemoe.cli.parsing import parse

_MODES = MappingProxyType(
    {
        "layer": ("burst", "sustained", "alone"),
        "kernels": ("burst", "sustained"),
        "step": ("burst", "sustained"),
        "confirm": ("burst", "sustained", "alone"),
    }
)
_PEERS = "tilemoe"
_DEFAULTS = MappingProxyType({"cuda": ("main", 7), "cpu": ("cpu", 3)})  # cases and rounds; a CPU takes two minutes


@dataclass(frozen=True)
class BenchOptions:
    """Options of ``tilemoe bench``."""

    # What is measured. confirm: kernels that never ran on this kind of GPU, after their self-test.
    what: Positional[Literal["layer", "kernels", "step", "confirm"]]
    cases: str | None = None  # "main", "all", "cpu", names, or a .json file; default: main, or cpu without a GPU
    # With commas between: tilemoe, tilemoe[BACKEND], sonic-moe, scattermoe, grouped_mm, liger, liger-cute, unsloth.
    # One that cannot be imported is left out; the others are compared with the first. Not for bench kernels. Default:
    # tilemoe; for confirm, the backend to confirm, the portable one and sonic-moe.
    peers: str | None = None
    modes: str = "burst,sustained"  # layer and confirm also have "alone": GPU time without the host's
    rounds: int | None = None  # times that each peer or kernel is measured, in turn; default: 7, or 3 without a GPU
    kernels: str | None = None  # backend of bench kernels (default: the chosen one) and confirm (default: blackwell)
    seconds: float = float("inf")  # begin no case after this many seconds


def run(arguments: Sequence[str]) -> None:
    description = f"Measure, and append to results/. Cases: {', '.join(cases.ALL)}."
    options = parse(BenchOptions, arguments, prog="tilemoe bench", description=description)
    modes = options.modes.split(",")
    if unknown := [mode for mode in modes if mode not in _MODES[options.what]]:
        raise ValueError(f"--modes of {options.what} are {', '.join(_MODES[options.what])}; got {unknown[0]!r}")
    if options.rounds is not None and options.rounds < 1:
        raise ValueError(f"--rounds must be >= 1, got {options.rounds}")
    if options.kernels is not None and options.what not in ("kernels", "confirm"):
        raise ValueError(
            f"--kernels is for bench kernels; name the backend of bench {options.what} in --peers "
            f"'tilemoe[{options.kernels}]'"
        )
    if options.peers is not None and options.what == "kernels":
        raise ValueError("--peers is for bench layer and step; name the backend of bench kernels in --kernels")
    if not options.seconds >= 0:
        raise ValueError(f"--seconds must be a number >= 0, got {options.seconds}")
    shapes = None if options.cases is None else cases.find(options.cases)
    print(f"bench {options.what}: loading PyTorch", flush=True)

    import torch

    from tilemoe.bench import confirm, kernels, layer, step
    from tilemoe.bench.record import each_case
    from tilemoe.bench.timing import Settings

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names, rounds = _DEFAULTS[device.type]
    shapes, rounds = shapes or cases.find(names), options.rounds or rounds
    print(f"on {device.type}: {', '.join(shapes)}; {rounds} rounds (--cases and --rounds set others)", flush=True)
    if options.what == "confirm":
        backend = options.kernels or "blackwell"
        portable = "triton" if device.type == "cuda" else "torch"
        peers = options.peers or f"tilemoe[{backend}],tilemoe[{portable}],sonic-moe"
        confirm.confirm(Settings(device, peers.split(","), modes, rounds, backend), shapes, options.seconds)
        return
    peers = _PEERS if options.peers is None else options.peers
    settings = Settings(device, peers.split(","), modes, rounds, options.kernels)
    measure, describe = {
        "layer": (layer.layer, layer.describe),
        "kernels": (kernels.each_kernel, kernels.describe),
        "step": (step.step, step.describe),
    }[options.what]
    each_case(options.what, shapes, partial(measure, settings), describe, options.seconds)
