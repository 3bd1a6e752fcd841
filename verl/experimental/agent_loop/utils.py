"""Compatibility with verl: import path of `verl.workers.rollout.agent_loop.registry.resolve_config_path`."""
# ruff: noqa: F401

from verl.workers.rollout.agent_loop.registry import resolve_config_path
