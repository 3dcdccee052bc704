"""Kernels of these tests are interpreted faster."""

import os

import interpreter

if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.improve()
