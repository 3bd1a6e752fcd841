"""Checks before a start, dry runs, and estimates of the memory of a step."""
