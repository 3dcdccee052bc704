"""A small corpus, a recipe file over it, a finished run, and the command line in this process."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import write_corpus

from tilemoe.cli.main import main
from tilemoe.config import to_dict
from tilemoe.train.config import load_recipe


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
    base = load_recipe("smoke")
    data = {
        "seq_len": 32,
        "batch_size": 4,
        "heldout_every": 4,
        "corpus": str(text),
        "cache_dir": f"{text.parent}/cache",
    }
    often = {"log_every": 1, "save_every": 5, "accumulation": 2, "threads": 1, "out_dir": str(text.parent / "unused")}
    recipe = replace(
        base,
        name="little",
        model=replace(base.model, max_seq_len=32),
        data=replace(base.data, **data),
        optim=replace(base.optim, warmup_steps=4, schedule="wsd"),
        train=replace(base.train, plot=False, sample_prompt="ab", sample_tokens=8, **often),
    )
    path = text.parent / "little.json"
    path.write_text(json.dumps(to_dict(recipe)))
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
