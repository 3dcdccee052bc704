"""A run on disk: written whole or not at all, by one process or by all."""
