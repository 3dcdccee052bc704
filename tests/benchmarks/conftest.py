"""The benchmarks are scripts beside the package: their folder is on pytest's path (pyproject.toml)."""

from pathlib import Path

import pytest

from tilemoe.bench import record


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rows are recorded, here and in processes that are started, as of a commit that is made up."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setenv("TILEMOE_RESULTS", str(tmp_path))
    monkeypatch.setenv(record.COMMIT_VARIABLE, "0123456789ab")
    return tmp_path
