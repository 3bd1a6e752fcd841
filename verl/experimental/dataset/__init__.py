"""Samplers of curricula."""
