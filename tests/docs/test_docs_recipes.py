"""CONTRIBUTING's recipes: each diff applies to the package as it is, and what it adds works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import HANGS

ROOT = Path(__file__).parents[2]
RECIPE = re.compile(r"^### (.+?)$(.*?)(?=^##|\Z)", re.M | re.S)
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.M | re.S)

START = """
import torch, tilemoe
from pathlib import Path
assert Path(tilemoe.__file__).parent == Path.cwd() / "tilemoe", "the copy is what is imported"
from tilemoe.testing import forward_and_grads, make_inputs
torch.manual_seed(0)
"""
# A gated activation: value and gradients of the layer on CPU and by the Triton kernels, which the interpreter runs.
ACTIVATION = """
plan = tilemoe.plan_topk(torch.arange(24).view(12, 2) % 4, 4)
inputs = make_inputs(plan, 16, 8, "glu")
exact = forward_and_grads(tilemoe.reference.moe, inputs, plan, activation="glu")
for kernels in ("torch", "triton"):
    for name, ours in forward_and_grads(tilemoe.moe, inputs, plan, activation="glu", kernels=kernels).items():
        torch.testing.assert_close(ours, exact[name], rtol=1e-4, atol=1e-5)
assert tilemoe.MoEConfig(16, 8, 4, 2, activation="glu").up_rows == 16
"""
LAYERS = """
cfg = tilemoe.MoEConfig(16, 32, 4, 2, initializer_range=0.2)
x = torch.randn(8, 16)
def learns(layer):
    layer(x).hidden.square().mean().backward()
    return all(parameter.grad.any() for parameter in layer.parameters())
"""
ROUTER = (
    LAYERS
    + """
from noisy_router import NoisyRouter
layer = tilemoe.MoE(cfg, router=NoisyRouter(16, 4))
torch.nn.init.normal_(layer.router.noise.weight)
assert learns(layer)
assert not torch.equal(layer(x).hidden, layer(x).hidden)
assert torch.equal(layer.eval()(x).hidden, layer(x).hidden)
"""
)
# What a layer launches on an A100, compiled for it.
TILE = """
import tempfile
import tilemoe.kernels.experts.triton.backend
from triton_compile import NVIDIA, compile_launches, count_spill_loads, recorded_launches
plan = tilemoe.plan_topk(torch.arange(128).view(64, 2) % 2, 2)
inputs = make_inputs(plan, 512, 256, dtype=torch.bfloat16)
with recorded_launches(NVIDIA[80]) as launches:
    forward_and_grads(tilemoe.moe, inputs, plan, kernels="triton")
gemms = [launch for launch in launches if launch.kernel.fn.__name__ == "gemm_rows_kernel"][:1]
assert gemms and gemms[0].options["num_stages"] == 4
for launch, compiled in compile_launches(gemms, 80):
    assert compiled.metadata.shared <= NVIDIA[80].shared_bytes
    assert count_spill_loads(compiled, Path(tempfile.mkdtemp())) == 0
"""
BACKEND = (
    LAYERS
    + """
import index_add_backend
plain, ours = tilemoe.MoE(cfg, kernels="torch"), tilemoe.MoE(cfg, kernels="index_add")
ours.load_state_dict(plain.state_dict())
torch.testing.assert_close(ours(x).hidden, plain(x).hidden)
compiled = torch.compile(ours, backend="eager", fullgraph=True)
torch.testing.assert_close(compiled(x).hidden, plain(x).hidden)
assert learns(ours)
"""
)
CHECKS = {
    "Add an activation": (ACTIVATION, {"TRITON_INTERPRET": "1"}),
    "Add a router": (ROUTER, {}),
    "Change a tile": (TILE, {"PYTHONPATH": str(ROOT / "tests" / "kernels")}),
    "Add a backend": (BACKEND, {}),
}


def recipes() -> dict[str, str]:
    """Title to diff, of the sections that have one."""
    sections = RECIPE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    return {title: "".join(DIFF.findall(body)) for title, body in sections if DIFF.search(body)}


def test_every_recipe_has_a_check() -> None:
    assert recipes().keys() == CHECKS.keys()


@pytest.mark.parametrize("title", CHECKS)
def test_it_applies_and_works(title: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tilemoe", tmp_path / "tilemoe", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    applied = subprocess.run(
        ["git", "apply", "-"], input=recipes()[title], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert applied.returncode == 0, f"the diff no longer applies: {applied.stderr}"
    code, more = CHECKS[title]
    done = subprocess.run(
        [sys.executable, "-c", START + code],
        cwd=tmp_path,
        env={**environment, **more},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr
