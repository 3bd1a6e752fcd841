"""Policies by name: importing this package registers the built-in ones."""

from verl.training.policy.base import Policy, get_policy, register_policy
from verl.training.policy.causal_lm import CausalLMPolicy

__all__ = ["CausalLMPolicy", "Policy", "get_policy", "register_policy"]
