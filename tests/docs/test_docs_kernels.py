"""The kernels' pages have the costs, tiles and times that code and results have, and the worked example its numbers."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from tilemoe.kernels.experts.hopper.configs import BLOCK_K, TILES
from tilemoe.perf.costs import kernel_costs
from tilemoe.shape import MoEShape

DOCS = Path(__file__).parents[2] / "docs"
SECTION = re.compile(r"^## (?:\w+) `(\w+)`\n(.*?)(?=^## |\Z)", re.M | re.S)
COSTS = kernel_costs(MoEShape(32768, 2048, 1024, 64, 8))  # OLMoE


def sections() -> dict[str, str]:
    """Kernel to its section."""
    return {
        name: text
        for page in sorted((DOCS / "kernels").glob("*.md"))
        for name, text in SECTION.findall(page.read_text(encoding="utf-8"))
    }


def test_every_kernel_has_a_section() -> None:
    assert sections().keys() == COSTS.keys()


@pytest.mark.parametrize("kernel", COSTS)
def test_a_section_says_what_code_and_results_say(kernel: str) -> None:
    cost, rows = COSTS[kernel], (DOCS.parent / "results" / "kernels.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, rows) if (row["kernel"], row["case"]) == (kernel, "OLMoE")]
    row = [row for row in found if (row["mode"], row["kernels"]) == ("sustained", "hopper")][-1]
    moved = f"{cost.read / 1e9:.2f} GB read and {cost.written / 1e9:.2f} GB written"
    rate = f"{row['gbps'] / 1e3:.2f} TB/s"
    if cost.flops:
        moved = f"{cost.flops / 1e12:.2f} TFLOP, {moved}, {cost.flops / cost.bytes:.0f} FLOP/byte"
        rate = f"{row['tflops']:.0f} TFLOP/s"
    took = f"{row['ms']['median']:.3f} ms ({row['commit'][:7]})"
    told = [f"- Cost: {moved}.", f"- Measured: {took}, {rate}, {100 * row['of_roofline']:.0f}% of its roofline."]
    if kernel in TILES:
        tile = TILES[kernel]  # type: ignore[index]  # the test of the line before
        registers = f"{tile.consumer_registers} registers a consumer's thread, {tile.producer_registers} a producer's"
        told.append(f"- Tile: {tile.block_m} x {tile.block_n} x {BLOCK_K}, {tile.num_stages} stages, {registers}.")
    assert [line for line in told if line not in sections()[kernel]] == []


def test_the_worked_example_is_what_the_package_computes() -> None:
    page = (DOCS / "algorithm.md").read_text(encoding="utf-8")
    blocks = runpy.run_path(str(DOCS / "worked_example.py"))["blocks"]()
    assert len(blocks) == 6
    assert [title for title, text in blocks.items() if f"```text\n{text}\n```" not in page] == []
    rows = {text[:2]: text.split()[-16:] for block in ("naive", "backward") for text in blocks[block].splitlines()}
    assert rows["<d"] == rows["ds"]
