"""An OpenAI-compatible endpoint in front of the rollout servers, for agents that are programs of their own."""
