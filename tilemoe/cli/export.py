"""``tilemoe export``: a folder that ``transformers`` loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilemoe.cli.parsing import parse


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``tilemoe export``."""

    checkpoint: Path  # a run's folder (its newest checkpoint) or a step_* folder
    out: Path  # the folder to write; it must not exist yet, or be empty


def run(arguments: Sequence[str]) -> None:
    options = parse(
        ExportOptions,
        arguments,
        prog="tilemoe export",
        description="Write safetensors and config.json for transformers' AutoModelForCausalLM.",
    )
    out = options.out.expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists and is not an empty folder; choose another")

    from safetensors import SafetensorError

    from tilemoe.data.files import staged_folder, write_atomic
    from tilemoe.models.folder import TOKENIZER_FILE
    from tilemoe.models.huggingface import save_hf
    from tilemoe.train.checkpoints.restore import restore

    restored = restore(options.checkpoint.expanduser(), "cpu")
    tokenizer = restored.tokenizer
    try:
        with staged_folder(out) as staging:  # model and tokenizer appear together or not at all
            save_hf(restored.model, staging, eos_token_id=tokenizer.separator_id)
            tokenizer.save(staging / TOKENIZER_FILE)
            settings = tokenizer.hf_config(restored.model.config.max_seq_len)
            write_atomic(staging / "tokenizer_config.json", (json.dumps(settings, indent=2) + "\n").encode())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--out {out}: cannot be written ({error}); make room or choose another") from error
    print(f"exported {restored.checkpoint.path} to {out}")
