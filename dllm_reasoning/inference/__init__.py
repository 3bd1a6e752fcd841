"""Block generation."""

from dllm_reasoning.inference.generator import iterative_generate

__all__ = ["iterative_generate"]
