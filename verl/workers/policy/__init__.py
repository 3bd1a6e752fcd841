"""Policies by name: importing this package registers the built-in ones."""

from verl.workers.policy.base import Policy, get_policy, register_policy
from verl.workers.policy.causal_lm import CausalLMPolicy

__all__ = ["CausalLMPolicy", "Policy", "get_policy", "register_policy"]
