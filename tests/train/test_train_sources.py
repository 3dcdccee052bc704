"""Runs on several sources: resumed bit for bit, alone or in a job, evaluated on all of them; mistakes."""

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import losses, raises_one_line, write_corpus
from small_runs import words_of
from test_train_chat import write_chats
from torch import nn

from tilemoe.cli.main import main
from tilemoe.data import Mixture, PackedDocuments
from tilemoe.train.checkpoints.folder import CheckpointError, find_latest
from tilemoe.train.checkpoints.restore import build_model
from tilemoe.train.config import DataConfig, Recipe
from tilemoe.train.datasets import prepare_data
from tilemoe.train.evaluate import Evaluation, _batches, evaluate
from tilemoe.train.job.processes import Job
from tilemoe.train.run import RunResult, train

CPU = torch.device("cpu")


@pytest.fixture(params=["text", "chat"])
def recipe(request: pytest.FixtureRequest, moe_recipe: Recipe, tmp_path: Path) -> Iterator[Recipe]:
    """Of two sources, the first three times as often."""
    sources = []
    for number, weight in ((0, "3"), (1, "1")):
        if request.param == "text":
            path = tmp_path / f"text{number}"
            path.mkdir()
            write_corpus(path, 10 + number)
        else:
            path = write_chats(tmp_path / f"chats{number}.jsonl", 60, seed=number)
        sources.append(f"{path}={weight}")
    data = replace(
        moe_recipe.data, sources=tuple(sources), format=request.param, seq_len=64, batch_size=2, too_long="skip",
        cache_dir=str(tmp_path / "cache"), heldout_every={"text": 40, "chat": 4}[request.param],
    )  # fmt: skip
    return replace(moe_recipe, model=replace(moe_recipe.model, max_seq_len=64), data=data)


def test_a_resumed_run_is_the_uninterrupted_one(recipe: Recipe, tmp_path: Path) -> None:
    """Bit for bit, though the sources have moved."""
    recipe = replace(recipe, train=replace(recipe.train, accumulation=2))
    whole = replace(recipe, train=replace(recipe.train, out_dir=str(tmp_path / "whole")))
    assert isinstance(train(whole), RunResult)
    train(replace(recipe, train=replace(recipe.train, steps=3, save_every=0)))
    moved = []
    for corpus, weight in recipe.data.weight_of_corpus:
        place = shutil.move(corpus, str(Path(corpus).with_name(f"moved_{Path(corpus).name}")))
        moved.append(f"{place}={weight}")
    shutil.rmtree(tmp_path / "cache")
    train(replace(recipe, data=replace(recipe.data, sources=tuple(moved))), find_latest(Path(recipe.train.out_dir)))
    assert losses(Path(recipe.train.out_dir)) == losses(tmp_path / "whole")
    ends = [sorted(Path(r.train.out_dir).glob("step_*"))[-1] for r in (recipe, whole)]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes(), file


def test_the_held_out_loss_is_of_all_sources(recipe: Recipe) -> None:
    heldout, model = prepare_data(recipe.data, "bytes").heldout, build_model(recipe, CPU)
    assert isinstance(heldout, Mixture)
    options: dict[str, Any] = {"seq_len": 64, "device": CPU, "autocast": lambda: torch.autocast("cpu", enabled=False)}
    whole, *of_parts = (evaluate(model, each, batch_size=2, **options) for each in (heldout, *heldout.parts))
    assert whole is not None
    assert whole.whole_split
    assert whole.tokens == sum(each.tokens for each in of_parts) == heldout.num_targets
    nats = sum(each.nats_per_token * each.tokens for each in of_parts)
    assert whole.nats_per_token == pytest.approx(nats / whole.tokens, rel=1e-6)
    if heldout.num_bytes is not None:
        assert whole.nats_per_byte == pytest.approx(nats / sum(part.num_bytes for part in heldout.parts), rel=1e-6)


class Numbers:
    """A split of ``tokens``, in memory."""

    split, directory, separator_id, num_bytes = "heldout", Path("memory"), 0, None

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.num_tokens, self.num_targets = tokens, tokens.size, tokens.size

    def read(self, start: int, length: int) -> np.ndarray:
        return self.tokens[start : start + length]


