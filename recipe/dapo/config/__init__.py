"""Hydra configs of DAPO."""
