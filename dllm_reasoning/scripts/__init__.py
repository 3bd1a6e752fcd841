"""Commands beside training."""
