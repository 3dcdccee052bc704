"""A decoder and padding: losses, gradients, counts, rounding and bias are those of the real tokens alone.

B sequences · S tokens each · V vocabulary · E experts · L MoE layers
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import raises_one_line, tiny_model
from ranks import run_on_ranks
from torch import Tensor

from tilemoe.config import MoEConfig, RouterConfig, TokenRounding
from tilemoe.kernels.lm.documents import Documents
from tilemoe.models.decoder import DecoderLM, LMOutput
from tilemoe.routing.replay import RoutingRecord

ROUTER = RouterConfig(aux_loss_coef=0.05, z_loss_coef=0.01, selection_bias=True)
MOE = MoEConfig(16, 8, 6, 2, router=ROUTER, shared_intermediate_size=8, initializer_range=0.5)
SEPARATOR, REAL = 7, (30, 17)  # the real tokens of each sequence


def make(rounding: TokenRounding | None = None, checkpointing: str = "none") -> DecoderLM:
    config = tiny_model(vocab_size=41, moe=replace(MOE, rounding=rounding), max_seq_len=80, initializer_range=0.5)
    model = DecoderLM(config, dtype=torch.float64)
    model.reset_parameters(torch.Generator().manual_seed(0))
    model.set_checkpointing(checkpointing)
    return model


def windows(length: int, all_padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """ids (B, S), labels (B, S) and positions (B, S) of documents, each sequence filled up by one of separators."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(8, 41, (count,), generator=generator) for count in REAL]
    rows += [torch.empty(0, dtype=torch.int64)] * all_padding
    ids = torch.full((len(rows), length), SEPARATOR)
    labels, positions = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, real in enumerate(rows):
        n = real.numel()
        ids[row, :n], labels[row, : max(n - 1, 0)] = real, real[1:]
        positions[row, :n], positions[row, n:] = torch.arange(n), torch.arange(length - n)
    return ids, labels, positions


def outcome(model: DecoderLM, out: LMOutput) -> tuple[Any, ...]:
    """All that a step takes from ``out``: losses, statistics, gradients, and the selection bias after it."""
    model.zero_grad()
    assert out.loss is not None
    (out.loss + out.aux_loss).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    biases = {name: b.clone() for name, b in model.named_buffers()}
    model.update_selection_bias(out.pairs_per_expert, 0.1)
    moved = {name: b.clone() for name, b in model.named_buffers()}
    model.load_state_dict(biases, strict=False)
    return out.loss, out.aux_loss, out.tokens_per_expert, out.pairs_per_expert, out.router_entropy, grads, moved


def alone(model: DecoderLM) -> tuple[Any, ...]:
    """The outcome of the real tokens in one sequence of two documents, without padding."""
    parts = [tuple(x[row, :n] for x in windows(30)) for row, n in enumerate(REAL)]
    ids, labels, positions = (torch.cat(x)[None] for x in zip(*parts, strict=True))
    return outcome(model, model(ids, labels, documents=Documents.of(positions)))


@pytest.mark.parametrize("rounding", [None, TokenRounding("nearest", 16)], ids=str)
@pytest.mark.parametrize(("length", "all_padding"), [(31, 0), (70, 2)])
@pytest.mark.parametrize("known_by", ["mask", "attention mask", "documents"])
def test_a_step_is_that_of_the_real_tokens(
    rounding: TokenRounding | None, length: int, all_padding: int, known_by: str
) -> None:
    model = make(rounding, "block" if known_by == "mask" else "none")
    ids, labels, positions = windows(length, all_padding)
    options: dict[str, Any] = {"documents": Documents.of(positions)}
    if known_by != "documents":
        real = torch.arange(length) < torch.tensor([*REAL, *[0] * all_padding])[:, None]
        labels = torch.where(real, labels, 3)  # a label of padding is none
        options = {"token_mask": real if known_by == "mask" else real.long()}
    torch.testing.assert_close(outcome(model, model(ids, labels, **options)), alone(model))


def test_nothing_but_padding_gives_zeros() -> None:
    model, ids = make(TokenRounding("nearest", 16)), torch.full((2, 40), SEPARATOR)
    out = model(ids, ids, token_mask=torch.zeros_like(ids))
    loss, aux_loss, rows, pairs, entropy, grads, moved = outcome(model, out)
    for found in (loss, aux_loss, rows, pairs, entropy, *grads.values(), *moved.values()):
        assert not found.any()


