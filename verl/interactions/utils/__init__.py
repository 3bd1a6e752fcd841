"""Loading of interactions."""
