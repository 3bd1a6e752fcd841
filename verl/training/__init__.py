"""Training of one model on its ranks: engine, policies, updates, sharding and checkpoints."""
