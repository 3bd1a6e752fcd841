"""Recipes: variants that plug into verl through its registries and config."""

import verl  # noqa: F401  (serves the import paths of verl)
