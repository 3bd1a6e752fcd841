"""What surrounds a training loop: log, checkpoints, validation, sessions."""
