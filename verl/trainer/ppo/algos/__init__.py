"""Pure functions of the algorithms: advantages, policy losses, KL terms, loss aggregation."""
