"""Compile launches for a GPU that is not there, and read what came out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import mangle_type

import tilemoe.kernels.experts.triton.backend  # noqa: F401  # which would be imported where it is first asked for
from tilemoe.activations import REGISTRY, ActivationSpec, activation_spec
from tilemoe.kernels.experts.hopper.backend import HopperBackend
from tilemoe.kernels.experts.triton.configs import WITH_ACTIVATION, Kernel
from tilemoe.kernels.experts.triton.tiles import tile_lists_launch
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch

KB = 1024
# By compute capability.
NVIDIA = {
    80: Device(80, 163 * KB, 108),
    90: Device(90, 227 * KB, 132),
    100: Device(100, 227 * KB, 148),
    120: Device(120, 99 * KB, 170),
}
# For tests: those that have run these kernels, and the newer ones, which nobody has.
CAPABILITIES = [80, 90, *(pytest.param(capability, marks=pytest.mark.thorough) for capability in (100, 120))]
# The matrix unit's instruction, by compute capability.
MATRIX_UNIT = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
MI300, GFX942 = Device(0, 64 * KB, 304), GPUTarget("hip", "gfx942", 64)

_AMD_SPILLS = ("private_segment_fixed_size", "vgpr_spill_count")
_MAKING_IR = Lock()  # Triton's code generator sets and resets Python's filters of warnings, which threads share
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@contextmanager
def recorded_launches(device: Device) -> Iterator[list[Launch]]:
    """Inside, the Triton kernels take CPU tensors for those of ``device``, and what they launch is listed, not run."""
    launches: list[Launch] = []
    users = [
        module
        for name, module in sys.modules.items()
        if name.startswith("tilemoe.kernels.") and hasattr(module, "device_of")
    ]
    with ExitStack() as patches:
        for module in users:
            patches.enter_context(mock.patch.object(module, "device_of", return_value=device))
        patches.enter_context(mock.patch.object(Launch, "run", lambda launch: launches.append(launch)))
        yield launches


class Operands(NamedTuple):
    """A layer's, of no certain values: 2 experts, 2 per token; the plan has lists of all tiles."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    h: Tensor
    a: Tensor
    s: Tensor
    plan: RoutingPlan
    spec: ActivationSpec


def make_operands(
    activation: str = "swiglu",
    gate_up: str = "concatenated",
    *,
    transposed: bool = False,
    bias: bool = False,
    widths: tuple[int, int] = (1536, 256),
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 64,
) -> Operands:
    """``transposed``: weights of the other stride order. ``widths``: hidden and intermediate size."""
    (d, n), experts = widths, 2
    spec = activation_spec(activation, gate_up, None, None)
    width = spec.width_factor * n
    plan = plan_topk(torch.arange(2 * tokens).view(tokens, 2) % experts, experts)
    list_tiles(plan)
    x, w1, w2 = (torch.empty(shape, dtype=dtype) for shape in [(tokens, d), (experts, width, d), (experts, d, n)])
    w1, w2 = (torch.empty(w.mT.shape, dtype=dtype).mT for w in (w1, w2)) if transposed else (w1, w2)
    b1, b2 = (x.new_empty(experts, width), x.new_empty(experts, d)) if bias else (None, None)
    h, a = (x.new_empty(2 * tokens, columns) for columns in (width, n))
    return Operands(x, w1, w2, b1, b2, h, a, torch.empty(2 * tokens), plan, spec)


def list_tiles(plan: RoutingPlan) -> None:
    """Lists that are not filled, of any height that a kernel takes: nothing is launched for them."""
    for heights in ((16, 32), (64, 128), (192, 1024)):
        _, lists = tile_lists_launch(plan, *heights)
        plan.tiles.update(zip(heights, lists, strict=True))


def row_gemm_launch(host: ModuleType, kernel: str, of: Operands, device: Device) -> Launch:
    """Of a GEMM over routed rows, by a backend's ``host``."""
    launch: Launch
    if kernel == "up_proj_act":
        launch = host.up_proj_act_launch(of.x, of.w1, of.b1, of.plan, of.spec, True, device)[0]
    elif kernel == "down_proj_dgrad_dact":
        launch = host.dgrad_dact_launch(of.x, of.w2, of.h, of.s, of.plan, of.spec, device)[0]
    elif kernel == "down_proj":
        launch = host.rows_launch("down_proj", of.a, of.w2.transpose(1, 2), of.b2, of.plan, device)[0]
    else:
        launch = host.rows_launch("up_proj_dgrad", of.h, of.w1, None, of.plan, device)[0]
    return launch


class Cell(NamedTuple):
    """A GEMM of a backend and the layout of its operands. gate_up: "none" without a gate. widths: d and n.

    transposed: the weights' other stride order. described: whether TMA can describe the rows to gather. adds: a weight
    gradient is accumulated. keeps_h: up_proj is of training.
    """

    kernel: Kernel
    activation: str = "swiglu"
    gate_up: str = "concatenated"
    transposed: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    widths: tuple[int, int] = (1536, 256)
    described: bool = True
    adds: bool = False
    keeps_h: bool = True

    @property
    def family(self) -> tuple[Kernel, str, str]:
        return self.kernel, self.activation, self.gate_up

    @property
    def name(self) -> str:
        flags = [name for name in ("transposed", "bias", "adds") if getattr(self, name)]
        others = ["copies"] * (not self.described) + ["inference"] * (not self.keeps_h)
        return "-".join([*self.family, *flags, *others, str(self.dtype)[6:], *map(str, self.widths)])


