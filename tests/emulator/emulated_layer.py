"""The Hopper and Blackwell backends on a CPU: their Gluon kernels in the emulator, the Triton kernels beside them in
plain PyTorch.

The emulator's fp16 stands for both 16-bit types.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from blackwell_emulator import BlackwellEmulator
from fp8_checks import assert_close, assert_gemms_agree
from gluon_emulator import Edits, Emulator
from torch import Tensor
from triton_checks import LAYOUTS, Case, assert_kernels_agree

from tilemoe.config import GATED_ACTIVATIONS
from tilemoe.kernels.experts.formats.fp8 import BLOCK, LARGEST, ROWS, WEIGHTS, quantize
from tilemoe.kernels.experts.hopper import backend as hopper_backend
from tilemoe.kernels.experts.hopper.backend import HopperBackend
from tilemoe.kernels.experts.hopper.configs import SHARED_BYTES
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.experts.triton import backend as triton_backend
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch, ceil_div

TOLERANCE = 6e-4  # as on a GPU
LIMIT = 3e-4  # RMS-relative, of FP8: fp16 rounds by 2.1e-4
LIMIT_OF_QUANTIZED = 2e-3  # one value of 10 000 that is rounded the other way, by a step, is 7e-4
EMULATORS = {90: Emulator, 100: BlackwellEmulator}
OUTPUTS = {
    "up_proj_act_kernel": ("a", "h"),
    "gemm_rows_kernel": ("out",),
    "gemm_cooperative_kernel": ("out",),
    "gemm_stationary_kernel": ("out",),
    "gemm_dgrad_dact_kernel": ("dh", "a_scaled", "partial"),
    "gemm_wgrad_kernel": ("out",),
    "gemm_transposed_kernel": ("out",),
}


def without_bias_grads(name: str) -> HopperBackend:
    """The backend of this name; its bias gradients, for which other tests have the portable kernels, are PyTorch's."""
    methods = {method: getattr(TorchBackend, method) for method in ("down_proj_bias_grad", "up_proj_bias_grad")}
    kernels: HopperBackend = type("WithoutBiasGrads", (type(backend_named(name)),), methods)()
    return kernels


KERNELS, KERNELS_OF_FP8 = without_bias_grads("hopper"), without_bias_grads("hopper_fp8")
KERNELS_OF_BLACKWELL = without_bias_grads("blackwell")


def agree_in_16_bits(plan: RoutingPlan, case: Case) -> None:
    assert_kernels_agree(KERNELS, plan, case, TOLERANCE)


def agree_on_blackwell(plan: RoutingPlan, case: Case) -> None:
    assert_kernels_agree(KERNELS_OF_BLACKWELL, plan, case, TOLERANCE)


def agree_in_fp8(plan: RoutingPlan, case: Case) -> None:
    """And what up_proj has quantised is what `quantize` gives, but for a few values next to the middle of two of e4m3,
    which may go to the other."""
    for found, values in assert_gemms_agree(KERNELS_OF_FP8, plan, case, LIMIT):
        expected = quantize(values, ROWS)
        assert found.data.dtype == torch.float8_e4m3fn
        torch.testing.assert_close(found.scale, expected.scale, rtol=1e-5, atol=0)
        actual, exact = found.data.float(), expected.data.float()
        step = (exact.abs() / 8).clamp(min=2.0**-9)
        assert bool(((actual - exact).abs() <= step).all())
        assert_close("a", found.dense(torch.float32), expected.dense(torch.float32), LIMIT_OF_QUANTIZED)


