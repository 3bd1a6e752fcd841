"""Data sets that grow during training."""
