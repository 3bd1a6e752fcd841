"""Runs Python programs of unknown origin where they can do no harm."""

from verl.config.sandbox import SandboxConfig
from verl.reward.sandbox.run import Outcome, SandboxUnavailable, run_python

__all__ = ["Outcome", "SandboxConfig", "SandboxUnavailable", "run_python"]
