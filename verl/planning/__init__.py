"""Checks before a start, dry runs, and estimates of the memory and the time of a step."""
