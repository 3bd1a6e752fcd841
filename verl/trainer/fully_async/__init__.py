"""Asynchronous training: servers generate samples while the ranks of the trainer update the policy."""
