"""Settings of iterative refinement."""
