"""Each kernel has a page with every part, whose costs, tiles, times and names are those of code and results.

And the worked example has its numbers. T tokens · d hidden_size · n intermediate_size · E experts · K experts per
token · R routed rows · w = 2n
"""

from __future__ import annotations

import ast
import json
import math
import re
import runpy
from functools import cache
from typing import Any

import pytest
from test_docs_names import NAME, ROOT, prose

from tilemoe.kernels.experts.hopper.configs import BLOCK_K, TILES, is_faster
from tilemoe.kernels.experts.triton import configs
from tilemoe.kernels.experts.triton.configs import WEIGHT_GRADS
from tilemoe.perf.costs import IN_FP8, Cost, kernel_costs, router_costs
from tilemoe.runtime.device import Device
from tilemoe.shape import MoEShape

DOCS, RESULTS = ROOT / "docs", ROOT / "results"
PAGES = {path.stem: path for path in sorted((DOCS / "kernels").glob("*.md"))}
PARTS = ("Equation", "Cost", "Code", "Tile", "Pipeline", "Epilogue", "Backends", "Limits", "Measured")
LINES = range(30, 71)  # that are not blank
SHAPE = MoEShape(32768, 2048, 1024, 64, 8)  # OLMoE
COSTS = kernel_costs(SHAPE)
PAGE_OF = {kernel: kernel.replace("_", "-") for kernel in COSTS}
SIZES = {"T": SHAPE.num_tokens, "d": SHAPE.hidden_size, "n": SHAPE.intermediate_size, "R": SHAPE.num_rows}
SIZES |= {"w": SHAPE.width, "E": SHAPE.num_experts, "K": SHAPE.num_experts_per_tok}
BYTES = {"bf16": 2, "int16": 2, "fp32": 4, "int32": 4, "int64": 8, "uint8": 1}
TENSOR = re.compile(rf"\(([^()]+)\) ({'|'.join(BYTES)}), ([\d.]+ [KM]B)")
IDENTIFIER = re.compile(r"`([A-Za-z_]\w*)`")
OF_PROFILE = re.compile(r"([\d.]+) ms in (\d+) launch(?:es)? of `(\w+)` \(\[results/(profiles/[\w-]+\.txt)\]")
GPUS = {
    "an H200": Device(90, 227 * 1024, 132),
    "a B200": Device(100, 227 * 1024, 148),
    "an A100": Device(80, 163 * 1024, 108),
    "an RTX 5090": Device(120, 99 * 1024, 170),
}
H200 = GPUS["an H200"]


def part(page: str, name: str) -> str:
    """A section of a page, each run of white space as one blank."""
    text = PAGES[page].read_text(encoding="utf-8")
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return " ".join(found[1].split()) if found else ""


def newest(file: str, **wanted: Any) -> dict[str, Any]:
    """The newest row of results/<file>.jsonl with these values."""
    rows = map(json.loads, (RESULTS / f"{file}.jsonl").read_text().splitlines())
    found: list[dict[str, Any]] = [row for row in rows if wanted.items() <= row.items()]
    return max(found, key=lambda row: row["time"])


def tile_of(tile: configs.TileConfig, parts: int = 1) -> str:
    size = f"{tile.block_m} x {parts * tile.block_n} x {tile.block_k}"
    return f"{size}, {tile.num_stages} stages, {tile.num_warps} warps"


def cost_of(cost: Cost) -> str:
    moved = f"{cost.read / 1e9:.2f} GB read and {cost.written / 1e9:.2f} GB written"
    if not cost.flops:
        return moved
    return f"{cost.flops / 1e12:.2f} TFLOP, {moved}, {cost.flops / cost.bytes:.0f} FLOP/byte"


def widths_of(kernel: configs.Kernel) -> tuple[int, int]:
    """As `choose_tile` and `is_faster` take them."""
    d, n, w = SIZES["d"], SIZES["n"], SIZES["w"]
    return {"down_proj": (n, d), "up_proj_dgrad": (w, d), "up_proj_wgrad": (d, w)}.get(kernel, (d, n))


