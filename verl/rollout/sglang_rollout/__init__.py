"""SGLang as the rollout: a server of its own for each engine, which the ranks give the actor's weights."""
