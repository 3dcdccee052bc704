"""``tilemoe eval``: the held-out loss of a checkpoint, on its own corpus or another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tilemoe.cli.parsing import parse


@dataclass(frozen=True)
class EvalOptions:
    """Options of ``tilemoe eval``."""

    checkpoint: Path  # a run's folder (its newest checkpoint) or a step_* folder
    corpus: str | None = None  # default: the corpus it was trained on
    batches: int = 0  # batches to read; 0: the whole held-out split
    batch_size: int | None = None  # sequences per batch; default: the recipe's
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        if self.batches < 0:
            raise ValueError(f"--batches must be >= 0, got {self.batches}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"--batch-size must be >= 1, got {self.batch_size}")


def run(arguments: Sequence[str]) -> None:
    options = parse(EvalOptions, arguments, prog="tilemoe eval", description="Held-out loss of a checkpoint.")

    import torch
    from rich.console import Console
    from rich.progress import Progress

    from tilemoe.data import prepare
    from tilemoe.train.checkpoints.restore import restore
    from tilemoe.train.evaluate import evaluate
    from tilemoe.train.loop import data_fingerprint

    restored = restore(options.checkpoint.expanduser(), options.device)
    recipe = restored.checkpoint.state.recipe
    data = prepare(
        options.corpus or recipe.data.corpus,
        restored.checkpoint.tokenizer_spec,
        recipe.data.cache_path,
        heldout_every=recipe.data.heldout_every,
    )
    if options.corpus is None and data_fingerprint(data) != restored.checkpoint.state.data_fingerprint:
        print(f"note: corpus {recipe.data.corpus} changed since training, which may have seen what is held out now")
    seq_len, batch_size = recipe.data.seq_len, options.batch_size or recipe.data.batch_size
    most = data.heldout.num_tokens
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        bar = shown.add_task("held-out tokens", total=min(most, options.batches * batch_size * seq_len or most))
        result = evaluate(
            restored.model,
            data.heldout,
            seq_len=seq_len,
            batch_size=batch_size,
            device=restored.device,
            autocast=lambda: torch.autocast(
                restored.device.type, torch.bfloat16, enabled=recipe.train.precision == "bf16"
            ),
            max_batches=options.batches,
            on_batch=lambda tokens: shown.update(bar, completed=tokens),
        )
    assert result is not None, "nothing asks this evaluation to stop"
    print(f"checkpoint {restored.checkpoint.path}, {result.tokens:,} tokens, {result.nats_per_token:.4f} nats/token")
    print(f"held-out loss {result.shown(2)}")
