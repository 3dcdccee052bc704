"""The kinds of write that the package makes, on a small scale: what is there before, the write, how it is read."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import timeless, tiny_model

from tilemoe.cli import export
from tilemoe.data import Prepared, Tokenizer, load_tokenizer, prepare
from tilemoe.data.tokenizer import ChatTemplate
from tilemoe.models.huggingface import whole_parameters
from tilemoe.models.sums import checked
from tilemoe.train.checkpoints.distributed import JobSaver
from tilemoe.train.checkpoints.folder import TrainState, find_latest
from tilemoe.train.checkpoints.names import clean_stale
from tilemoe.train.checkpoints.pending import PendingCheckpoint, Saver
from tilemoe.train.checkpoints.restore import make_decoder
from tilemoe.train.config import LoRAConfig, Recipe, load_recipe
from tilemoe.train.optim import make_optimizer, optimizer_tensors
from tilemoe.train.preflight import PLOT_FILE, RESULT_FILE

TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", (("eos_token", "<|endoftext|>"),))


@dataclass(frozen=True)
class Write:
    """``begin`` makes what is there before. ``read`` gives what is there, and raises where it is damaged: None where
    there is nothing. ``again`` does what a user does after a failure.
    """

    begin: Callable[[Path], None]
    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    again: Callable[[Path], None]
    context: Callable[[], Any] = nullcontext
    spared: int | None = None  # what is read from here on may stay as it was, and the write succeeds
    elsewhere: tuple[str, ...] = ("\0",)  # beginnings of paths whose calls another kind of write has


def digest(tensors: Any) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(dict(tensors).items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.detach().numpy().tobytes())
    return sha.hexdigest()


class Training:
    """A model and its optimiser as they are after so many steps: made of random numbers, without training."""

    def __init__(self, recipe: Recipe, step: int) -> None:
        self.recipe, self.step = recipe, step
        generator = torch.Generator().manual_seed(step)
        self.model = make_decoder(recipe)
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                tensor.normal_(generator=generator)
        self.optimizer = make_optimizer(self.model, recipe.optim)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step()

    def save(self, run_dir: Path, tokenizer: Tokenizer, saver: Saver) -> None:
        options: dict[str, Any] = {"tokenizer": tokenizer, "keep_last": 1, "saver": saver}
        state = TrainState(self.recipe, self.step, 10 * self.step, 1.5, "abc")
        PendingCheckpoint(run_dir, state, self.model, self.optimizer, **options).finish()

    def digest(self) -> str:
        return digest(self.model.state_dict()) + digest(optimizer_tensors(self.model, self.optimizer))


def little(tokenizer: str, corpus: Path, **changes: Any) -> Recipe:
    recipe = load_recipe("smoke")
    data = replace(recipe.data, seq_len=16, tokenizer=tokenizer, corpus=str(corpus))
    return replace(recipe, model=tiny_model(vocab_size=300, dense_layers=(), num_layers=1), data=data, **changes)


def a_tokenizer(corpus: Path) -> Tokenizer:
    """A BPE with a chat template: two files."""
    from tilemoe.data import open_corpus

    backend = load_tokenizer("bpe:280", open_corpus(str(corpus))).backend
    return Tokenizer(backend, "bpe:280", TEMPLATE)


def checkpoint_read(folder: Path) -> Any:
    """Step and content of the newest checkpoint, verified and loaded."""
    found = find_latest(folder)
    if found is None:
        return None
    found.require_bytes()
    training = Training(found.state.recipe, found.state.step)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    with found.compared():
        found.load_training(training.model, training.optimizer)
    return found.state.step, training.digest(), load_tokenizer(found.tokenizer_spec).fingerprint


def end_of_run(run_dir: Path, cache: Path) -> Any:
    """What there is of a run, to the bits of its newest checkpoint, and names of temporary files that are left."""
    left = [path.name for folder in (run_dir, cache, *cache.glob("*")) for path in folder.glob(".t*")]
    return timeless(run_dir), checkpoint_read(run_dir), (run_dir / RESULT_FILE).exists(), left


def checkpoint(corpus: Path) -> Write:
    """Step 2 after step 1, then step 3, of which one is kept."""
    recipe, tokenizer = little("bpe:280", corpus), a_tokenizer(corpus)
    trainings = {step: Training(recipe, step) for step in (1, 2, 3)}

    def save(folder: Path, step: int) -> None:
        trainings[step].save(folder, tokenizer, Saver())

    return Write(lambda f: save(f, 1), lambda f: save(f, 2), checkpoint_read, _resuming(save))


def _resuming(save: Callable[[Path, int], None]) -> Callable[[Path], None]:
    """What `train --resume` does to the run's folder before it goes on from the newest checkpoint, to step 3."""

    def again(folder: Path) -> None:
        found = find_latest(folder)
        clean_stale(folder)
        for step in range(found.state.step if found else 0, 3):
            save(folder, step + 1)

    return again


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed_checkpoint(corpus: Path) -> Write:
    """As `checkpoint`, by a job of one process."""
    recipe, tokenizer = little("bpe:280", corpus), a_tokenizer(corpus)
    trainings = {step: Training(recipe, step) for step in (1, 2, 3)}

    def save(folder: Path, step: int) -> None:
        trainings[step].save(folder, tokenizer, JobSaver(60))

    def begin(folder: Path) -> None:
        with group_of_one():
            save(folder, 1)

    return Write(begin, lambda f: save(f, 2), checkpoint_read, _resuming(save), group_of_one)


