"""Between what writes shared memory and the matrix unit that reads it lies a proxy fence: in the PTX of every Triton
kernel with matrix products, for both GPUs whose matrix unit reads so, and in what is told of PTX alone.

E experts · d hidden_size · n intermediate_size
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from compiled_rows import BF16, ROWS, WIDTHS_OF_PACKED, few_row_gemms, kernels_of, layer_launches, name_of
from ptx_fences import TRITON_FENCES, mmas_without_fence
from triton_compile import NVIDIA, compile_launches, make_operands, row_gemm_launch

from tilemoe.kernels.experts.triton import host
from tilemoe.runtime.launch import Launch

# With Triton before the release that fences: what cp.async feeds. docs/support.md names those of Hopper. On capability
# 10.x, where others come by descriptors, PyTorch's kernels serve with these releases.
BY_POINTER = {"up_proj_act_small_m_kernel", "down_proj_small_m_kernel", "gemm_rows_kernel of a shared weight"}
UNFENCED = {90: BY_POINTER | {"up_proj_act_kernel", "gemm_dgrad_dact_kernel", "gemm_wgrad_kernel"}, 100: BY_POINTER}


def launches_with_products(capability: int) -> Iterator[tuple[str, Launch]]:
    """(name, launch), each kernel and layout that a GPU would run."""
    device = NVIDIA[capability]
    launches = layer_launches(device, BF16)
    packed = [f"packed {storage} torch.bfloat16" for storage in WIDTHS_OF_PACKED]
    for row in (*packed, "bias gradients qwen3", "router's dx 128 torch.float16"):
        launches += ROWS[row].launches(device)
    for tokens in (1, 60):
        launches += few_row_gemms(tokens, device)
    for launch in launches:
        if multiplies(launch.kernel):
            yield name_of(launch), launch
    shared = make_operands()
    shared = shared._replace(w2=shared.w2[:1].expand_as(shared.w2))  # TMA wants strides above 0
    yield "gemm_rows_kernel of a shared weight", row_gemm_launch(host, "down_proj", shared, device)


def multiplies(kernel: object) -> bool:
    source = str(getattr(kernel, "src", ""))
    return any(call in source for call in ("tl.dot(", "multiply_add(", "_multiply("))


def test_no_kernel_is_left_out() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("tilemoe.kernels.")]
    kernels = [(name, getattr(module, name)) for module in modules for name in kernels_of(module)]
    known = {name for name, kernel in kernels if not kernel.is_gluon() and multiplies(kernel)}
    assert len(known) >= 9
    assert known <= {name_of(launch) for _, launch in launches_with_products(90)}


@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.thorough)])
def test_a_fence_lies_before_every_product(capability: int) -> None:
    """Other layouts: test_triton_every_kernel.py. For 10.x `make newest-triton` has a release that serves there."""
    names, launches = zip(*launches_with_products(capability), strict=True)
    found = set[str]()
    for name, (_, compiled) in zip(names, compile_launches(launches, capability), strict=True):
        unfenced, products = mmas_without_fence(str(compiled.asm["ptx"]))
        assert unfenced in (0, products), name
        found |= {name} if unfenced else set()
    assert found == (set() if TRITON_FENCES else UNFENCED[capability])


# What is told of PTX.

COPY = "@%p1 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;"
WAIT, STORE, FENCE, MEET = (
    "cp.async.wait_group 2;",
    "st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};",
    "fence.proxy.async.shared::cta;",
    "bar.sync 0;",
)
PRODUCT = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p2;"
ACCUMULATOR = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3];"
POLL = """{
waitLoop:
mbarrier.try_wait.parity.shared.b64 complete, [%r1], %r2;
@!complete bra.uni waitLoop;
}"""


@pytest.mark.parametrize(
    ("lines", "unfenced"),
    [
        ((WAIT, FENCE, MEET, PRODUCT), 0),
        ((WAIT, MEET, POLL, FENCE, POLL, PRODUCT), 0),
        ((STORE, MEET, FENCE, "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r1, %r2}, %rd1, %rd2;"), 0),
        ((WAIT, MEET, PRODUCT), 1),
        ((FENCE, WAIT, MEET, PRODUCT), 1),
        ((STORE, MEET, PRODUCT), 1),
        ((WAIT, FENCE, PRODUCT), 1),
        ((ACCUMULATOR, MEET, PRODUCT), 0),
        ((ACCUMULATOR, PRODUCT), 1),
        ((WAIT, f"@%p1 {FENCE}", MEET, PRODUCT), 1),
        ((WAIT, "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;", MEET, PRODUCT), 1),
        ((WAIT, MEET, "@%p1 bra $over;", FENCE, "$over:", PRODUCT), 1),
        ((WAIT, MEET, "bra.uni $over;", PRODUCT, "$over:", FENCE), 0),
        ((WAIT, FENCE, MEET, "$loop:", PRODUCT, "@%p1 bra $loop;"), 0),
        ((WAIT, FENCE, MEET, "$loop:", PRODUCT, WAIT, MEET, "@%p1 bra $loop;"), 1),
        (("$loop:", WAIT, MEET, FENCE, PRODUCT, "@!%p1 bra $loop;"), 0),
    ],
)
def test_every_way_to_a_product_is_followed(lines: tuple[str, ...], unfenced: int) -> None:
    body = "\n".join((COPY, *lines))
    found, products = mmas_without_fence(
        f".visible .entry k(\n.param .u64 k_0\n)\n.reqntid 256\n{{\n.reg .b32 %r<9>;\n{body}\nret;\n}}"
    )
    assert found == unfenced
    assert products == (0 if "bra.uni $over;" in lines else 1)


@pytest.mark.parametrize(("size", "unfenced"), [("0x4", 0), ("0x10", 1)])
def test_copies_of_indices_are_not_read_by_products(size: str, unfenced: int) -> None:
    body = "\n".join((COPY.replace("0x10", size), WAIT, MEET, PRODUCT))
    assert mmas_without_fence(f".entry k()\n{{\n{body}\nret;\n}}") == (unfenced, 1)
