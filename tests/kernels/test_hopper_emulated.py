"""The Hopper kernels' numbers and protocols without a GPU."""

from __future__ import annotations

from interpreter import passed_in_the_interpreter


def test_in_the_emulator() -> None:
    assert passed_in_the_interpreter("emulated_hopper.py", timeout=600) > 205
