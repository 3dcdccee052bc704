"""Measuring the layer: cases, contestants and their check, timing in interleaved rounds, and recorded rows."""