class MeanLabel(nn.Module):
    """Its loss is the mean of the labels."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(loss=labels[labels >= 0].double().mean(), tokens_per_expert=torch.zeros(1, 1))


def documents(lengths: list[int]) -> PackedDocuments:
    """Of so many tokens, the longer ones the harder, whatever windows they are packed in."""
    flagged = [4 * length + 2 + (place == 0) for length in lengths for place in range(length)]
    return PackedDocuments(Numbers(np.array(flagged)), 16)  # type: ignore[arg-type]


HARD_EIGHTH = np.repeat([1000, 100], [1024, 7168])
SPLITS = {
    "begins hard": Numbers(HARD_EIGHTH),
    "ends hard": Numbers(HARD_EIGHTH[::-1]),
    "periodic": Numbers(np.tile(np.repeat([1000, 100], 16 * 8), 64)),  # with a period of 16 windows
    "documents": documents([17, 9, 5, 3] * 100),
    "sources": Mixture((Numbers(HARD_EIGHTH[:1024]), Numbers(HARD_EIGHTH[1024:])), (1.0, 1.0)),  # type: ignore[arg-type]
    "documents of sources": Mixture((documents([17] * 50), documents([3] * 1500)), (3.0, 1.0)),
    "one window": Numbers(np.arange(3)),
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_part_of_the_split_is_spread_over_all_of_it(name: str, batch_size: int) -> None:
    def measure(max_batches: int) -> Evaluation:
        split: Any = SPLITS[name]
        options: dict[str, Any] = {"seq_len": 16, "device": CPU, "autocast": nullcontext, "batch_size": batch_size}
        found = evaluate(MeanLabel(), split, max_batches=max_batches, **options)
        assert found is not None
        return found

    whole, part = measure(0), measure(64 // batch_size)
    assert part.nats_per_token == pytest.approx(whole.nats_per_token, rel=0.05)
    assert part == measure(64 // batch_size)
    assert part.whole_split == (name == "one window")
    assert measure(10**6) == whole


@pytest.mark.parametrize("max_batches", [0, 1, 7])
@pytest.mark.parametrize("sizes", [(1000,), (300, 700), (3, 990, 7)])
def test_processes_evaluate_together_what_one_does(sizes: tuple[int, ...], max_batches: int) -> None:
    """No token twice, in batches of one shape, as many in each process."""
    ends = np.cumsum(sizes)
    parts: Any = tuple(Numbers(np.arange(end - size, end)) for size, end in zip(sizes, ends, strict=True))

    def targets(job: Job) -> list[np.ndarray]:
        return [batch[1] for batch in _batches(Mixture(parts, (1.0,) * len(sizes)), 8, 3, max_batches, job)]

    alone = np.concatenate(targets(Job(0, 1)))
    found = alone[alone >= 0]
    assert len(np.unique(found)) == len(found)
    assert len(found) == sum(sizes) if max_batches == 0 else 0 < len(found) <= max_batches * 3 * 8
    for processes in (2, 3):
        each = [targets(Job(rank, processes)) for rank in range(processes)]
        assert len({len(batches) for batches in each}) == 1
        together = np.concatenate([np.concatenate(batches) for batches in each])
        assert np.array_equal(np.sort(together[together >= 0]), np.sort(found))


def test_the_commands_say_what_is_read(recipe: Recipe, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data, out = recipe.data, str(tmp_path / "run")
    options = {
        "train.steps": 2, "train.out-dir": out, "data.format": data.format, "data.cache-dir": data.cache_dir,
        "data.seq-len": 64, "data.heldout-every": data.heldout_every, "data.too-long": "skip", "train.sample-tokens": 0,
    }  # fmt: skip
    words = words_of(options)
    words += ["--model.max-seq-len", "64", "--data.tokenizer", "bytes", "--train.no-plot"]
    assert main(["train", "--recipe", "smoke", *words, "--data.sources", *data.sources]) == 0, capsys.readouterr().err
    trained = capsys.readouterr().out
    assert f"data: sources {', '.join(data.sources)}, tokenizer bytes" in trained.replace("\n", " ")
    for (corpus, _), share in zip(data.weight_of_corpus, ("75.0%", "25.0%"), strict=True):
        assert f"{share} of the sequences from {corpus}" in trained
    assert main(["eval", "--checkpoint", out]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == trained.splitlines()[-1]
    assert main(["eval", "--checkpoint", out, "--corpus", data.weight_of_corpus[0][0]]) == 0
    alone = prepare_data(replace(data, sources=(), corpus=data.weight_of_corpus[0][0]), "bytes").heldout
    assert f"whole split of {alone.num_targets:,} tokens" in capsys.readouterr().out


def test_a_run_goes_on_with_its_sources_alone(recipe: Recipe) -> None:
    train(recipe)
    checkpoint = find_latest(Path(recipe.train.out_dir))
    first, second = recipe.data.sources
    for sources, message in (
        ((first, second.replace("=1", "=2")), r"data.sources is \[3.0, 2.0\] here and \[3.0, 1.0\] in the checkpoint"),
        ((first,), r"data.sources is \[3.0\] here and \[3.0, 1.0\] in the checkpoint"),
        ((second.replace("=1", "=3"), first.replace("=3", "=1")), r"data.sources .* is not the text that checkpoint"),
    ):
        with raises_one_line(message, CheckpointError):
            train(replace(recipe, data=replace(recipe.data, sources=sources)), checkpoint)
    train(replace(recipe, data=replace(recipe.data, sources=(f"{first}.0", second))), checkpoint)


BAD = ("a.txt", "=2", "a.txt=", "a.txt=0", "a.txt=-1", "a.txt=nan", "a.txt=inf", "a=b")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"sources": ("good.txt=1", bad)}, "must be PATH=WEIGHT with a weight > 0, as in .*=1") for bad in BAD),
        ({"sources": ("a=1e308", "b=1e308")}, "the weights add up to inf; give smaller ones"),
        ({"sources": ("a=1",), "tokenizer": "bpe:400"}, "is trained on data.corpus, not on data.sources; give"),
    ],
)
def test_sources_that_cannot_be_mixed_are_named(settings: dict[str, Any], message: str) -> None:
    with raises_one_line(f"^data.(sources|tokenizer).*{message}"):
        DataConfig(8, 1, **settings)


def test_sources_have_weights() -> None:
    assert DataConfig(8, 1, sources=("a=b=0.5",)).weight_of_corpus == [("a=b", 0.5)]
    assert DataConfig(8, 1).weight_of_corpus == [("stdlib", 1.0)]
