"""Recipes: variants that plug into verl through its registries and config."""
