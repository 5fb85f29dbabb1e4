"""Tuned tables, one JSON per GPU."""
