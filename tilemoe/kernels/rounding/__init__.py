"""Token rounding."""
