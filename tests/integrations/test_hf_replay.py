"""Routing of transformers' models, recorded and replayed through their own routers.

T tokens · B sequences · S tokens each · L MoE layers · E experts · K experts per token
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import raises_one_line
from hf_models import FAMILIES, SEQ, step, tokens
from torch import Tensor, nn
from transformers import PreTrainedModel

from tilemoe.integrations.replay import record_routing, replay_routing
from tilemoe.testing import assert_equal

B = 2
pytestmark = pytest.mark.usefixtures("registered")


def make(family: str, **more: Any) -> PreTrainedModel:
    return FAMILIES[family].make(experts_implementation="tilemoe", **more)


def recorded(model: nn.Module, ids: Tensor | None = None) -> Tensor:
    """The ids that the model chooses for these tokens, by default for `tokens`."""
    ids = tokens() if ids is None else ids
    with record_routing(model) as record:
        model(input_ids=ids)
    return record.expert_ids(ids.shape[0])


def other_ids(model: nn.Module) -> Tensor:
    """As many as the model's own, at random."""
    own = recorded(model)
    experts = next(module for name, module in model.named_modules() if name.endswith("experts"))
    num_experts = next(experts.parameters()).shape[0]
    generator = torch.Generator().manual_seed(4)
    return torch.rand(*own.shape[:-1], num_experts, generator=generator).argsort(-1)[..., : own.shape[-1]]


