"""Runs Python programs of unknown origin where they can do no harm."""

from verl.utils.sandbox.config import SandboxConfig
from verl.utils.sandbox.run import Outcome, SandboxUnavailable, run_python

__all__ = ["Outcome", "SandboxConfig", "SandboxUnavailable", "run_python"]
