"""Settings of iterative refinement."""

from dllm_reasoning.config.iterative import IterativeConfig, SelfGenerateConfig

__all__ = ["IterativeConfig", "SelfGenerateConfig"]