class Precision(NamedTuple):
    """What its kernels are, how they are compared, and what shows their edges.

    capability: of the GPU. keeps: contractions whose weight stays in shared memory. sizes: d and n of the cases. ends:
    rows of the experts, and tokens without one, at the ends of blocks and tiles. layouts: bias and stride order of each
    layout's cases.
    """

    capability: int
    kernels: HopperBackend
    agree: Callable[[RoutingPlan, Case], None]
    row_gemm: str
    others: frozenset[str]
    keeps: Callable[[int], bool]
    sizes: tuple[tuple[int, int], ...]
    ends: tuple[tuple[int, ...], ...]
    layouts: Callable[[int], list[tuple[bool, bool]]]

    @property
    def cases(self) -> list[Case]:
        of_layouts = [(i, layout, self.layouts(i)) for i, layout in enumerate(LAYOUTS)]
        return [
            Case(torch.float16, *layout, bias, transposed, *self.sizes[(i + j * 4 // len(flags)) % 4])
            for i, layout, flags in of_layouts
            for j, (bias, transposed) in enumerate(flags)
        ]

    def kernels_of(self, case: Case) -> set[str]:
        n = case.intermediate_size
        contractions = (n, 2 * n if case.activation in GATED_ACTIVATIONS else n)
        return self.others | {"gemm_stationary_kernel" if self.keeps(p) else self.row_gemm for p in contractions}


GATHERS = frozenset({"up_proj_act_kernel", "gemm_dgrad_dact_kernel"})
PRECISIONS = {
    # Widths: ragged in both; more steps than the ring has stages, all full; one step, one slice; two tiles of columns.
    "16 bits": Precision(
        90,
        KERNELS,
        agree_in_16_bits,
        "gemm_rows_kernel",
        GATHERS | {"gemm_wgrad_kernel"},
        lambda contraction: contraction <= 256,
        ((136, 200), (320, 136), (64, 64), (192, 264)),
        (
            (63, 64, 65, 0, 7), (0, 129, 1, 191, 3), (0, 449, 0, 0), (192, 0, 193, 128, 2), (385, 1, 0),
            (256, 0, 320, 193, 2),
        ),
        lambda i: list(product((False, True), repeat=2)),
    ),
    # Multiples of 128, not all of 256: half a tile of columns to three; from one step to more than stages.
    "fp8": Precision(
        90,
        KERNELS_OF_FP8,
        agree_in_fp8,
        "gemm_cooperative_kernel",
        GATHERS,
        lambda contraction: contraction in (128, 256, 512),
        ((256, 128), (384, 256), (640, 640), (128, 384)),
        ((63, 64, 65, 0, 7), (0, 129, 1, 3), (192, 0, 128, 2), (193, 1, 0)),
        lambda i: [(False, i % 2 == 0), (True, i % 2 == 1)],
    ),
    "blackwell": Precision(
        100,
        KERNELS_OF_BLACKWELL,
        agree_on_blackwell,
        "gemm_rows_kernel",
        GATHERS | {"gemm_wgrad_kernel"},
        lambda contraction: False,
        ((136, 200), (320, 136), (64, 64), (192, 264)),
        (
            (63, 64, 65, 0, 7), (0, 129, 1, 191, 3), (0, 449, 0, 0), (128, 0, 127, 256, 2), (385, 1, 0),
            (1, 1, 1, 1, 0),
        ),
        lambda i: list(product((False, True), repeat=2)),
    ),
}  # fmt: skip


def plan_of(*rows_per_expert: int) -> RoutingPlan:
    """One expert for each token, in no order; the last of these numbers counts tokens without an expert."""
    ids = torch.arange(len(rows_per_expert)).repeat_interleave(torch.tensor(rows_per_expert))
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    return plan_topk(shuffled[:, None], len(rows_per_expert) - 1)


@contextmanager
def emulated(
    ctas: int = 2,
    seed: int = 0,
    late: float = 0.9,
    edits: Edits | None = None,
    emulator: Emulator | None = None,
    capability: int = 90,
) -> Iterator[list[Launch]]:
    """Inside, backends of a capability compute on the CPU, on ``ctas`` multiprocessors; gives what is launched."""
    device, launches = Device(capability, SHARED_BYTES, ctas), list[Launch]()
    emulator = emulator or EMULATORS[capability](seed, late, edits)

    def run(launch: Launch) -> None:
        launches.append(launch)
        if launch.kernel.is_gluon():
            emulator.run(launch)
        else:
            IN_PYTORCH[name_of(launch)](launch.args, launch.constants)

    with pytest.MonkeyPatch.context() as patch:
        for module in (hopper_backend, triton_backend):
            patch.setattr(module, "device_of", lambda t: device)
        patch.setattr(triton_backend, "small_m", lambda num_rows, num_experts: None)
        patch.setattr(Launch, "run", run)
        yield launches


def name_of(launch: Launch) -> str:
    return str(launch.kernel.fn.__name__)


def gluon_kernels(launches: list[Launch]) -> set[str]:
    return {name_of(launch) for launch in launches if launch.kernel.is_gluon()}


# One launch alone, with and without a fault


Recorded = tuple[Launch, dict[str, Tensor]]  # and what it wrote


@cache
def recorded(precision: str, case: Case, counts: tuple[int, ...]) -> list[Recorded]:
    """Each Gluon launch of a layer's kernels on one CTA, and what it wrote, which is right."""
    with emulated(ctas=1) as launches:
        PRECISIONS[precision].agree(plan_of(*counts), case)
    return with_outputs(launches)


def with_outputs(launches: list[Launch]) -> list[Recorded]:
    # Not those that add to what they have written: run once more, they would add to it again.
    gluon = (launch for launch in launches if launch.kernel.is_gluon() and not launch.constants.get("ADDS"))
    return [(launch, {name: t.clone() for name, t in written(launch)}) for launch in gluon]


def written(launch: Launch) -> Iterator[tuple[str, Tensor]]:
    for name in OUTPUTS[name_of(launch)]:
        value = launch.args.get(name)
        if value is not None:
            t = getattr(value, "base", value)  # a descriptor's tensor
            yield name, t if launch.args.get(f"{name}_scale") is None else t.view(torch.float8_e4m3fn)
    if launch.args.get("a_scale") is not None:
        yield "a_scale", launch.args["a_scale"]


def errors_with(emulator: Emulator, launch: Launch, expected: dict[str, Tensor]) -> list[str]:
    """Run a launch once more, with planted faults: what is wrong in what it writes. Leaves the tensors as they were."""
    errors = []
    try:
        for _, t in written(launch):
            t.fill_(torch.nan)
        emulator.run(launch)
        for name, t in written(launch):
            actual, exact = t.double(), expected[name].double()
            inside = exact.isfinite()  # rows past the last are unspecified
            actual, exact = actual[inside], exact[inside]
            error = float((actual - exact).norm() / exact.norm())
            if not bool(actual.isfinite().all()):
                errors.append(f"{name}: not finite")
            elif error > TOLERANCE:
                errors.append(f"{name}: RMS-relative error {error:.2e}")
        return errors
    finally:
        for name, t in written(launch):
            t.copy_(expected[name])
        if "tile_counter" in launch.args:
            launch.args["tile_counter"].zero_()


@cache
def functions_of(kernel: Any) -> frozenset[str]:
    """Names of the jitted functions that a kernel calls, and its own."""
    found, left = dict[str, Any](), [kernel]
    while left:
        function = left.pop().fn
        found[function.__name__] = function
        called = (function.__globals__.get(name) for name in function.__code__.co_names)
        left += [callee for callee in called if hasattr(callee, "fn") and callee.fn.__name__ not in found]
    return frozenset(found)


# The Triton kernels that Hopper's backends launch


Kernel = Callable[[dict[str, Any], dict[str, Any]], None]  # of arguments and constants


def list_tiles(args: dict[str, Any], constants: dict[str, Any]) -> None:
    start = args["row_start_of_expert"].tolist()
    for prefix in ("", "second_") if args["second_tile_m"] else ("",):
        tile_m = args[f"{prefix}tile_m"]
        tiles = [
            (expert, row, start[expert + 1])
            for expert in range(len(start) - 1)
            for row in range(start[expert], start[expert + 1], tile_m)
        ]
        columns = torch.tensor(tiles, dtype=torch.int32).view(-1, 3).unbind(1)
        for name, column in zip(("expert_of_tile", "row_of_tile", "end_of_tile"), columns, strict=True):
            args[prefix + name][: len(tiles)] = column
        args[f"{prefix}num_tiles"].fill_(len(tiles))
    args["tile_counter"].zero_()


def sum_score_grads(args: dict[str, Any], constants: dict[str, Any]) -> None:
    for tile in range(int(args["num_tiles"][0])):
        expert, row, end = (int(args[name][tile]) for name in ("expert_of_tile", "row_of_tile", "end_of_tile"))
        rows = slice(row, min(row + constants["BLOCK_M"], end))
        total = args["partial"][:, rows].sum(0)
        if args["products"] is not None:
            total = total + args["products"][args["token_of_row"][rows].long(), expert]
        args["ds"].view(-1)[args["pair_of_row"][rows].long()] = total.to(args["ds"].dtype)


def multiply_bias(args: dict[str, Any], constants: dict[str, Any]) -> None:
    do, bias = (getattr(args[name], "base", args[name]).float() for name in ("do", "bias"))
    args["products"].copy_(do @ bias.T)


def quantize_in(values: str, block: Callable[[dict[str, Any]], tuple[int, int]]) -> Kernel:
    """What quantises the argument of this name, in blocks that depend on the others."""

    def run(args: dict[str, Any], constants: dict[str, Any]) -> None:
        found = quantize(args[values], block(args))
        args["data"].copy_(found.data)
        args["scale"].copy_(found.scale)

    return run


def row_tiles(args: dict[str, Any]) -> Iterator[tuple[int, int, slice, Tensor, slice]]:
    """(number, expert, rows, their tokens, place along the rows of transposed operands) of each row tile."""
    start = args.get("row_start_of_expert")
    for tile in range(int(args["num_tiles"][0])):
        row, end = int(args["row_of_tile"][tile]), int(args["end_of_tile"][tile])
        rows = slice(row, min(row + BLOCK, end))
        expert = -1 if start is None else int(args["expert_of_tile"][tile])
        first = 0 if start is None else int(start[expert])
        place = (first // BLOCK + expert + (row - first) // BLOCK) * BLOCK
        yield tile, expert, rows, args["token_of_row"][rows].long(), slice(place, place + BLOCK)


def gather_transposed(args: dict[str, Any], constants: dict[str, Any]) -> None:
    for _, _, rows, tokens, place in row_tiles(args):
        args["out"][:, place] = 0
        args["out"][:, place.start : place.start + rows.stop - rows.start] = args["data"][tokens].T


def largest_of_tiles(args: dict[str, Any], constants: dict[str, Any]) -> None:
    for tile, _, rows, tokens, _ in row_tiles(args):
        args["largest"][tile] = (args["rows"][rows].float() * args["token_scale"][tokens]).abs().max()


def quantize_transposed(args: dict[str, Any], constants: dict[str, Any]) -> None:
    start = args["row_start_of_expert"]
    for tile, expert, rows, tokens, place in row_tiles(args):
        first = tile - (rows.start - int(start[expert])) // BLOCK
        tiles = ceil_div(int(start[expert + 1] - start[expert]), BLOCK)
        largest = args["largest"][first : first + tiles].max()
        scale = largest / LARGEST if largest else torch.ones(())
        args["scale"][expert] = scale
        values = args["rows"][rows].float() * args["token_scale"][tokens] * (1 / scale)
        args["data"][:, place] = 0
        count = rows.stop - rows.start
        args["data"][:, place.start : place.start + count] = values.clamp(-LARGEST, LARGEST).T.to(torch.float8_e4m3fn)


IN_PYTORCH: dict[str, Kernel] = {
    "tile_lists_kernel": list_tiles,
    "score_grad_kernel": sum_score_grads,
    "bias_products_kernel": multiply_bias,
    "quantize_rows_kernel": quantize_in("values", lambda args: (1, args["block_width"])),
    "quantize_weight_rows_kernel": quantize_in("weight", lambda args: (1, args["q"])),
    "quantize_blocks_kernel": quantize_in("weight", lambda args: WEIGHTS),
    "gather_transposed_kernel": gather_transposed,
    "largest_of_tiles_kernel": largest_of_tiles,
    "quantize_transposed_kernel": quantize_transposed,
}