def split_digests(found: Prepared) -> tuple[str, ...]:
    splits: Any = (found.train, found.heldout)
    return tuple(hashlib.sha256(split.read(0, split.num_tokens).tobytes()).hexdigest() for split in splits)


def token_shards(corpus: Path) -> Write:
    """The shards of a BPE that is trained and kept, beside those of bytes."""

    def prepared(folder: Path, tokenizer: str) -> Any:
        return split_digests(prepare(str(corpus), tokenizer, folder / "cache", heldout_every=4, shard_tokens=4000))

    def read(folder: Path) -> Any:
        made = [path for path in (folder / "cache" / "shards").glob("[!.]*") if path.is_dir()]
        return prepared(folder, "bytes") + (prepared(folder, "bpe:280") if len(made) > 1 else ())

    def write(folder: Path) -> None:
        prepared(folder, "bpe:280")

    return Write(lambda folder: (folder.mkdir(), prepared(folder, "bytes"))[0], write, read, write)


def tokenizer_file(corpus: Path) -> Write:
    """A tokenizer.json and its template, written over others."""
    tokenizer = a_tokenizer(corpus)
    older = Tokenizer(load_tokenizer("bytes").backend, "bytes", replace(TEMPLATE, source="older"))

    def begin(folder: Path) -> None:
        folder.mkdir()
        older.save(folder / "tokenizer.json")

    def read(folder: Path) -> Any:
        found = load_tokenizer(str(folder / "tokenizer.json"))
        assert found.chat_template is not None
        return [found.fingerprint, found.chat_template.source]

    def write(folder: Path) -> None:
        tokenizer.save(folder / "tokenizer.json")

    return Write(begin, write, read, write)


def _exported(corpus: Path, *options: str) -> Write:
    checkpoint_in = Path(tempfile.mkdtemp(dir=corpus.parent))
    lora = LoRAConfig(modules=("attention", "experts")) if options else None
    recipe = little("bpe:280", corpus, lora=lora)
    Training(recipe, 1).save(checkpoint_in, a_tokenizer(corpus), Saver())

    def write(folder: Path) -> None:
        export.run(["--checkpoint", str(checkpoint_in), "--out", str(folder / "out"), *options])

    def read(folder: Path) -> Any:
        if not (folder / "out").exists():
            return None
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "out").iterdir()}
        with checked(folder / "out"):
            whole = digest([] if options else whole_parameters(folder / "out", recipe.model))
        return files, whole, load_tokenizer(str(folder / "out" / "tokenizer.json")).fingerprint

    def again(folder: Path) -> None:
        if read(folder) is None:
            write(folder)

    return Write(Path.mkdir, write, read, again)


def exported_model(corpus: Path) -> Write:
    return _exported(corpus)


def exported_adapter(corpus: Path) -> Write:
    return _exported(corpus, "--adapter")


def run_records(corpus: Path) -> Write:
    """metrics.jsonl, result.json and plot.png of a run that goes on from its first step's checkpoint."""
    from tilemoe.train.run import train

    base = little("bytes", corpus)
    data = replace(base.data, batch_size=2, heldout_every=40, cache_dir=str(corpus.parent / "cache"))
    settings = replace(
        base.train, steps=2, save_every=1, keep_last=9, log_every=1, eval_every=1, eval_batches=1, plot=True,
        tensorboard=False, sample_tokens=2, sample_prompt="a", precision="fp32", device="cpu", threads=1,
    )  # fmt: skip
    recipe = replace(base, data=data, train=settings)

    def go_on(folder: Path) -> None:
        found = find_latest(folder)
        train(replace(recipe, train=replace(settings, out_dir=str(folder))), found)

    def begin(folder: Path) -> None:
        first = replace(settings, out_dir=str(folder), steps=1, plot=False)
        train(replace(recipe, train=first))

    def read(folder: Path) -> Any:
        metrics = timeless(folder)
        result = json.loads((folder / RESULT_FILE).read_bytes())
        plot = (folder / PLOT_FILE).read_bytes() if (folder / PLOT_FILE).exists() else b""
        assert not plot or (plot.startswith(b"\x89PNG") and plot.endswith(b"IEND\xaeB`\x82"))
        return [metrics, result["recipe"]["train"]["steps"], checkpoint_read(folder), plot != b""]

    checkpoints = ("step_", ".tmp-step_", ".trash-step_")
    return Write(begin, go_on, read, go_on, _with_an_empty_plot, spared=3, elsewhere=checkpoints)


@contextmanager
def _with_an_empty_plot() -> Iterator[None]:
    """To draw the panels would take most of a run's time, and only the file matters."""
    from matplotlib.figure import Figure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilemoe.train.run.run_figure", lambda records, title: Figure())
        yield


WRITES = {
    "checkpoint": checkpoint,
    "distributed checkpoint": distributed_checkpoint,
    "token shards": token_shards,
    "tokenizer": tokenizer_file,
    "export": exported_model,
    "adapter export": exported_adapter,
    "run": run_records,
}
