"""Advantages, policy losses, KL terms and corrections: pure functions."""
