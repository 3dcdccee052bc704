"""The loop: accumulation, the selection bias, NaN, evaluation, and what a run does in which order."""

import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import timeless
from small_runs import changed

from tilemoe.config import TokenRounding
from tilemoe.data import Prepared, sequential_windows
from tilemoe.layers.experts import Experts
from tilemoe.layers.moe import MoE, MoEOutput
from tilemoe.models.decoder import LMOutput
from tilemoe.ops.accumulating_moe import accumulating_moe
from tilemoe.train import loop
from tilemoe.train.checkpoints.folder import list_checkpoints, open_checkpoint
from tilemoe.train.checkpoints.restore import build_model, restore, select_device
from tilemoe.train.config import Recipe
from tilemoe.train.datasets import prepare_data
from tilemoe.train.evaluate import evaluate
from tilemoe.train.finite import find_non_finite
from tilemoe.train.loop import Trainer, expert_load
from tilemoe.train.optim import optimizer_tensors
from tilemoe.train.run import train

CPU = torch.device("cpu")


def data_of(recipe: Recipe) -> Prepared:
    return prepare_data(recipe.data, recipe.data.tokenizer)


def trainer_of(recipe: Recipe, dtype: torch.dtype = torch.float32) -> Trainer:
    return Trainer(recipe, build_model(recipe, CPU).to(dtype), data_of(recipe), CPU)


def test_accumulated_micro_batches_equal_the_big_batch(recipe: Recipe) -> None:
    # The balancing loss is a product of batch means, so it is the one thing that differs, by definition.
    if recipe.model.moe is not None:
        recipe = changed(recipe, model__moe__router__aux_loss_coef=0.0)
    parts = changed(recipe, train__accumulation=4, data__batch_size=2)
    whole = changed(recipe, data__batch_size=8)
    one, other = trainer_of(parts, torch.float64), trainer_of(whole, torch.float64)
    for _ in range(3):
        left, right = one.train_step(), other.train_step()
        assert left.nats_per_token == pytest.approx(right.nats_per_token, rel=1e-6)
        assert left.expert_load == right.expert_load
        assert left.tokens == right.tokens
    for (name, a), b in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize(
    ("parts", "shared", "changes", "added"),
    [
        (1, False, {}, False),
        (2, False, {}, True),
        (2, True, {}, False),
        (2, True, {"between_micro_batches": "weights"}, False),
        (2, True, {"between_micro_batches": "weights_and_gradients"}, True),
        (2, True, {"between_micro_batches": "weights_and_gradients", "reduce_dtype": "bfloat16"}, False),
    ],
)
def test_kernels_add_gradients_where_their_sums_stay(
    moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, parts: int, shared: bool, changes: dict[str, Any], added: bool
) -> None:
    monkeypatch.setattr(loop, "is_shared", lambda model: shared)
    parallel = replace(moe_recipe.parallel, reshard_after_forward=False, **changes)
    trainer = trainer_of(replace(moe_recipe, parallel=parallel, train=replace(moe_recipe.train, accumulation=parts)))
    experts = [module for module in trainer.model.modules() if isinstance(module, Experts)]
    assert [layer.compute is accumulating_moe for layer in experts] == [added] * 2


@pytest.mark.parametrize("rounding", [None, TokenRounding("nearest", 16)])
def test_the_selection_bias_moves_once_per_step_from_all_micro_batches(
    moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, rounding: TokenRounding | None
) -> None:
    """By the router's own choice: rows that are rounded cannot be balanced."""
    recipe = changed(moe_recipe, model__moe__rounding=rounding, train__accumulation=3)
    trainer = trainer_of(recipe)
    calls = []
    outs: list[LMOutput] = []
    trainer.model.register_forward_hook(lambda module, args, out: outs.append(out))
    monkeypatch.setattr(trainer.model, "update_selection_bias", lambda counts, rate: calls.append((counts, rate)))
    trainer.train_step()
    assert len(calls) == 1
    counts, rate = calls[0]
    assert counts.shape == (2, 4)
    assert counts.sum(1).tolist() == [recipe.tokens_per_step * 2] * 2
    assert torch.equal(counts, sum(out.pairs_per_expert for out in outs))
    assert torch.equal(counts, sum(out.tokens_per_expert for out in outs)) == (rounding is None)
    assert rate == 0.01


