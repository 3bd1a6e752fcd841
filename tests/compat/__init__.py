"""A project of a verl user, run against this tree: data, rewards, estimators, losses, rollouts, recipes."""
