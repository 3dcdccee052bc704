"""The adapters' path through the Triton kernels, without a GPU."""

from __future__ import annotations

from interpreter import passed_in_the_interpreter


def test_in_the_interpreter() -> None:
    assert passed_in_the_interpreter("interpreted_lora.py") == 7
