"""Parts of a run outside of the training loop: log, checkpoints, validation, sessions."""