def replayed(model: nn.Module, expert_ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    with replay_routing(model, expert_ids):
        return step(model)


def to_experts(model: nn.Module, expert_ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each MoE layer what its router makes of its input, full logits, and the ids and weights its experts get."""
    given: list[Tensor] = []
    logits: list[Tensor] = []
    handles = []
    for name, module in model.named_modules():
        if name.endswith("experts"):
            handles.append(module.register_forward_pre_hook(lambda _, args: given.extend(args[1:3])))
        if name.endswith((".gate", ".router")):
            handles.append(module.register_forward_hook(lambda _, args, out: logits.append(out[0])))
    with replay_routing(model, expert_ids):
        model(input_ids=tokens())
    for handle in handles:
        handle.remove()
    return zip(logits, given[::2], given[1::2], strict=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_its_own_ids_changes_no_bit_and_any_others_are_taken(family: str) -> None:
    model = make(family)
    plain, own, other = step(model), recorded(model), other_ids(model)
    assert own.shape[:3] == (FAMILIES[family].moe_layers, B, SEQ)
    assert_equal(replayed(model, own), plain)
    assert not torch.equal(replayed(model, other)[1], plain[1])
    for layer, (_, ids, _) in enumerate(to_experts(model, other)):
        assert torch.equal(ids, other[layer].flatten(0, 1))
    assert_equal(step(model), plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_scores_are_those_of_the_routers_present_weights(family: str) -> None:
    """Groups and the bias that DeepSeek chooses by would not have chosen these."""
    model = make(family)
    for logits, ids, weights in to_experts(model, other_ids(model)):
        if family == "qwen3_moe":
            kept = logits.softmax(-1).gather(1, ids)
            expected = kept / kept.sum(-1, keepdim=True)
        elif family == "gpt_oss":
            expected = logits.gather(1, ids).softmax(-1)
        else:
            kept = logits.sigmoid().gather(1, ids)
            expected = kept / kept.sum(-1, keepdim=True) * model.config.routed_scaling_factor
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("length", [SEQ, 1])
def test_the_only_group_of_experts_takes_no_top_k_for_the_router(length: int) -> None:
    """DeepSeek-V3 scores a group by its best 2 experts: of one group and K = 2 these look like the router's choice."""
    model = make("deepseek_v3", n_group=1, topk_group=1, num_experts_per_tok=2)
    ids = tokens()[:, :length]
    own, other = recorded(model, ids), other_ids(model)[:, :, :length]
    want = model(input_ids=ids).logits
    with replay_routing(model, own):
        assert_equal([model(input_ids=ids).logits], [want])
    with replay_routing(model, other), record_routing(model) as record:
        got = model(input_ids=ids).logits
    assert torch.equal(record.expert_ids(B).long(), other)
    model.set_experts_implementation("eager")
    with replay_routing(model, other):
        torch.testing.assert_close(got, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    for logits, _, weights in to_experts(model, other_ids(model)):
        kept = logits.sigmoid().gather(1, other_ids(model).flatten(0, 2))
        torch.testing.assert_close(weights, kept / kept.sum(-1, keepdim=True) * model.config.routed_scaling_factor)
    mask = torch.arange(B * length).view(B, length) % 3 > 0
    with replay_routing(model, torch.where(mask[..., None], other, -1), mask), record_routing(model) as record:
        model(input_ids=ids)
    assert torch.equal(record.expert_ids(B).long(), torch.where(mask[..., None], other, own.long()))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4"])
def test_gradient_checkpointing_replays_again_and_records_once(family: str, reentrant: bool) -> None:
    model = make(family)
    other, own = other_ids(model), recorded(model)
    want = replayed(model, other)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    assert_equal(replayed(model, other), want)
    with record_routing(model) as record:
        step(model)
    assert torch.equal(record.expert_ids(B), own)


def test_tokens_that_the_mask_leaves_out_choose_by_themselves() -> None:
    model = make("deepseek_v3")
    other, mask = other_ids(model), torch.arange(B * SEQ).view(B, SEQ) % 3 > 0
    other[:, ~mask] = -1
    with record_routing(model) as record, replay_routing(model, other, mask.long()):
        model(input_ids=tokens())
    ids = record.expert_ids(B)
    assert torch.equal(ids[:, mask], other[:, mask])
    assert torch.equal(ids[0][~mask], recorded(model)[0][~mask])


def test_what_was_generated_with_a_cache_has_its_log_probabilities_in_training() -> None:
    model = make("qwen3_moe")
    with record_routing(model) as record:
        out = model.generate(
            tokens(), max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    sampled, ids, inputs = torch.stack(out.logits, dim=1).log_softmax(-1), record.expert_ids(B), out.sequences[:, :-1]
    with replay_routing(model, ids):
        trained = model(input_ids=inputs).logits[:, SEQ - 1 :].log_softmax(-1)
    torch.testing.assert_close(trained, sampled, rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # moves some tokens to other experts
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(recorded(model, inputs), ids)
    with replay_routing(model, ids), record_routing(model) as again:
        trained = model(input_ids=inputs).logits[:, SEQ - 1 :].log_softmax(-1)
    assert torch.equal(again.expert_ids(B), ids)
    free = model(input_ids=inputs).logits[:, SEQ - 1 :].log_softmax(-1)
    assert (trained - sampled).abs().mean() < (free - sampled).abs().mean()


def test_what_cannot_be_replayed_is_one_line() -> None:
    model = make("qwen3_moe")
    ids = recorded(model)
    assert ids.shape == (2, B, SEQ, 2)
    mask = torch.ones(B, SEQ, dtype=torch.bool)
    for wrong, more, message in (
        (ids[0, 0], (), r"expert_ids must be \(L, B, S, K\) with the model's L = 2 MoE layers, got \(9, 2\)"),
        (ids[:1], (), r"L = 2 MoE layers, got \(1, 2, 9, 2\)"),
        (ids.tolist(), (), "L = 2 MoE layers, got list"),
        (ids[:, :, 1:], (), r"expert_ids must be \(T, K\) = \(18, 2\), got \(16, 2\)"),
        (ids[..., :1], (), r"expert_ids must be \(T, K\) = \(18, 2\), got \(18, 1\)"),
        (ids + 6, (), r"expert_ids must lie in \[0, 6\)"),
        (torch.zeros_like(ids), (), "expert_ids names expert 0 twice"),
        (ids.float(), (), "expert_ids must be int32 or int64"),
        (ids.transpose(1, 2), (), r"\(L, B, S, K\) with the batch's B, S = \(2, 9\), not \(9, 2\)"),
        (ids, (mask[:, 1:],), r"token_mask must be \(2, 9\) torch.bool, got \(2, 8\)"),
        (ids, (mask.T,), r"token_mask must be \(2, 9\) torch.bool, got \(9, 2\)"),
        (ids, (mask[0],), r"token_mask must be \(18,\) torch.bool, got \(9,\)"),
        (ids, (mask.float(),), "token_mask must be .* torch.bool, got .* torch.float32"),
        (ids, (mask.tolist(),), "token_mask must be a tensor, got list"),
    ):
        with raises_one_line(message), replay_routing(model, wrong, *more):
            model(input_ids=tokens())
    for module in (nn.Linear(2, 2), model.model.layers[0].mlp.experts):
        with raises_one_line("has no MoE layers whose experts transformers dispatches"), record_routing(module):
            pass
    with raises_one_line("expert_ids were not taken by model.layers.0.mlp.experts"), replay_routing(model, ids):
        pass


@pytest.mark.skipif("deepseek_v4" not in FAMILIES, reason="this release of transformers has no DeepSeek-V4")
def test_a_layer_that_chooses_by_a_table_chooses_again_what_it_chose() -> None:
    """DeepSeek-V4's first layers look experts up by token id: they are asked nothing, and others are refused."""
    model = make("deepseek_v4", mlp_layer_types=["hash_moe", "moe"])
    table = model.model.layers[0].mlp.gate.tid2eid
    table.copy_(torch.rand(len(table), 6, generator=torch.Generator().manual_seed(2)).topk(table.shape[1]).indices)
    plain, own, other = step(model), recorded(model), other_ids(model)
    assert torch.equal(own[0].long(), table[tokens()])
    assert_equal(replayed(model, own), plain)
    mixed = torch.stack([own[0].long(), other[1]])
    with replay_routing(model, mixed), record_routing(model) as record:
        assert not torch.equal(model(input_ids=tokens()).logits, plain[1])
    assert torch.equal(record.expert_ids(B).long(), mixed)
    mask = torch.arange(B * SEQ).view(B, SEQ) % 3 > 0
    mixed[:, ~mask] = -1
    with replay_routing(model, mixed, mask):
        model(input_ids=tokens())
    mixed[0] = other[0]
    with raises_one_line(r"replayed by model.layers.0.mlp.experts: .* values 0 times"), replay_routing(model, mixed):
        model(input_ids=tokens())


def test_a_router_that_does_not_choose_by_a_top_k_is_refused() -> None:
    model = make("qwen3_moe")
    ids = recorded(model)
    gate = model.model.layers[1].mlp.gate
    forward = gate.forward
    gate.forward = lambda x: (forward(x), forward(x))[1]
    with (
        raises_one_line(r"cannot be replayed by model.layers.1.mlp.experts: its router took the top 2 of 6 values 2"),
        replay_routing(model, ids),
    ):
        model(input_ids=tokens())
    gate.forward = lambda x: (x, *(part[:, :2] for part in x[:, :6].sort(descending=True)))
    with raises_one_line(r"model.layers.1.mlp.experts: .* values 0 times"), replay_routing(model, ids):
        model(input_ids=tokens())


def test_a_model_compiled_before_says_that_nothing_was_replayed() -> None:
    model = make("mixtral")
    ids = recorded(model)
    compiled = torch.compile(model, backend="eager")
    compiled(input_ids=tokens())
    with raises_one_line("expert_ids were not taken by"), replay_routing(compiled, ids):
        compiled(input_ids=tokens())
    with record_routing(compiled) as record:
        compiled(input_ids=tokens())
    with raises_one_line("the record is empty; .* inside record_routing run one that was not compiled before"):
        record.expert_ids(B)
