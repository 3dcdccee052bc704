"""Models that exist, of transformers or of ours: runs that start from them, and their evaluation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tilemoe.cli.main import main
from tilemoe.data import prepare, sequential_windows
from tilemoe.data.corpus import open_corpus
from tilemoe.data.tokenizer import ByteTokenizer, load_tokenizer
from tilemoe.models.folder import find_folder
from tilemoe.train.checkpoints.initial import adopt
from tilemoe.train.config import Recipe

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts_per_tok": 2, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**SIZES, num_experts=4, pad_token_id=0)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, head_dim=16, mlp_only_layers=[1]),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4)),
}


def write_model(name: str, folder: Path, vocab_size: int = 256, **options: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    kind, config = MODELS[name]
    config = copy.deepcopy(config)
    config.vocab_size = vocab_size
    model = kind(config).float().eval()
    model.save_pretrained(folder, **options)
    ByteTokenizer().save(folder / "tokenizer.json")
    return model


def of_models(quick: str) -> list[Any]:
    """Their names as parameters of a test, of which all but one are thorough: what is theirs alone is shown here."""
    return [pytest.param(name, marks=() if name == quick else pytest.mark.thorough) for name in MODELS]


@pytest.mark.parametrize("name", MODELS)
def test_the_evaluation_is_transformers(
    name: str, moe_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tokenizer of several bytes a token, over the whole held-out split."""
    monkeypatch.setenv("TILEMOE_CACHE", str(tmp_path / "cache"))
    corpus = moe_recipe.data.corpus
    theirs = write_model(name, tmp_path / "base", vocab_size=300)
    load_tokenizer("bpe:300", open_corpus(corpus)).save(tmp_path / "base" / "tokenizer.json")
    options = ("--heldout-every", "4", "--batch-size", "3", "--seq-len", "16")
    assert main(["eval", "--checkpoint", str(tmp_path / "base"), "--corpus", corpus, *options]) == 0
    data = prepare(corpus, str(tmp_path / "base" / "tokenizer.json"), tmp_path / "cache", heldout_every=4)
    nats = 0.0
    with torch.no_grad():
        for inputs, targets in sequential_windows(data.heldout, 16, 1):
            logits = theirs(input_ids=torch.from_numpy(inputs)).logits[0].double()
            nats += torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets)[0], reduction="sum").item()
    tokens, num_bytes = data.heldout.num_tokens, data.heldout.num_bytes
    assert num_bytes is not None
    first, last = capsys.readouterr().out.splitlines()
    losses = f"{nats / tokens:.4f} nats/token, {nats / num_bytes:.4f} nats/byte"
    assert first.endswith(f"held-out loss {losses}, whole split of {tokens:,} tokens")
    assert last == f"held-out loss {nats / num_bytes:.2f} nats/byte"


def test_what_cannot_be_started_from(
    moe_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"^--init-from /no/such/folder: no such folder; give a run"):
        find_folder("--init-from", "/no/such/folder")
    write_model("olmoe", tmp_path / "base")
    with pytest.raises(ValueError, match=r"^--init-from .*config\.json is a file; give its folder$"):
        find_folder("--init-from", str(tmp_path / "base" / "config.json"))
    command = ["train", "--recipe", "smoke", "--init-from", str(tmp_path / "base"), "--resume", str(tmp_path)]
    assert main(command) == 2
    assert "leave one of them out" in capsys.readouterr().err
    (tmp_path / "base" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"base has no tokenizer\.json; save the model's tokenizer there"):
        adopt(moe_recipe, tmp_path / "base")
    with pytest.raises(ValueError, match=r"holds no step_\* folder"):
        adopt(moe_recipe, tmp_path)

    def offline(name: str, **options: Any) -> str:
        raise OSError("no network\nhere")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"^--init-from org/name: no such folder, and the hub .* \(no network here\)$"):
        find_folder("--init-from", "org/name")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: f"/cache/{name}")
    assert find_folder("--init-from", "org/name") == Path("/cache/org/name")