def tiles_of(kernel: configs.Kernel) -> list[str]:
    """What a page says of a GEMM's tiles, by both sets of kernels."""
    gate_up = "concatenated" if kernel in configs.WITH_ACTIVATION else None
    hopper, parts = TILES[kernel], 2 if kernel == "up_proj_act" else 1
    registers = f"{hopper.consumer_registers} registers a consumer's thread, {hopper.producer_registers} a producer's"
    told = [f"- Hopper: {hopper.block_m} x {hopper.block_n} x {BLOCK_K}, {hopper.num_stages} stages, {registers}."]
    for name, device in GPUS.items():
        told.append(f"{tile_of(configs.choose_tile(kernel, *widths_of(kernel), 2, device, gate_up), parts)} on {name}")
    return told


def other_tiles() -> dict[str, list[str]]:
    """Of pages whose kernels are not in `TILES`, on an H200 in bf16."""
    d, n, experts = SIZES["d"], SIZES["n"], SIZES["E"]
    scores = configs.choose_scores_tile(experts, 2, 2, H200)
    small = []
    for rows in (16, 64):
        up = configs.choose_small_m_tile("up_proj_act", rows, d, n, 2, H200, "concatenated")
        small += [
            f"F1 {tile_of(up, 2)}",
            f"F2 {tile_of(configs.choose_small_m_tile('down_proj', rows, n, d, 2, H200, None))}",
        ]
    return {
        "bias-gradients": [
            f"db2 {tile_of(scores, 2)}",
            f"do b2^T {tile_of(configs.choose_bias_products_tile(experts, 2, H200))}",
        ],
        "small-m": small,
        "nf4": [tile_of(configs.choose_nf4_tile(2, H200))],
    }


def time_of(row: dict[str, Any], ms: float, digits: int = 3) -> str:
    return f"{ms:.{digits}f} ms ({row['commit'][:7]})"


def measured(kernel: str) -> str:
    """A kernel's newest time of results/kernels.jsonl, and what it is of its roofline."""
    row = newest("kernels", kernel=kernel, case="OLMoE", mode="sustained", kernels="hopper")
    told = time_of(row, row["ms"]["median"])
    if row["of_roofline"] is None:
        return told
    rate = f"{row['tflops']:.0f} TFLOP/s" if row["tflops"] else f"{row['gbps'] / 1e3:.2f} TB/s"
    return f"{told}, {rate}, {100 * row['of_roofline']:.0f}% of its roofline"


def other_times() -> dict[str, list[str]]:
    """Of pages whose kernels have no row of their own in results/kernels.jsonl."""
    biased = newest("layouts", size="OLMoE", cell="bias")
    few = newest("small_tokens", case="OLMoE", mode="graph", tokens=256)
    nf4, bf16 = (newest("nf4_adapters", size="OLMoE-1B-7B", storage=storage) for storage in ("nf4", "bf16"))
    rounded, plain = (
        newest("token_rounding", case="E64-d1536-n256", mode="sustained", contestant=name)
        for name in ("nearest", "top-K")
    )
    return {
        "router": [f"`{kernel}` {measured(kernel)}" for kernel in ("logits", "route", "route_grad", "logits_grad")],
        "plan": [measured("route")],
        "bias-gradients": [
            f"forward {time_of(biased, biased['fwd_ms']['median'], 2)}, {biased['ratio_fwd']:.2f} of the plain layer's",
            f"backward {time_of(biased, biased['bwd_ms']['median'], 2)}, {biased['ratio_bwd']:.2f}",
        ],
        "small-m": [f"{time_of(few, few['ms']['tilemoe']['median'])}, {few['gb_per_s'] / 1e3:.2f} TB/s"],
        "nf4": [f"{time_of(nf4, nf4['ms']['median'], 2)}, in bf16 {bf16['ms']['median']:.2f} ms"],
        "rounding": [
            f"{time_of(rounded, rounded['routing_ms']['median'])}, under top-K {plain['routing_ms']['median']:.3f} ms",
            f"{rounded['routing_grad_ms']['median']:.3f} ms, under top-K {plain['routing_grad_ms']['median']:.3f} ms",
        ],
    }


@cache
def package_words() -> frozenset[str]:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "tilemoe").rglob("*.py"))
    return frozenset(word for text in sources for word in re.findall(r"\w+", text))


