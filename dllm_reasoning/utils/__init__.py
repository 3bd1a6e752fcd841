"""Noise for iterative refinement."""
