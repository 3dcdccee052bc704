"""The page of kernels names every kernel, and its costs, tiles and times are those of code and results.

And the worked example's numbers are those that its script prints.
"""

from __future__ import annotations

import ast
import runpy

import pytest
from test_docs_names import NAME, ROOT, prose

from tilemoe.bench import record
from tilemoe.kernels.experts.table import ROWS
from tilemoe.kernels.experts.triton import configs
from tilemoe.perf.costs import kernel_costs
from tilemoe.runtime.device import Device
from tilemoe.shape import MoEShape

DOCS = ROOT / "docs"
PAGE = DOCS / "kernels.md"
SHAPE = MoEShape(32768, 2048, 1024, 64, 8)  # OLMoE
COSTS = kernel_costs(SHAPE)
GPUS = (
    Device(90, 227 * 1024, 132),  # an H200
    Device(100, 227 * 1024, 148),  # a B200
    Device(80, 163 * 1024, 108),  # an A100
    Device(120, 99 * 1024, 170),  # an RTX 5090
)


def cells(kernel: str) -> list[list[str]]:
    """Of each table of the page, the cells of the row of ``kernel``."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if f"`{kernel}`" in row[:2] or row[0] == kernel]


def widths_of(kernel: configs.Kernel) -> tuple[int, int]:
    """The contraction's and the output's, as `choose_tile` takes them."""
    d, n, w = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.width
    return {"down_proj": (n, d), "up_proj_dgrad": (w, d), "up_proj_wgrad": (d, w)}.get(kernel, (d, n))


def test_every_kernel_is_on_the_page() -> None:
    kernels = {
        f"{path.relative_to(ROOT / 'tilemoe').as_posix()}:{node.name}"
        for path in (ROOT / "tilemoe").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    }
    assert len(kernels) > 40
    assert kernels - {":".join(name) for name in NAME.findall(prose(PAGE))} == set()


@pytest.mark.parametrize("kernel", COSTS)
def test_costs_and_rooflines_are_those_of_code_and_results(kernel: str) -> None:
    cost, told = COSTS[kernel], cells(kernel)[0]
    moved = f"{cost.read / 1e9:.2f} + {cost.written / 1e9:.2f}"
    assert told[3] == (f"{cost.flops / 1e12:.2f}, {moved}" if cost.flops else moved)
    newest = record.newest("kernels", "kernel", case="OLMoE", mode="sustained", kernels="hopper")[kernel]
    assert told[4] == f"{newest['ms']['median']:.3f} ms ({newest['commit'][:7]})"
    assert told[5] == f"{100 * newest['of_roofline']:.0f}%"


@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_tiles_are_those_of_the_code(kernel: configs.Kernel) -> None:
    gate_up = "concatenated" if kernel in configs.WITH_ACTIVATION else None
    parts = 2 if kernel == "up_proj_act" else 1
    tiles = [configs.choose_tile(kernel, *widths_of(kernel), 2, device, gate_up) for device in GPUS]
    assert cells(kernel)[-1][1:] == [
        f"{tile.block_m} x {parts * tile.block_n} x {tile.block_k}, {tile.num_stages} stages, {tile.num_warps} warps"
        for tile in tiles
    ]


def test_the_page_of_fp8_has_the_table_s_backends_and_reasons() -> None:
    lines = (DOCS / "fp8.md").read_text(encoding="utf-8").splitlines()
    told = [[cell.strip(" `") for cell in line.split("|")[1:3]] for line in lines if "_fp8` |" in line]
    assert told == [[row.name, row.because] for row in ROWS if row.precision == "fp8"]


def test_the_worked_example_is_what_the_package_computes() -> None:
    page = (DOCS / "algorithm.md").read_text(encoding="utf-8")
    blocks = runpy.run_path(str(DOCS / "worked_example.py"))["blocks"]()
    assert len(blocks) == 6
    assert [title for title, text in blocks.items() if f"```text\n{text}\n```" not in page] == []
    rows = {text[:2]: text.split()[-16:] for block in ("naive", "backward") for text in blocks[block].splitlines()}
    assert rows["<d"] == rows["ds"]