@cache
def package_kernels() -> frozenset[str]:
    """``path:name`` of every kernel that the package launches."""
    return frozenset(
        f"{path.relative_to(ROOT / 'tilemoe').as_posix()}:{node.name}"
        for path in (ROOT / "tilemoe").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    )


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_every_part(page: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    in_fp8 = page in [PAGE_OF[kernel] for kernel in (*IN_FP8, *WEIGHT_GRADS)]
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert [name for name in headings if name != "FP8"] == list(PARTS)
    assert ("FP8" in headings) == in_fp8
    assert all(part(page, name) for name in headings)
    assert "```text" in part(page, "Equation")
    assert "```text" in part(page, "Pipeline")
    assert TENSOR.search(part(page, "Cost"))
    names = [":".join(name) for name in NAME.findall(part(page, "Code"))]
    assert package_kernels().intersection(names)
    assert any(name.startswith("tests/") for name in names)
    assert "../../results/" in part(page, "Measured")
    assert len(list(filter(None, text.splitlines()))) in LINES
    assert f"(kernels/{page}.md)" in (DOCS / "kernels.md").read_text(encoding="utf-8")


def test_every_kernel_is_on_a_page() -> None:
    told = {":".join(name) for path in PAGES.values() for name in NAME.findall(prose(path))}
    assert len(package_kernels()) > 40
    assert package_kernels() - told == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_bare_name_is_one_of_the_package_s(page: str) -> None:
    assert set(IDENTIFIER.findall(prose(PAGES[page]))) - package_words() == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_tensor_has_the_bytes_of_its_shape(page: str) -> None:
    for shape, dtype, told in TENSOR.findall(part(page, "Cost")):
        size = bytes_of(shape, dtype)
        assert told == (f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} KB"), shape


def bytes_of(shape: str, dtype: str) -> int:
    return BYTES[dtype] * math.prod(eval(f"({shape},)".replace("/", "//"), {}, SIZES))


@pytest.mark.parametrize("kernel", COSTS)
def test_a_page_says_what_code_and_results_say(kernel: str) -> None:
    page, cost = PAGE_OF[kernel], COSTS[kernel]
    text = part(page, "Cost")
    assert text.startswith(f"{cost_of(cost)}.")
    read, _, written = text.partition("- Written:")
    moved = [sum(bytes_of(*found[:2]) for found in TENSOR.findall(side)) for side in (read, written)]
    assert moved == [cost.read, cost.written]
    assert part(page, "Measured").startswith(measured(kernel))
    for gemm in configs.KERNELS:
        if gemm == kernel:
            assert [line for line in tiles_of(gemm) if line not in part(page, "Tile")] == []
            assert ("By the portable kernel." in part(page, "Measured")) != is_faster(gemm, *widths_of(gemm))


@pytest.mark.parametrize("page", sorted(PAGES.keys() - PAGE_OF.values()))
def test_another_page_says_what_code_and_results_say(page: str) -> None:
    text, told = part(page, "Measured"), other_times().get(page)
    if told is None:
        ((ms, launches, kernel, profile),) = OF_PROFILE.findall(text)
        assert re.search(rf"^ *{ms} ms +{launches}  {kernel}$", (RESULTS / profile).read_text(), re.M)
    assert [line for line in told or () if line not in text] == []
    assert [line for line in other_tiles().get(page, []) if line not in part(page, "Tile")] == []


def test_the_router_s_costs_are_the_code_s() -> None:
    forward, backward = map(cost_of, router_costs(SHAPE))
    assert f"Forward {forward}; backward {backward}." in part("router", "Cost")


def test_the_worked_example_is_what_the_package_computes() -> None:
    page = (DOCS / "algorithm.md").read_text(encoding="utf-8")
    blocks = runpy.run_path(str(DOCS / "worked_example.py"))["blocks"]()
    assert len(blocks) == 6
    assert [title for title, text in blocks.items() if f"```text\n{text}\n```" not in page] == []
    rows = {text[:2]: text.split()[-16:] for block in ("naive", "backward") for text in blocks[block].splitlines()}
    assert rows["<d"] == rows["ds"]
