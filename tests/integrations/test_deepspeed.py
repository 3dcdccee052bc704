"""DeepSpeed's ZeRO over tilemoe's experts, on two processes; where it is installed."""

from pathlib import Path

import pytest
from helpers import torchrun


@pytest.mark.dist
def test_zero_trains_like_plain_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="pip install deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    done = torchrun(tmp_path, 2, Path(__file__).with_name("deepspeed_checks.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agreed") == 2
