"""``tilemoe generate``: continue a prompt, or answer it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tilemoe.checks import require_finite, require_int
from tilemoe.cli.parsing import parse


@dataclass(frozen=True)
class GenerateOptions:
    """Options of ``tilemoe generate``."""

    checkpoint: str  # a run's folder (its newest checkpoint), a step_* folder, transformers' folder, a name on the hub
    prompt: str  # the text to continue, or to answer
    chat: bool = False  # the prompt is a user's turn, by the checkpoint's chat template; print the answer alone
    max_new_tokens: int = 200  # fewer if a document ends or the model's context is full
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 40  # sample among the K likeliest tokens only; 0: among all
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens must be >= 1, got {self.max_new_tokens}")
        require_finite("--temperature", self.temperature)
        require_int("--top-k", self.top_k, 0)
        require_int("--seed", self.seed, 0)


def run(arguments: Sequence[str]) -> None:
    options = parse(GenerateOptions, arguments, prog="tilemoe generate", description="Continue a prompt, or answer it.")

    from tilemoe.data.chat_encoder import ChatEncoder
    from tilemoe.models.folder import find_folder, is_hf
    from tilemoe.models.sums import sums_line
    from tilemoe.train.checkpoints.restore import autocast_of, restore_model
    from tilemoe.train.sample import continue_text

    folder = find_folder("--checkpoint", options.checkpoint)
    model, tokenizer = restore_model(folder, options.device)
    if is_hf(folder) and (line := sums_line(folder)):
        print(f"note: {line}", file=sys.stderr)
    if options.chat and tokenizer.chat_template is None:
        raise ValueError(
            "--chat: the checkpoint has no chat template; fine-tune it with --data.format chat, or omit it"
        )
    with autocast_of(model):
        found = continue_text(
            model,
            tokenizer,
            options.prompt,
            options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
            chat=ChatEncoder(tokenizer) if options.chat else None,
        )
    print(found.text)
    if found.is_cut:
        print(
            f"note: {found.new_tokens} of {options.max_new_tokens} new tokens; with the prompt they fill the "
            f"{model.config.max_seq_len} that the model takes",
            file=sys.stderr,
        )