def cells_with_activation(dtype: torch.dtype, widths: tuple[int, int]) -> list[Cell]:
    """up_proj and down_proj_dgrad with every activation of the registry, each layout, and with and without biases."""
    return [
        Cell(kernel, activation, gate_up, transposed, bias, dtype, widths)
        for kernel, (activation, entry) in product(WITH_ACTIVATION, REGISTRY.items())
        for gate_up in (("concatenated", "interleaved") if entry.is_gated else ("none",))
        for transposed, bias in product((False, True), repeat=2)
    ]


def launch_of_cell(cell: Cell, backend: HopperBackend, device: Device) -> Launch | None:
    """What the backend launches for it; None where that is a portable kernel."""
    gate_up = "concatenated" if cell.gate_up == "none" else cell.gate_up
    layout = {"transposed": cell.transposed, "bias": cell.bias, "widths": cell.widths, "dtype": cell.dtype}
    of = make_operands(cell.activation, gate_up, **layout)
    gathered = of.x if cell.described else of.x[:1].expand(of.x.shape)  # all rows are one
    with recorded_launches(device) as launches:
        if cell.kernel == "up_proj_act":
            up_proj = backend.up_proj_act if cell.keeps_h else backend.up_proj_act_inference
            up_proj(gathered, of.w1, of.b1, of.plan, of.spec)
        elif cell.kernel == "down_proj_dgrad_dact":
            backend.down_proj_dgrad_dact(gathered, of.w2, of.b2, of.h, of.s, of.plan, of.spec)
        elif cell.kernel == "down_proj":
            backend.down_proj(of.a, of.w2, of.b2, of.plan)
        elif cell.kernel == "up_proj_dgrad":
            backend.up_proj_dgrad(of.h, of.w1, of.plan)
        elif cell.kernel == "down_proj_wgrad":
            backend.down_proj_wgrad(gathered, of.a, of.plan, cell.transposed, of.w2.float() if cell.adds else None)
        else:
            backend.up_proj_wgrad(gathered, of.h, of.plan, cell.transposed, of.w1.float() if cell.adds else None)
    found = [launch for launch in launches if launch.kernel.is_gluon()]
    assert len(found) <= 1
    return found[0] if found else None


def compiled_key(launch: Launch) -> str:
    """All that is compiled apart: the numbers that a kernel is specialised on, its constants and its options."""
    specialised = {parameter.name for parameter in launch.kernel.params if not parameter.do_not_specialize}
    numbers = [(name, value) for name, value in launch.args.items() if isinstance(value, int) and name in specialised]
    return str((launch.kernel.fn.__name__, numbers, launch.constants, launch.options))


def code_key(launch: Launch) -> tuple[str, str]:
    """Equal for launches of one code: the kernel's source, types and alignment of arguments, constants, options."""
    return _key(_source_of(launch), launch.options)


def compile_launch(launch: Launch, target: int | GPUTarget) -> Any:
    """Triton's compiled kernel, specialised on the arguments as a launch would be. An int: an NVIDIA capability."""
    return _compile(_source_of(launch), launch.options, target)


def compile_launches(launches: Iterable[Launch], target: int | GPUTarget) -> list[tuple[Launch, Any]]:
    """Each with what `compile_launch` makes of it: several at the same time, and none twice."""
    found, sources = [], {}
    for launch in launches:
        source = _source_of(launch)
        key = _key(source, launch.options)  # parses: before the threads do, beside which CPython 3.11 may fail
        sources.setdefault(key, (source, launch.options))
        found.append((launch, key))
    with ThreadPoolExecutor() as threads:
        begun = {key: threads.submit(_compile, *source, target) for key, source in sources.items()}
    return [(launch, begun[key].result()) for launch, key in found]


def _key(source: Any, options: dict[str, Any]) -> tuple[str, str]:
    return source.hash(), str(options)


