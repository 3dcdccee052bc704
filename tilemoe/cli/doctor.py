"""``tilemoe doctor``: what is installed, which kernels serve a layer on which device and why, and whether they work."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tilemoe import __version__
from tilemoe.cli.parsing import parse
from tilemoe.config import MoEConfig
from tilemoe.models.presets import MOE_PRESETS, preset_named

_PACKAGES = ("torch", "triton", "numpy", "transformers", "matplotlib", "tensorboard", "wandb", "pyarrow", "torchao")
_VARIABLES = ("TILEMOE_", "TRITON_", "CUDA_VISIBLE_DEVICES")  # prefixes of environment variables that change what runs
_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class DoctorOptions:
    """Options of ``tilemoe doctor``."""

    preset: str = "olmoe-1b-7b"  # public model whose layer is examined, by its name or the beginning of it
    tokens: int = 4096  # per call
    self_test: bool = True  # compute on each device: about eight seconds per GPU, minutes on a B200
    json: bool = False  # print one line of JSON, with the commit and the machine, as in results/*.jsonl
    report: bool = False  # print Markdown for a bug report: this machine, and what is for you to say
    backend: str | None = None  # self-test only this backend, a name or module:Class, and print the verdict as JSON
    device: str = "cuda"  # for --backend
    seconds: int = 600  # for --backend: the process is ended when they have passed


def run(arguments: Sequence[str]) -> None:
    """Print the report. ValueError: a device cannot be used; the report says what to do about it."""
    description = "Which kernels are used on this machine, why, and whether their results are right; exit status 2 if "
    description += f"not. Presets: {', '.join(MOE_PRESETS)}."
    options = parse(DoctorOptions, arguments, prog="tilemoe doctor", description=description)
    if options.backend is not None:
        from tilemoe.cli.doctor_checks import judge

        print(json.dumps(asdict(judge(options.backend, options.device, options.seconds))))
        return
    if (options.device, options.seconds) != (DoctorOptions.device, DoctorOptions.seconds):
        raise ValueError("--device and --seconds are for --backend; give --backend, too, or leave them out")
    if options.tokens < 1:
        raise ValueError(f"--tokens must be >= 1, got {options.tokens}")
    if options.json and options.report:
        raise ValueError("--json and --report print the same in two forms; leave one of them out")
    preset = preset_named("--preset", options.preset)

    import torch

    from tilemoe.bench.record import provenance
    from tilemoe.cli import doctor_checks

    driver = doctor_checks.driver()
    found = _machine(preset, options.tokens, driver)
    if options.report:
        print("\n".join(_report_lines(provenance())))
    if not options.json:
        print("\n".join(_machine_lines(found)))
    start = time.perf_counter()
    findings = list(doctor_checks.environment(driver))
    for device in found["devices"] if options.self_test else ():
        findings += doctor_checks.self_test(torch.device(device))
    fatal = [finding for finding in findings if finding.is_fatal]
    found |= {
        "findings": [asdict(finding) for finding in findings],
        "self_test_seconds": round(time.perf_counter() - start, 1) if options.self_test else None,
        "usable": not fatal if fatal or options.self_test else None,  # None: not tried
    }
    print(json.dumps(found | provenance()) if options.json else "\n".join(_finding_lines(found)))
    if options.report:
        print("```")
    if fatal:
        raise ValueError(f"{len(fatal)} of the findings above keep this machine from being used; do what they say")


def _machine(preset: str, tokens: int, driver: str | None) -> dict[str, Any]:
    """What is installed, and for each device its hardware and the kernels that serve it."""
    import torch

    from tilemoe.bench.record import version

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return {
        "tilemoe": __version__,
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version(name) for name in _PACKAGES},
        "driver": driver,
        "preset": preset,
        "tokens": tokens,
        "devices": {
            device: {"hardware": _hardware(device), "choices": _choices(device, MOE_PRESETS[preset], tokens)}
            for device in devices
        },
    }


def _report_lines(where: dict[str, Any]) -> list[str]:
    """The beginning of a bug report, up to the code block that holds the rest of the output."""
    return [
        "### What happens, and what should\n",
        "(the shortest script or command, and the whole error)\n",
        "### Where\n",
        "```text",
        ", ".join(f"{name} {value}" for name, value in where.items()),
        *(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)),
    ]


def _machine_lines(found: dict[str, Any]) -> list[str]:
    lines = [
        f"tilemoe {found['tilemoe']}, Python {platform.python_version()}, {found['system']}",
        "packages: " + ", ".join(f"{name} {number or 'not installed'}" for name, number in found["packages"].items()),
        f"NVIDIA driver: {found['driver'] or 'none'}",
        f"layer: {found['preset']}, {found['tokens']} tokens",
    ]
    for device, its in found["devices"].items():
        lines += [f"{device}: {its['hardware']}", *(f"  {choice}" for choice in its["choices"])]
    return lines


def _finding_lines(found: dict[str, Any]) -> list[str]:
    """Each finding with its advice, and the verdict unless a finding is fatal."""
    lines = []
    for finding in found["findings"]:
        lines.append(finding["line"])
        if finding["advice"] is not None:
            lines.append(f"  what to do: {finding['advice']}")
    if found["usable"]:
        lines.append("usable")
    elif found["usable"] is None:
        lines.append("not tried: leave --no-self-test out to compute on each device")
    return lines


def _hardware(device: str) -> str:
    import torch

    if device == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB"
    )


def _choices(device: str, cfg: MoEConfig, tokens: int) -> list[str]:
    """One line for each choice of kernels (experts, GEMMs, router, plan, attention's projections in FP8) and for
    each backend's batch invariance: whether a token's output depends on the other tokens of its batch.
    """
    import torch

    from tilemoe.kernels.choose import Choice, choose_plan, choose_projections, choose_router, select_kernels
    from tilemoe.kernels.experts.torch.backend import TorchBackend

    found = torch.device(device)
    wanted = {f"in {name}": (getattr(torch, name), cfg) for name in _DTYPES}
    wanted["with precision fp8"] = (torch.bfloat16, replace(cfg, precision="fp8"))
    chosen = {how: select_kernels(found, *layer) for how, layer in wanted.items()}
    lines = [f"experts {how}: {experts.name} ({experts.reason})" for how, experts in chosen.items()]
    lines += _gemms(cfg) if chosen["in bfloat16"].name == "hopper" else []
    others: dict[str, Choice[Any]] = {
        "router": choose_router(found, torch.float32, cfg.num_experts, cfg.num_experts_per_tok),
        "plan": choose_plan(found, tokens * cfg.num_experts_per_tok, cfg.num_experts),
        "attention's projections with dense precision fp8": choose_projections(found),
    }
    lines += [f"{what}: {choice.name} ({choice.reason})" for what, choice in others.items()]
    backends = {experts.name: experts.impl for experts in chosen.values()}
    lines += [f"batch invariance of the experts by {name}: {each.batch_invariance}" for name, each in backends.items()]
    lines += [
        f"batch invariance of experts in {packed.upper()} by {name}: {whether}"
        for name, kernels in backends.items()
        if kernels.precision == "bf16"
        for packed, whether in kernels.packed.items()
    ]
    by_torch = TorchBackend.batch_invariance
    lines.append(f"batch invariance of the router's logits: {by_torch}; on a GPU invariance='batch' makes them so")
    return lines


def _gemms(cfg: MoEConfig) -> list[str]:
    """The Hopper kernel and the tile of each GEMM of the layer in 16 bits, or why the portable kernel runs instead."""
    from tilemoe.kernels.experts.hopper.configs import row_of
    from tilemoe.kernels.experts.triton.configs import KERNELS
    from tilemoe.perf.predict import gemm_widths

    lines = []
    for gemm in KERNELS:
        width_in, width_out = gemm_widths(gemm, cfg.hidden_size, cfg.intermediate_size, cfg.up_rows)
        row = row_of(gemm, width_in)
        why, tile = row.why_slower(width_in, width_out), row.tile
        by = f"{row.kernel}, tile {tile.block_m} x {tile.block_n}, {tile.num_stages} stages"
        lines.append(f"{gemm}: {by if why is None else f'triton ({why})'}")
    return lines
