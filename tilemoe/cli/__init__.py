"""The ``tilemoe`` command line: `main`, and a module for each of its commands."""