@pytest.mark.parametrize("tile", [None, 16])
def test_load_and_waste_are_of_all_micro_batches(
    moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tile: int | None
) -> None:
    """The load over the whole step; the waste of each micro-batch by itself, as its products are, in the tile of a GPU
    or the one that rows are rounded to."""
    rounding = None if tile is None else TokenRounding("nearest", tile)
    trainer = trainer_of(changed(moe_recipe, model__moe__rounding=rounding, train__accumulation=2))
    seen: list[torch.Tensor] = []
    trainer.model.register_forward_hook(lambda module, args, out: seen.append(out.tokens_per_expert.clone()))
    stats = trainer.train_step()
    rows = torch.stack(seen).double()
    assert rows.shape == (2, 2, 4)
    assert stats.expert_load == pytest.approx((rows.sum(0).amax(1) / rows.sum(0).mean(1)).tolist(), abs=1e-4)
    assert stats.expert_load_p95 == stats.expert_load  # of four experts
    assert stats.dead_experts == (rows.sum(0) == 0).sum(1).tolist()
    padded = 128 * torch.ceil(rows / 128)
    expected = [0.0, 0.0] if tile else (padded.sum((0, 2)) / rows.sum((0, 2)) - 1).tolist()
    assert stats.tile_waste == pytest.approx(expected, abs=1e-4)


