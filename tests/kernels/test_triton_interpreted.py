"""The GEMMs in Triton's interpreter, without a GPU."""

from __future__ import annotations

import pytest
import torch
from interpreter import passed_in_the_interpreter

from tilemoe.kernels.triton.launch import device_of


def test_in_the_interpreter() -> None:
    assert passed_in_the_interpreter("interpreted_gemms.py") > 20


def test_without_the_interpreter_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="need a GPU but x is on cpu"):
        device_of(torch.zeros(1))
