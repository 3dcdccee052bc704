"""torchtitan's own mixture-of-experts layer with the override against the same layer without it, on a CPU."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raises_one_line
from ranks import run_on_ranks
from titan_checks import CHECKS
from titan_layers import TARGET, D, E, F, config, filled, run
from torch import Tensor, nn
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.models.qwen3 import qwen3_configs

from tilemoe.integrations import torchtitan as integration
from tilemoe.testing import relative_error


def layers() -> tuple[nn.Module, nn.Module]:
    """The stock layer and the overridden one with its weights."""
    overridden = config()
    apply_overrides(OverrideConfig(imports=[TARGET]), overridden)
    return filled(config().build(), overridden.build())


def test_errs_no_more_than_the_stock_layer() -> None:
    stock, ours = layers()
    x = torch.randn(2, 25, D, generator=torch.Generator().manual_seed(1))
    theirs, mine = run(stock, x), run(ours, x)
    assert torch.equal(ours.tokens_per_expert_E, stock.tokens_per_expert_E)
    exact = exactly(stock, x)
    assert mine.keys() == theirs.keys() == exact.keys()
    for name, value in exact.items():
        assert value.any(), name
        assert relative_error(mine[name], value) < 1.5 * relative_error(theirs[name], value) + 1e-6, name
        assert relative_error(mine[name], value) < 0.02, name


def exactly(stock: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The stock layer in fp32: its experts' one rounding to bf16 taken out."""

    class InFP32(GroupedExperts):
        def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
            out = []
            for e, rows in enumerate(x_RD.split(num_tokens_per_expert_E.tolist())):
                hidden = nn.functional.silu(rows @ self.w1_EFD[e].t()) * (rows @ self.w3_EFD[e].t())
                out.append(hidden @ self.w2_EDF[e].t())
            return torch.cat(out)

    experts = stock.routed_experts.inner_experts
    experts.__class__ = InFP32
    stock.zero_grad()
    return run(stock, x)


def test_the_experts_alone_as_under_expert_parallelism() -> None:
    stock, ours = layers()
    counts = torch.tensor([3, 0, 9, 1, 0, 7])
    x = torch.randn(int(counts.sum()) + 4, D, generator=torch.Generator().manual_seed(2)).bfloat16()
    used = slice(0, int(counts.sum()))  # the rest pads the buffer
    mine, theirs = (layer.routed_experts.inner_experts(x, counts) for layer in (ours, stock))
    assert relative_error(mine[used].detach(), theirs[used].detach().double()) < 0.01
    assert not mine[used.stop :].any()
    other_dispatcher = type("Other", (LocalTokenDispatcher,), {})
    ours.routed_experts.token_dispatcher.__class__ = other_dispatcher
    y = torch.randn(1, 12, D, generator=torch.Generator().manual_seed(3))
    assert relative_error(ours(y).detach(), stock(y).detach().double()) < 0.01


def test_other_experts_are_refused_by_name() -> None:
    inner = GptOssGroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E)
    with pytest.raises(ValueError, match=r"cannot replace GptOssGroupedExperts.Config: only torchtitan's stock"):
        apply_overrides(OverrideConfig(imports=[TARGET]), config(inner))


@pytest.mark.parametrize("missing", ["torchtitan.overrides.fused_swiglu", "torchtitan.config"])
def test_another_torchtitan_is_one_line(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]  # as importing does for a failure
    monkeypatch.delitem(sys.modules, integration.__name__)
    with raises_one_line(r"is for torchtitan 0\.3, .*; pip install 'torchtitan>=0.3,<0.4'", ImportError):
        importlib.import_module(integration.__name__)


def qwen3(name: str) -> Any:
    return qwen3_configs[name](attn_backend="flex")


def test_a_layer_of_torchtitans_qwen3(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, overridden = qwen3("debugmodel_moe"), qwen3("debugmodel_moe")
    assert len(apply_overrides(OverrideConfig(imports=[TARGET]), overridden)) == len(stock.layers)
    theirs, ours = (each.layers[3].moe.build() for each in (stock, overridden))
    for layer in (theirs, ours):
        torch.manual_seed(0)
        layer.init_states(buffer_device=torch.device("cpu"))
    for name, parameter in ours.named_parameters():
        assert parameter.any(), f"{name} was not initialised"
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 16, 256, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(integration, "plan_rows", None)  # no rows are made: one operator gathers the tokens
    assert relative_error(ours(x).detach(), theirs(x).detach().double()) < 0.01


def test_the_example_takes_some_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "examples" / "titan.md").read_text(encoding="utf-8")
    (tmp_path / "of_my_own.py").write_text(text.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    model = qwen3("30B-A3B")
    assert len(apply_overrides(importlib.import_module("of_my_own").overrides, model)) == 10
    kinds = [type(layer.moe.routed_experts) is integration.TileMoERoutedExperts.Config for layer in model.layers]
    assert [number for number, ours in enumerate(kinds) if ours] == list(range(10, 20))


@pytest.mark.dist
def test_two_processes_with_torchtitans_expert_parallelism(tmp_path: Path) -> None:
    assert run_on_ranks(CHECKS, 2, tmp_path) == {"check_expert_parallelism": ""}
