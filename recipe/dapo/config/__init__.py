"""Hydra configs of the scorer's training."""
