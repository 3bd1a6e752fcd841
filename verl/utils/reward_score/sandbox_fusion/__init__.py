"""Compatibility with verl: import path of `verl.reward.rules.sandbox_fusion`."""

from verl.reward.rules.sandbox_fusion import SandboxServiceError, cases_of, check_correctness, compute_score, extract_code, judged, share_passed

__all__ = ['SandboxServiceError', 'cases_of', 'check_correctness', 'compute_score', 'extract_code', 'judged', 'share_passed']
