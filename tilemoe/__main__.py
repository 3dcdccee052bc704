"""``python -m tilemoe`` is the ``tilemoe`` command."""

from __future__ import annotations

import sys

from tilemoe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
