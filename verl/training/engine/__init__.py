"""Training engines by name: importing this package registers FSDP2's."""

from verl.training.engine.base import BaseEngine, EngineRegistry, StepResult
from verl.training.engine.fsdp import FSDPEngine

__all__ = ["BaseEngine", "EngineRegistry", "FSDPEngine", "StepResult"]
