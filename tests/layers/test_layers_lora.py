"""Adapters on a model's experts: added, trained, merged."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import redraw
from torch import Tensor, nn

from tilemoe import DecoderLM, ModelConfig, MoE, MoEConfig, accumulate_grads
from tilemoe.layers.lora import ATTENTION, EXPERTS, adapter_names, add_lora, merge_lora
from tilemoe.ops.accumulating_moe import accumulating_moe
from tilemoe.testing import relative_error

CFG = MoEConfig(16, 24, 5, 2, expert_bias=True, gate_up="interleaved", initializer_range=0.3)


def layer(**options: Any) -> MoE:
    moe = MoE(CFG, **options)
    moe.reset_parameters(torch.Generator().manual_seed(0))
    return moe


def tokens() -> Tensor:
    return torch.randn(30, 16, generator=torch.Generator().manual_seed(1))


def test_nothing_changes_at_first_and_only_adapters_train() -> None:
    moe, x = layer(), tokens()
    before = moe(x).hidden
    adapters = add_lora(moe, rank=4, alpha=8.0)
    torch.testing.assert_close(moe(x).hidden, before, rtol=1e-6, atol=1e-6)
    assert [p for p in moe.parameters() if p.requires_grad] == adapters
    assert [tuple(p.shape) for p in adapters] == [(5, 4, 16), (5, 48, 4), (5, 4, 24), (5, 16, 4)]
    moe(x).hidden.square().sum().backward()
    assert all(p.grad is None for p in moe.parameters() if not p.requires_grad)
    assert [bool(adapter.grad.any()) for adapter in adapters] == [False, True, False, True], "b is zero"


@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize("transposed", [False, True])
def test_merged_computes_the_same(transposed: bool, gate_up: str) -> None:
    """Turned: weights that are stored (E, d, w), as gpt-oss has them, stay where they are and as they are stored."""
    moe, x = MoE(replace(CFG, gate_up=gate_up)), tokens()
    moe.reset_parameters(torch.Generator().manual_seed(0))
    nn.init.normal_(moe.experts.b1, 0.0, 0.2, generator=torch.Generator().manual_seed(3))
    if transposed:
        for name in ("w1", "w2"):
            stored = getattr(moe.experts, name).detach().transpose(1, 2).contiguous()
            setattr(moe.experts, name, nn.Parameter(stored.transpose(1, 2)))
    redraw(add_lora(moe, rank=4, alpha=8.0), 0.3, seed=2)
    w1 = moe.experts.w1
    before, layout = w1.detach().clone(), (w1.data_ptr(), w1.stride())
    adapted = moe(x).hidden
    merge_lora(moe)
    torch.testing.assert_close(moe(x).hidden, adapted, rtol=1e-4, atol=1e-5)
    assert relative_error(moe.experts.w1, before) > 0.1
    assert (moe.experts.w1.data_ptr(), moe.experts.w1.stride()) == layout


def test_merging_bf16_rounds_once() -> None:
    moe = layer(dtype=torch.bfloat16)
    adapters = add_lora(moe, rank=4, alpha=8.0, dtype=torch.float32)
    redraw(adapters, 0.3, seed=2)
    before = moe.experts.w1.double()
    up_a, up_b, *_ = (adapter.detach().double() for adapter in adapters)
    merge_lora(moe)
    expected = before + 2.0 * up_b @ up_a
    assert relative_error(moe.experts.w1, expected) < 1.2 * relative_error(expected.bfloat16(), expected)


def test_merged_experts_save_and_accumulate_as_before() -> None:
    """A repeated block takes its configuration's save="fp8" back; adapters do not bring it again."""
    moe = MoEConfig(128, 128, 4, 2, save="fp8")
    model = DecoderLM(ModelConfig(29, 128, 1, 2, 1, 8, 32, moe=moe))
    model.set_checkpointing("block")
    accumulate_grads(model)
    before = model.blocks[0].mlp.experts
    add_lora(model, rank=4, alpha=8.0)
    merge_lora(model)
    after = model.blocks[0].mlp.experts
    assert (after.save, after.compute) == (before.save, before.compute) == ("full", accumulating_moe)


