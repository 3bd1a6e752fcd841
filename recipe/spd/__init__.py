"""The speculative-decoding scorer: its masks, models and files."""
