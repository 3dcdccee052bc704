"""torch.export of inference: one graph for any number of tokens, saved, and loaded where the operators are known.

T tokens · d hidden_size
"""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.layers.moe import MoE

D = 32
LAYERS = {
    "softmax": MoEConfig(D, 16, 8, 2),
    "sigmoid, groups, biases": MoEConfig(
        D,
        16,
        8,
        3,
        activation="swiglu_oai",
        gate_up="interleaved",
        expert_bias=True,
        shared_intermediate_size=16,
        router=RouterConfig(score="sigmoid", selection_bias=True, num_groups=4, top_groups=2),
    ),
}


class Hidden(nn.Module):
    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).hidden


def export(name: str, dtype: torch.dtype, *, strict: bool) -> tuple[Hidden, torch.export.ExportedProgram]:
    torch.manual_seed(0)
    model = Hidden(MoE(LAYERS[name], dtype=dtype)).eval().requires_grad_(False)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    example = torch.randn(6, D).to(dtype)
    with torch.no_grad():
        return model, torch.export.export(model, (example,), dynamic_shapes=({0: tokens},), strict=strict)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_for_any_number_of_tokens(name: str, strict: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model, program = export(name, dtype, strict=strict)
        called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert called.count("tilemoe.moe.default") == 1
        module = program.module()
        for tokens in (2, 6, 33, 1000):
            x = torch.randn(tokens, D).to(dtype)
            assert torch.equal(module(x), model(x))


def test_loaded_by_another_process(tmp_path: Path) -> None:
    model, program = export("softmax", torch.float32, strict=False)
    x = torch.randn(9, D)
    torch.export.save(program, tmp_path / "layer.pt2")
    torch.save((x, model(x)), tmp_path / "expected.pt")
    code = (
        "import sys, torch, tilemoe; tilemoe.MoE\n"
        "x, expected = torch.load(sys.argv[1] + '/expected.pt')\n"
        "found = torch.export.load(sys.argv[1] + '/layer.pt2').module()(x)\n"
        "assert torch.equal(found, expected)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_saved_and_loaded_here() -> None:
    model, program = export("sigmoid, groups, biases", torch.bfloat16, strict=False)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    x = torch.randn(17, D).bfloat16()
    assert torch.equal(torch.export.load(buffer).module()(x), model(x))