def test_a_text_of_one_word_is_no_padding() -> None:
    """Where another token is learnt of it, where others follow, and where logits are asked for."""
    model, ids = make(), torch.full((1, 20), SEPARATOR)
    labels = ids.clone()
    labels[0, -1] = 3
    last = Documents.of(torch.cat([torch.arange(8), torch.arange(12)])[None])
    assert model(ids, labels, documents=last).pairs_per_expert.sum(1).tolist() == [40, 40]
    ids[0, -1] = 3
    assert model(ids, ids, documents=last).pairs_per_expert.sum(1).tolist() == [40, 40]
    ids[0, -1] = SEPARATOR
    assert model(ids, documents=last).pairs_per_expert.sum(1).tolist() == [40, 40]
    assert model(ids, ids).pairs_per_expert.sum(1).tolist() == [40, 40]
    ids[0, :8] = torch.arange(8)  # a text that ends in one word, all of which is learnt
    labels = torch.cat([ids[:, 1:], ids[:, -1:]], 1)
    learnt = model(ids, labels, documents=last)
    assert learnt.pairs_per_expert.sum(1).tolist() == [40, 40]
    logits = model(ids, documents=last).logits
    torch.testing.assert_close(learnt.loss, torch.nn.functional.cross_entropy(logits[0], labels[0]))


def test_labels_that_are_the_ids_say_nothing_of_padding() -> None:
    """As of transformers, which shifts them itself: a last document of one id is padding then."""
    model, text = make(), torch.arange(1, 13)[None]
    filled = torch.cat([text, torch.full((1, 20), SEPARATOR)], 1)
    positions = torch.cat([torch.arange(12), torch.arange(20)])[None]
    alone, padded = (
        model(ids, ids, documents=Documents.of(at)) for ids, at in ((text, positions[:, :12]), (filled, positions))
    )
    assert torch.equal(alone.pairs_per_expert, padded.pairs_per_expert)
    torch.testing.assert_close(alone.aux_loss, padded.aux_loss)


def test_a_mask_of_ones_changes_no_bit_and_one_of_padding_none_of_the_text() -> None:
    model = make().eval()
    ids, labels, _ = windows(30)
    real = torch.arange(30) < torch.tensor(REAL)[:, None]
    for name, value in model(ids, labels, token_mask=torch.ones_like(ids))._asdict().items():
        assert value is None or torch.equal(value, getattr(model(ids, labels), name)), name
    torch.testing.assert_close(model(ids, token_mask=real).logits[real], model(ids).logits[real])


@torch.no_grad()
def test_replay_and_records_leave_padding_out() -> None:
    model, (ids, labels, _) = make(), windows(30)
    real, record = torch.arange(30) < torch.tensor(REAL)[:, None], RoutingRecord()
    out = model(ids, labels, record=record, token_mask=real)
    chosen = record.expert_ids(2)
    assert ((chosen == 6).all(-1) == ~real).all()
    again = model(ids, labels, expert_ids=chosen, token_mask=real)
    torch.testing.assert_close((again.loss, again.pairs_per_expert), (out.loss, out.pairs_per_expert))


def test_a_mask_that_does_not_fit_is_refused() -> None:
    model, (ids, labels, _) = make(), windows(30)
    left = torch.arange(30) >= torch.tensor([[0], [13]])
    with raises_one_line("token_mask has padding before text, which attends to it; pad on the right or pass documents"):
        model(ids, token_mask=left)
    both = Documents.of(torch.cat([torch.arange(13), torch.arange(17)]).expand(2, 30).contiguous())
    assert model(ids, labels, documents=both, token_mask=left).pairs_per_expert.sum(1).tolist() == [94, 94]


def check_ranks_share_the_mean_over_real_tokens() -> None:
    """Rank 0 has the first sequence; rank 1 the second, or nothing but padding."""
    rank = dist.get_rank()
    for rounding in (None, TokenRounding("nearest", 16)):
        model = make(rounding)
        for length, count in ((60, 1), (60, 2)):  # sequences that are real
            ids, labels, positions = (x[rank : rank + 1] for x in windows(length))
            mask = torch.arange(length)[None] < (REAL[rank] if rank < count else 0)
            out = model(ids, labels, documents=Documents.of(positions), token_mask=mask)
            tight = slice(0, REAL[rank])  # the same tokens without padding, of which a rank cannot have none
            tight_mask = mask[:, tight] if rank >= count else None
            tight_out = model(ids[:, tight], labels[:, tight], token_mask=tight_mask)
            found, expected = outcome(model, out), outcome(model, tight_out)
            torch.testing.assert_close(found, expected)
            gathered = out.aux_loss.detach().clone()
            dist.all_reduce(gathered)
            assert gathered > 0
            if rank >= count:
                assert not out.pairs_per_expert.any()
            elif rounding is None and count == 1:  # the whole batch is rank 0's
                torch.testing.assert_close(gathered / 2, whole_aux_loss(model))


def whole_aux_loss(model: DecoderLM) -> Tensor:
    """Of the first sequence, by this process alone."""
    for block in model.blocks:
        block.mlp.group = dist.GroupMember.NON_GROUP_MEMBER
    ids, labels, _ = windows(30)
    found = model(ids[:1], labels[:1]).aux_loss.detach()
    for block in model.blocks:
        block.mlp.group = None
    return found


@pytest.mark.dist
def test_two_processes(tmp_path: Path) -> None:
    assert run_on_ranks([check_ranks_share_the_mean_over_real_tokens], 2, tmp_path) == {
        "check_ranks_share_the_mean_over_real_tokens": ""
    }