@pytest.mark.parametrize("modules", [(ATTENTION,), (EXPERTS, ATTENTION)])
def test_attention_learns_by_adapters_and_is_itself_after_merging(modules: tuple[str, ...]) -> None:
    config = ModelConfig(29, 16, 2, 2, 1, 8, 32, moe=CFG, initializer_range=0.3)
    model = DecoderLM(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    ids = torch.arange(32).remainder(29)[None]
    logits = model(ids).logits
    adapters = add_lora(model, 4, 8.0, modules=modules)
    assert len(adapters) == 2 * (8 + 4 * (EXPERTS in modules))
    kv_and_o = [(4, 16), (8, 4), (4, 16), (8, 4), (4, 16), (16, 4)]
    assert [tuple(p.shape) for p in adapters[-6:]] == kv_and_o
    assert adapter_names(model) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert adapter_names(model) | set(names) == {name for name, _ in model.named_parameters()}
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-6, atol=1e-6)
    redraw(adapters, 0.3, seed=2)
    adapted = model(ids).logits
    assert relative_error(adapted.detach(), logits.detach()) > 0.1
    model(ids[:, :-1], ids[:, 1:]).loss.backward()
    assert all(adapter.grad.any() for adapter in adapters)
    exact = {}
    for name in before:
        head = name.rpartition(".")[0]
        if f"{head}.lora_a" in adapter_names(model):
            module = model.get_submodule(head)
            exact[name] = before[name] + 2.0 * module.lora_b.detach() @ module.lora_a.detach()
    merge_lora(model)
    assert [name for name, _ in model.named_parameters()] == names
    torch.testing.assert_close({name: model.state_dict()[name] for name in exact}, exact)
    torch.testing.assert_close(model(ids).logits, adapted, rtol=1e-3, atol=1e-4)


def of_several_ranks() -> MoE:
    moe = layer()
    moe.experts.dispatcher = object()  # type: ignore[assignment]  # any that is not the local one
    return moe


def with_adapters() -> MoE:
    moe = layer()
    add_lora(moe, 4, 8.0)
    return moe


@pytest.mark.parametrize(
    ("make", "rank", "alpha", "message"),
    [
        (lambda: nn.Linear(2, 2), 4, 8.0, r"Linear has no tilemoe.MoE to put adapters on"),
        (layer, 0, 8.0, "rank must be an integer >= 1, got 0"),
        (layer, 4, -1, "alpha must be a finite number > 0, got -1"),
        (lambda: layer(recompute="up_proj"), 4, 8.0, "experts with recompute cannot have adapters"),
        (lambda: MoE(replace(CFG, intermediate_size=128, save="fp8")), 4, 8.0, "experts with save 'fp8' cannot have"),
        (of_several_ranks, 4, 8.0, "experts under expert parallelism cannot have adapters"),
        (lambda: MoE(replace(CFG, precision="fp8")), 4, 8.0, "experts with precision 'fp8' cannot have adapters"),
        (with_adapters, 4, 8.0, "has adapters already; call merge_lora first"),
    ],
)
def test_what_takes_no_adapters_is_named_and_stays(make: Any, rank: int, alpha: float, message: str) -> None:
    module = make()
    before = [parameter.requires_grad for parameter in module.parameters()]
    with pytest.raises(ValueError, match=message):
        add_lora(module, rank, alpha)
    assert [parameter.requires_grad for parameter in module.parameters()] == before


def test_a_rank_of_attention_needs_attention() -> None:
    with pytest.raises(ValueError, match="attention_rank is for attention; add 'attention' to modules, or leave"):
        add_lora(layer(), 4, 8.0, attention_rank=2)
