"""Aggregation rules: one paper, one file."""
