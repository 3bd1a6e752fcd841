"""Data and trainer of iterative refinement."""
