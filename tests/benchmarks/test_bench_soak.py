"""What counts as growth in a soak: a planted leak is found, noise and what a warm-up takes are not."""

import gc
import random

import pytest
from soak import BOUND, Soak, growth, measured, torch

STEPS = list(range(60, 60 * 301, 60))


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.01])
def test_a_planted_leak_is_found(noise: float) -> None:
    dice = random.Random(0)
    still = [500 * (1 + dice.gauss(0, noise)) for _ in STEPS]
    warm = [value * min(1, 0.5 + step / 9000) for step, value in zip(STEPS, still, strict=True)]
    for values in (still, warm):
        assert growth(STEPS, values).is_bounded
    leak = [value + 500 * 4 * BOUND * step / 1000 for step, value in zip(STEPS, warm, strict=True)]
    found = growth(STEPS, leak)
    assert not found.is_bounded
    assert found.per_1000 == pytest.approx(4 * BOUND, rel=0.3)


def test_what_never_changes_does_not_grow() -> None:
    assert growth(STEPS, [0.0] * len(STEPS)).per_1000 == 0


@pytest.mark.usefixtures("one_thread")
def test_a_kept_file_and_a_kept_object_are_seen(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soak.STEPS", 1)
    run = Soak(torch.device("cpu"), tmp_path)
    assert run.round() > 0
    assert run.trainer.step == 3
    gc.freeze()  # what the process has, and may let go of meanwhile, is not counted
    try:
        before = measured(torch.device("cpu"))
        with (tmp_path / "a").open("w"):
            kept = [[] for _ in range(20_000)]
            after = measured(torch.device("cpu"))
    finally:
        gc.unfreeze()
    assert after["open_files"] == before["open_files"] + 1
    assert after["objects"] - before["objects"] >= len(kept)
