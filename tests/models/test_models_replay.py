"""A decoder that records its routing as it generates, and replays it as it trains.

B sequences · S tokens each · L MoE layers · K experts per token
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import raises_one_line, tiny_model
from torch import Tensor

from tilemoe.config import CHECKPOINTING_MODES
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.generate import generate
from tilemoe.routing.replay import RoutingRecord

L, K = 2, 2  # of three layers the middle one is dense


def make(**changes: Any) -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(tiny_model(initializer_range=0.3, **changes))


def ids_of(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(40, (batch, length), generator=torch.Generator().manual_seed(1))


def recorded(model: DecoderLM, ids: Tensor) -> Tensor:
    record = RoutingRecord()
    model(ids, record=record)
    return record.expert_ids(ids.shape[0])


def loss_and_grads(model: DecoderLM, expert_ids: Tensor | None) -> list[Tensor]:
    model.zero_grad()
    out = model(ids_of(), ids_of().roll(-1, 1), expert_ids=expert_ids)
    assert out.loss is not None
    (out.loss + out.aux_loss).backward()
    return [out.loss.detach(), out.tokens_per_expert, *(p.grad for p in model.parameters() if p.grad is not None)]


def test_generation_records_what_a_forward_over_all_tokens_records() -> None:
    model, record = make(), RoutingRecord()
    out = generate(model, ids_of(2, 4), 6, generator=torch.Generator().manual_seed(0), record=record)
    ids = record.expert_ids(2)
    assert ids.shape == (L, 2, 9, K)
    assert torch.equal(ids, recorded(model, out[:, :-1]))


@pytest.mark.parametrize(("mode", "compiled"), [*((mode, False) for mode in CHECKPOINTING_MODES), ("block", True)])
def test_training_replays_under_checkpointing_and_records_once(mode: str, compiled: bool) -> None:
    plain, model = make(), make()
    model.set_checkpointing(mode)
    if compiled:
        model.compile_blocks("aot_eager")
    other = torch.rand(L, 2, 9, 6, generator=torch.Generator().manual_seed(3)).argsort(-1)[..., :K]
    want = loss_and_grads(plain, other)
    torch.testing.assert_close(loss_and_grads(model, other), want)
    assert not torch.equal(want[1], loss_and_grads(plain, None)[1])
    record = RoutingRecord()
    out = model(ids_of(), ids_of().roll(-1, 1), record=record)
    assert out.loss is not None
    out.loss.backward()
    assert torch.equal(record.expert_ids(2), recorded(plain, ids_of()))


def test_ids_that_do_not_fit_are_one_line() -> None:
    model = make()
    ids = recorded(model, ids_of())
    with raises_one_line(r"expert_ids must lie in \[0, 6\)"):
        model(ids_of(), expert_ids=ids + 6)
    dense = DecoderLM(replace(tiny_model(), moe=None, dense_layers=()))
    with raises_one_line("expert_ids was given to a model without experts"):
        dense(ids_of(), expert_ids=ids)