def _source_of(launch: Launch) -> Any:
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.constants[name] if name in launch.constants else launch.args[name]
        specialised = isinstance(value, int) and not parameter.do_not_specialize
        if name in launch.constants or value is None or (specialised and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = "fp32" if isinstance(value, float) else mangle_type(value)
        if (isinstance(value, Tensor) and value.data_ptr() % 16 == 0) or (specialised and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    return source(launch.kernel, signature, constants, attributes)


def _compile(source: Any, options: dict[str, Any], target: int | GPUTarget) -> Any:
    make_ir = source.make_ir

    def make_ir_alone(*args: Any, **kwargs: Any) -> Any:
        with _MAKING_IR:
            return make_ir(*args, **kwargs)

    source.make_ir = make_ir_alone
    return triton.compile(
        source, target=target if isinstance(target, GPUTarget) else GPUTarget("cuda", target, 32), options=options
    )


def stack_bytes(compiled: Any, folder: Path) -> int:
    """A thread's stack in the machine code for an NVIDIA GPU: what registers could not hold lies there."""
    usage = _cuobjdump("-res-usage", compiled, folder)
    (stack,), (local,) = re.findall(r"STACK:(\d+)", usage), re.findall(r"LOCAL:(\d+)", usage)
    assert int(local) == 0, "local memory beside the stack"
    return int(stack)


def amd_spills(compiled: Any) -> int:
    """Bytes of scratch memory and spilled registers of the machine code for an AMD GPU."""
    found = [re.findall(rf"\.{what}: +(\d+)", compiled.asm["amdgcn"]) for what in _AMD_SPILLS]
    return sum(int(count) for (count,) in found)


def count_spill_loads(compiled: Any, folder: Path) -> int:
    """Loads from local memory in the machine code: what registers could not hold."""
    if stack_bytes(compiled, folder) == 0:  # nothing to load: spares half a second of disassembling
        return 0
    return len(re.findall(r"\bLDL", machine_code(compiled, folder)))


def machine_code(compiled: Any, folder: Path) -> str:
    """The instructions for an NVIDIA GPU, a line each."""
    dump = _cuobjdump("-sass", compiled, folder)
    assert "EXIT" in dump, "no machine code in the dump"
    return dump


def _cuobjdump(what: str, compiled: Any, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    command = [os.fspath(_CUOBJDUMP), what, os.fspath(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def ptxas_messages(compiled: Any, capability: int, folder: Path) -> str:
    """What the assembler that Triton takes says of a kernel: registers, spills, and C75.. if it serialises wgmma."""
    path, ptx = folder / "kernel.ptx", str(compiled.asm["ptx"])
    path.write_text(ptx)
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.M)
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", os.fspath(path), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout + done.stderr


def bytes_of_copies(ptx: str) -> set[int]:
    """How many bytes the cp.async instructions take at a time."""
    found = re.findall(r"cp\.async\.c[ga]\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+)", ptx)
    return {int(size, 16) for size in found}


def count_loads_of_two_bytes(ptx: str) -> int:
    """Loads from global memory of a single 16-bit element."""
    return len(re.findall(r"\bld\.global\S*\.b16\s", ptx)) - len(re.findall(r"\bld\.global\S*\.v[24]\.b16\s", ptx))


ANY_BARRIER = r"bar(?:rier)?(?:\.warp)?\.sync"


def in_order(ptx: str, letters: dict[str, str]) -> str:
    """The instructions that patterns, of no groups, match, as the letters that ``letters`` has for them."""
    found = re.finditer(rf"^.*?(?:{'|'.join(f'({pattern})' for pattern in letters)})", ptx, re.M)
    return "".join(list(letters.values())[(match.lastindex or 0) - 1] for match in found)


def assert_threads_meet_before_tma_stores(ptx: str, at_least: int = 2) -> None:
    """One thread starts a store of what all have written: each of them must have passed its fence before.

    at_least: the stores to be found.
    """
    stores = r"cp\.(?:async|reduce\.async)\.bulk\.tensor\.\w+\.global"
    order = in_order(ptx, {r"fence\.proxy\.async": "f", r"bar(?:rier)?\.sync": "|", stores: "s"})
    assert re.match("[^f]*s", order) is None, "a store before any fence"
    assert re.search(r"f[^|]*s", order) is None, "a store that the threads do not meet before"
    assert order.count("s") >= at_least


def assert_threads_meet_after_tile_info(ptx: str) -> None:
    """One thread arrives at an mbarrier for its warp group: what all have written for others, or read, comes before.

    In the order of the text, where the branches that follow a tile's coordinates lie one after the other.
    """
    letters = {r"st\.shared\.b32": "w", r"ld\.shared\.[bs]32": "r", r"mbarrier\.arrive": "a"}
    order = in_order(ptx, {**letters, ANY_BARRIER: "|"})
    assert "wwww" in order
    assert "rrrr" in order, "the four numbers of tile_info, by each consumer"
    assert re.search("w[wr]*a", order) is None
    assert re.search("rrrrr*a", order) is None


def assert_items_carry_their_blocks(compiled: Any, warp_groups: int) -> None:
    """A loop over work items carries what bounds its loop over blocks, in each of a stationary kernel's warp groups.

    Triton 3.6 takes a value that only bounds an inner `for` for one that stays: every item has the first one's blocks.
    """
    items = r"scf\.for \S+ = \S+ to %total\w* step \S+ iter_args\((.*?)\) ->"
    blocks = r"(?:scf\.for %block\w* = \S+ to|arith\.cmpi slt, %block\w*,) (%\w+)"
    found = re.findall(rf"{items}.*?{blocks}", str(compiled.asm["ttgir"]), re.S)
    assert len(found) == warp_groups
    for carried, bound in found:
        assert bound in re.findall(r"(%\w+) =", carried)
