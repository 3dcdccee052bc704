"""Measuring the layer: cases, peers behind a check, timing in interleaved rounds, and the rows that are recorded."""
