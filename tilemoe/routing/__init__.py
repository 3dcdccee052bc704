"""Routing: which expert computes which token, and in which order."""
