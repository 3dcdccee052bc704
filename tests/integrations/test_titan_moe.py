"""torchtitan's own mixture-of-experts layer with the override against the same layer without it, on a CPU."""

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import raises_one_line
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.models.qwen3 import qwen3_configs
from torchtitan.models.qwen3.sharding import _GROUPED_EXPERTS_PARAM_LAYOUT

from tilemoe.integrations import torchtitan as integration
from tilemoe.testing import assert_equal, relative_error

E, K, D, F = 6, 2, 32, 24
TARGET = "tilemoe.integrations.torchtitan.tilemoe_experts"
BACKEND = "partial_dtensor"  # what torchtitan 0.3 can shard with on a released PyTorch


def linear(inputs: int, outputs: int) -> Any:
    return Linear.Config(in_features=inputs, out_features=outputs, bias=False)


def config(inner: Any = None) -> Any:
    return MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=inner or GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
        ),
        router=TokenChoiceTopKRouter.Config(num_experts=E, gate=linear(D, E), top_k=K, route_norm=True),
        shared_experts=FeedForward.Config(w1=linear(D, F), w2=linear(F, D), w3=linear(D, F)),
    )


def filled(stock: nn.Module, ours: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Both with the same weights, loaded from the stock layer's checkpoint."""
    assert isinstance(ours.routed_experts, integration.TileMoERoutedExperts)
    generator = torch.Generator().manual_seed(0)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    for layer in (stock, ours):
        nn.init.zeros_(layer.expert_bias_E)
        layer.tokens_per_expert_E.zero_()
    ours.load_state_dict(stock.state_dict())
    assert_equal(ours.state_dict(), stock.state_dict())
    return stock, ours


def run(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and every gradient under the stock layer's names."""
    x = x.clone().requires_grad_()
    out = layer(x)
    (out * torch.linspace(-1.0, 1.5, out.numel()).view_as(out)).sum().backward()
    results = {"out": out.detach(), "x": x.grad}
    results |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    for name in [name for name in results if name.endswith(".w13")]:
        w13 = results.pop(name)
        results |= {name.replace("w13", part): w13[:, :, i] for i, part in enumerate(("w1_EFD", "w3_EFD"))}
    return results


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


def divided_config() -> Any:
    cfg = config()
    cfg.routed_experts.token_dispatcher = AllToAllTokenDispatcher.Config(num_experts=E, top_k=K)
    set_moe_sharding_config(cfg, enable_ep=True, enable_sp=False, expert_param_layout=_GROUPED_EXPERTS_PARAM_LAYOUT)
    return cfg


def divided_layers() -> tuple[nn.Module, nn.Module]:
    """The stock layer and the overridden one, with equal weights, over two processes."""
    set_spmd_backend(BACKEND)
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=2, world_size=2, spmd_backend=BACKEND
    )
    with mock.patch.object(parallel_dims, "device_type", "cpu"):  # it takes a machine without an accelerator for one
        dims.build_mesh()
    overridden = divided_config()
    apply_overrides(OverrideConfig(imports=[TARGET]), overridden)  # after the sharding, as torchtitan's trainer does
    stock, ours = filled(divided_config().build(), overridden.build())
    for layer in (stock, ours):
        layer.parallelize(dims)
    return stock, ours


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def check_expert_parallelism() -> None:
    """Each process holds half of the experts, and torchtitan's own dispatcher brings their rows."""
    stock, ours = divided_layers()
    assert local(ours.routed_experts.inner_experts.w13).shape[0] == E // 2
    x = torch.randn(2, 25, D, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    theirs, mine = run(stock, x), run(ours, x)
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert local(expected).any(), name
        assert relative_error(local(mine[name]), local(expected).double()) < 0.01, name


@pytest.mark.dist
def test_two_processes_with_torchtitans_expert_parallelism(tmp_path: Path) -> None:
    assert run_on_ranks([check_expert_parallelism], 2, tmp_path) == {"check_expert_parallelism": ""}
