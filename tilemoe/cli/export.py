"""``tilemoe export``: write a folder that ``transformers`` loads, or adapters alone, which ``peft`` loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilemoe.checks import expand_user
from tilemoe.cli.parsing import parse
from tilemoe.config import ModelConfig

if TYPE_CHECKING:
    from tilemoe.train.checkpoints.restore import Restored


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``tilemoe export``."""

    checkpoint: Path  # a run's folder (its newest checkpoint) or a step_* folder
    out: Path  # the folder to write; it must not exist yet, or be empty
    adapter: bool = False  # write the adapters alone, in PEFT's format; else they are merged into the weights


def run(arguments: Sequence[str]) -> None:
    options = parse(
        ExportOptions,
        arguments,
        prog="tilemoe export",
        description="Write safetensors and config.json for transformers' AutoModelForCausalLM, or adapters for PEFT.",
    )
    out = expand_user(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists and is not an empty folder; choose another")

    from safetensors import SafetensorError

    from tilemoe.files import staged_folder
    from tilemoe.models.hf_config import export_line
    from tilemoe.models.sums import write_sums
    from tilemoe.train.checkpoints.restore import restore

    restored = restore(expand_user(options.checkpoint), "cpu", "merged")
    try:
        with staged_folder(out) as staging:  # everything appears together or not at all
            _write_weights(restored, staging, is_adapter=options.adapter)
            _write_tokenizer(restored, staging)
            write_sums(staging)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--out {out}: cannot be written ({error}); make room or choose another") from error
    print(f"exported {restored.checkpoint.path} to {out}")
    config = restored.model.config
    if not options.adapter and isinstance(config, ModelConfig) and (line := export_line(config)):
        print(f"note: {line}")


def _write_weights(restored: Restored, folder: Path, *, is_adapter: bool) -> None:
    from tilemoe.integrations.hf_decoder import HFDecoder
    from tilemoe.integrations.peft import save_adapter
    from tilemoe.layers.lora import merge_lora
    from tilemoe.models.folder import is_hf
    from tilemoe.models.huggingface import write_hf
    from tilemoe.train.checkpoints.restore import merged_dtype

    recipe = restored.checkpoint.state.recipe
    lora = recipe.lora
    if isinstance(restored.model, HFDecoder):
        assert lora is not None, "nothing else of it trains"
        if is_adapter:
            restored.model.save_adapters(folder, lora.base)
        else:
            restored.model.save_merged(folder)
        for path in folder.glob("*.safetensors"):
            path.chmod(0o644)  # safetensors creates it for its owner only
        return
    if not is_adapter:
        merge_lora(restored.model)
        restored.model.to(merged_dtype(recipe))
        ends = restored.tokenizer.end_ids
        write_hf(restored.model, folder, eos_token_id=ends if len(ends) > 1 else ends[0])
        return
    if lora is None:
        raise ValueError(f"--adapter: {restored.checkpoint.path} has no adapters; leave it out to export the weights")
    base = lora.base
    if base is not None and Path(base).is_dir() and not is_hf(Path(base)):
        base = None  # a checkpoint of ours, which transformers cannot load
    save_adapter(restored.model, folder, base=base)


def _write_tokenizer(restored: Restored, folder: Path) -> None:
    from tilemoe.files import write_atomic
    from tilemoe.models.folder import TOKENIZER_FILE

    restored.tokenizer.save(folder / TOKENIZER_FILE)
    settings = restored.tokenizer.hf_config(restored.model.config.max_seq_len)
    write_atomic(folder / "tokenizer_config.json", (json.dumps(settings, indent=2) + "\n").encode())
