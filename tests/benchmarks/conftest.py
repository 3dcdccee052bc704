"""The benchmarks are scripts beside the package: their folder goes on the path, as running one of them puts it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
