"""Asynchronous rewards and rollouts, under upstream's paths."""
