"""Settings of iterative refinement."""

from dllm_reasoning.config.iterative import IterativeConfig, IterativeRefineConfig, SelfGenerateConfig

__all__ = ["IterativeConfig", "IterativeRefineConfig", "SelfGenerateConfig"]
