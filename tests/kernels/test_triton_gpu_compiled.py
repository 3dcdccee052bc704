"""The layer under torch.compile on a GPU: as CUDA graphs, and for numbers of tokens that vary.

T tokens
"""

import pytest
import torch
from gpu_layers import LAYERS, make_input, make_layer, step
from torch import Tensor
from torch._dynamo.utils import counters

import tilemoe
from tilemoe.config import MoEConfig, TokenRounding
from tilemoe.testing import relative_error

pytestmark = pytest.mark.gpu

# RMS-relative, of a value that Inductor rounds once more or once less than eager operators do.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    for key, wanted in expected.items():
        actual = found[key]
        assert actual.dtype == wanted.dtype, (where, key)
        if wanted.dtype.is_floating_point:
            assert relative_error(actual, wanted.double()) <= ROUNDING[wanted.dtype], (where, key)
        else:
            assert torch.equal(actual, wanted), (where, key)


def run(compiled: torch.nn.Module, x: Tensor, do: Tensor) -> dict[str, Tensor]:
    """Copies: the next run of a graph writes over its results."""
    return {key.removeprefix("_orig_mod."): tensor.clone() for key, tensor in step(compiled, x, do).items()}


@pytest.mark.parametrize("name", LAYERS)
def test_reduce_overhead_captures_forward_and_backward(name: str) -> None:
    layer = make_layer(name)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for seed in range(5):  # run, recorded, replayed from then on
        x, do = make_input(layer, 600, seed)
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(run(compiled, x, do), step(layer, x, do), f"step {seed}")
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_that_vary_compile_one_graph_more(name: str) -> None:
    """The second number of tokens makes the graph dynamic, and it serves all others."""
    layer = make_layer(name)
    compiled = torch.compile(layer, fullgraph=True)
    graphs = []
    for seed, tokens in enumerate((600, 700, 1001, 650, 3000)):
        x, do = make_input(layer, tokens, seed)
        assert_close(run(compiled, x, do), step(layer, x, do), f"T = {tokens}")
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:] == [graphs[1]] * 4
    assert graphs[1] <= 2


@pytest.mark.parametrize("mode", [None, "nearest"])
def test_dense_scores(mode: str | None) -> None:
    """Compiled, a search in a table from its second entry on begins at the first: see `experts_of_rows`."""
    cfg = MoEConfig(64, 64, 8, 2, rounding=None if mode is None else TokenRounding(mode, tile=16))
    logits = torch.randn(600, 8, device="cuda")

    def dense(logits: Tensor) -> Tensor:
        return tilemoe.route(logits, cfg).dense()

    assert_close({"dense": torch.compile(dense)(logits)}, {"dense": dense(logits)}, str(mode))
