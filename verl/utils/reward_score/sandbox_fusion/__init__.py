"""Compatibility with verl: import path of `verl.reward.rules.sandbox_fusion`."""
# ruff: noqa: F401

from verl.reward.rules.sandbox_fusion import (
    SandboxServiceError,
    cases_of,
    check_correctness,
    compute_score,
    extract_code,
    share_passed,
)
