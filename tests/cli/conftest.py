"""A small corpus, a recipe file over it, a finished run, and the command line in this process."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import write_corpus

from tilemoe.cli.main import main

SETTINGS = {
    "name": "little",
    "description": "for tests",
    "model": {
        "vocab_size": 256,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_seq_len": 32,
        "moe": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "router": {"aux_loss_coef": 0.01},
        },
    },
    "data": {"seq_len": 32, "batch_size": 4, "heldout_every": 4},
    "optim": {"lr": 0.01, "warmup_steps": 4, "schedule": "wsd"},
    "train": {
        "steps": 30, "accumulation": 2, "precision": "fp32", "threads": 1, "log_every": 1, "eval_every": 10,
        "eval_batches": 2, "save_every": 5, "plot": False, "sample_prompt": "ab", "sample_tokens": 8,
    },
}  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's cache stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEMOE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text"), 1)


@pytest.fixture(scope="session")
def recipe_file(text: Path) -> Path:
    """The path of the recipe; its train.out_dir has to be given."""
    settings = json.loads(json.dumps(SETTINGS))
    settings["data"] |= {"corpus": str(text), "cache_dir": str(text.parent / "cache")}
    settings["train"]["out_dir"] = str(text.parent / "unused")
    path = text.parent / "little.json"
    path.write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="session")
def finished(recipe_file: Path) -> Path:
    """The folder of an uninterrupted run."""
    folder = recipe_file.parent / "finished"
    assert main(["train", "--recipe", str(recipe_file), "--train.out-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``tilemoe`` with the given arguments in this process: (exit status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def fails(run: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """The one line that the given arguments fail with."""

    def call(*arguments: object) -> str:
        status, _, err = run(*arguments)
        assert status == 2
        assert err.startswith("tilemoe: error: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        return err

    return call
