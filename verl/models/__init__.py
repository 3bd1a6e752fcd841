"""Building models and reading their weights from disk."""