def test_the_routers_entropy_and_what_rounding_changes_are_of_the_training_forwards(
    moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean over all micro-batches, in which neither recomputation nor an evaluation counts."""
    rounding = TokenRounding("nearest", 16)
    trainer = trainer_of(changed(moe_recipe, model__moe__rounding=rounding, train__accumulation=2))
    trainer.model.set_checkpointing("block")
    logits, pairs, rows = [], [], []

    def keep(module: MoE, args: object, out: MoEOutput) -> None:
        assert out.router_logits is not None
        logits.append(out.router_logits.detach())
        chosen = out.router_logits.detach().topk(2).indices
        pairs.append(torch.bincount(chosen.flatten(), minlength=4))
        rows.append(out.tokens_per_expert)

    begun: list[object] = []
    for layer in (block.mlp for block in trainer.model.blocks):
        layer.register_forward_hook(keep)
        layer.register_forward_pre_hook(lambda module, args: begun.append(module))
    monkeypatch.setattr(trainer.optimizer, "step", lambda: None)
    stats = trainer.train_step()
    assert len(begun) == 2 * len(logits) == 2 * 2 * 2, "repeated forwards stop where backward needs no more of them"
    entropy = [-(p * p.log()).sum(1).mean().item() / np.log(4) for p in (each.softmax(1) for each in logits)]
    assert stats.router_entropy == pytest.approx([np.mean(entropy[::2]), np.mean(entropy[1::2])], abs=1e-4)
    for layer in range(2):
        changes = [after - before for after, before in zip(rows[layer::2], pairs[layer::2], strict=True)]
        total = sum(int(each.sum()) for each in pairs[layer::2])
        dropped = sum(int((-change).clamp(min=0).sum()) for change in changes)
        added = sum(int(change.clamp(min=0).sum()) for change in changes)
        assert dropped + added > 0
        assert stats.dropped_pairs[layer] == pytest.approx(dropped / total, abs=1e-4)
        assert stats.added_pairs[layer] == pytest.approx(added / total, abs=1e-4)
    trainer.model.eval()
    batch = torch.zeros(1, 8, dtype=torch.int64)
    assert trainer.model(batch).router_entropy.tolist() == [0.0, 0.0]


def test_dead_experts_and_the_load_of_the_95th_percentile_of_experts() -> None:
    counts = torch.ones(2, 40, dtype=torch.int64)
    counts[0, :3] = torch.tensor([100, 50, 21])  # of 40 experts two are above the percentile
    counts[1, 7:] = 0
    mean = counts.double().mean(1)
    busiest, p95, dead = expert_load(counts)
    assert busiest.tolist() == pytest.approx((torch.tensor([100.0, 1.0]) / mean).tolist())
    assert p95.tolist() == pytest.approx((torch.tensor([21.0, 1.0]) / mean).tolist())
    assert dead.tolist() == [0.0, 33.0]
    assert expert_load(torch.zeros(0, 0, dtype=torch.int64)).shape == (3, 0)
    assert expert_load(torch.zeros(1, 4, dtype=torch.int64)).tolist() == [[0.0], [0.0], [4.0]]


def test_evaluation_is_the_mean_over_every_token_of_the_split(recipe: Recipe) -> None:
    data, model = data_of(recipe), build_model(recipe, CPU)

    def measure(**options: object) -> object:
        return evaluate(model, data.heldout, seq_len=16, device=CPU, autocast=nullcontext, **options)

    result = measure(batch_size=5)
    assert result.tokens == data.heldout.num_tokens
    nats = 0.0
    with torch.no_grad():
        for inputs, targets in sequential_windows(data.heldout, 16, 1):
            logits = model.eval()(torch.from_numpy(inputs)).logits[0].double()
            nats += torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets)[0], reduction="sum").item()
    assert result.nats_per_token == pytest.approx(nats / result.tokens, rel=1e-5)
    assert result.nats_per_byte == pytest.approx(nats / data.heldout.num_bytes, rel=1e-5)
    read: list[int] = []
    part = measure(batch_size=5, max_batches=2, on_batch=read.append)
    assert part.tokens == 2 * 5 * 16
    assert (result.whole_split, part.whole_split) == (True, False)
    assert measure(batch_size=5, max_batches=10**6) == result
    assert read == [5 * 16, 2 * 5 * 16]
    assert measure(batch_size=5, stop_requested=lambda: True) is None


def test_a_whole_run_and_what_it_leaves(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(recipe)
    loss = r"held-out loss (\d\.\d{4}) nats/token, \1 nats/byte"  # a token is a byte
    lines = [line for line in capsys.readouterr().out.splitlines() if "held-out loss" in line]
    for line, (step, read) in zip(lines, [(2, "subset"), (4, "subset"), (6, "whole split")], strict=True):
        assert re.fullmatch(rf"step {step}/6  {loss}, {read} of [\d,]+ tokens", line)
    folder = Path(recipe.train.out_dir)
    assert result.sample.startswith("ab")
    assert result.plot is None
    assert [path.name for path in list_checkpoints(folder)] == ["step_00000003", "step_00000006"]
    records = timeless(folder)
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [(r["step"], r["whole_split"]) for r in records if r["kind"] == "eval"] == [
        (2, False), (4, False), (6, True),
    ]  # fmt: skip
    assert records[-1]["nats_per_byte"] == result.evaluation.nats_per_byte
    layers = len(records[-1]["tokens_per_expert"])
    assert layers == (2 if recipe.model.moe else 0)
    state = open_checkpoint(folder / "step_00000006").state
    assert (state.step, state.tokens) == (6, 6 * 4 * 16)
    restored = restore(folder, "cpu")
    assert restored.tokenizer.name == "bytes"


def test_missing_extras_are_one_line_and_the_run_goes_on(
    dense_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("matplotlib", "tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("matplotlib", "tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)  # what is None there cannot be imported
    train(replace(dense_recipe, train=replace(dense_recipe.train, steps=2, plot=True, tensorboard=True, wandb=True)))
    out = capsys.readouterr().out
    assert out.splitlines().count("no plot: pip install 'tilemoe[plot]'") == 1
    assert "no TensorBoard files: pip install 'tilemoe[log]'" in out.splitlines()
    assert "no Weights & Biases: pip install 'tilemoe[wandb]'" in out.splitlines()
    assert (Path(dense_recipe.train.out_dir) / "result.json").exists()


def test_a_part_of_a_split_has_nats_per_byte_only_where_a_token_is_a_byte(dense_recipe: Recipe) -> None:
    for tokenizer, known in (("bytes", True), ("bpe:300", False)):
        recipe = changed(dense_recipe, model__vocab_size=300, data__tokenizer=tokenizer, data__heldout_every=4)
        data, model = data_of(recipe), build_model(recipe, CPU)
        part, whole = (
            evaluate(model, data.heldout, seq_len=16, batch_size=4, device=CPU, autocast=nullcontext, max_batches=n)
            for n in (2, 0)
        )
        assert str(whole).endswith(f" {whole.nats_per_byte:.4f} nats/byte, whole split of {whole.tokens:,} tokens")
        assert whole.shown(2) == f"{whole.nats_per_byte:.2f} nats/byte"
        if known:
            assert part.nats_per_byte == part.nats_per_token
        else:
            assert part.nats_per_byte is None
            assert part.shown(2) == f"{part.nats_per_token:.2f} nats/token"
            assert str(part) == f"held-out loss {part.nats_per_token:.4f} nats/token, subset of 128 tokens"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_named(moe_recipe: Recipe, value: float) -> None:
    trainer = trainer_of(moe_recipe)
    trainer.train_step()
    tensors = {**trainer.model.state_dict(), **optimizer_tensors(trainer.model, trainer.optimizer)}
    for name, tensor in tensors.items():
        kept = tensor.reshape(-1)[-1].item()
        tensor.view(-1)[-1] = value
        assert find_non_finite(trainer.model, trainer.optimizer) == name
        tensor.view(-1)[-1] = kept
    assert find_non_finite(trainer.model, trainer.optimizer) is None


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto") == select_device("cpu") == CPU
    with pytest.raises(ValueError, match="no CUDA GPU"):
        select_device("cuda")
