"""Measuring the layer: cases, peers behind a gate, timing in interleaved rounds, and the rows that are recorded."""
