"""The wheel built from this checkout installs elsewhere and trains: recipes and types travel with it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "tilemoe/py.typed" in names
    assert {"tilemoe/recipes/tiny.json", "tilemoe/perf/recorded.json"} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tilemoe"}


def test_wheel_installs_elsewhere_and_trains(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, text=True)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for index in range(40):
        (corpus / f"{index:02}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    # -I leaves out the checkout and PYTHONPATH; the wheel's own folder is put back by hand.
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import tilemoe; print(tilemoe.__file__); "
        "from tilemoe.cli.main import main; sys.exit(main())"
    )
    arguments = ["train", "--recipe", "smoke", "--train.steps", "3", "--train.out-dir", str(tmp_path / "run")]
    run = subprocess.run(
        [sys.executable, "-I", "-c", code, *arguments, "--data.corpus", str(corpus)],
        cwd=tmp_path,
        env={**os.environ, "TILEMOE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert str(site) in run.stdout
    assert "held-out loss" in run.stdout
