"""Block generation."""
