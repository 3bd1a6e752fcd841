"""Training engines by name: importing this package registers FSDP2's."""

from verl.workers.engine.base import BaseEngine, EngineRegistry, StepResult
from verl.workers.engine.fsdp import FSDPEngine

__all__ = ["BaseEngine", "EngineRegistry", "FSDPEngine", "StepResult"]
