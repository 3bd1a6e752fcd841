"""Iterative-refinement SFT and block generation with a standard causal model."""
