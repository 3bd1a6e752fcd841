"""Partners that answer a model in words."""
