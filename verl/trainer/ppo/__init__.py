"""Reinforcement learning with PPO-like updates: algorithms, metrics, the Ray trainer."""
