"""The loss of iterative refinement."""
