"""Programs run_cases by test cases in a remote sandbox service (the SandboxFusion protocol: POST run_code)."""

from typing import Any

from verl.reward.rules.code_cases import cases_of, extract_code, share_passed
from verl.reward.rules.sandbox_fusion.utils import SandboxServiceError, check_correctness, run_cases

__all__ = ["SandboxServiceError", "check_correctness", "compute_score"]


def compute_score(
    sandbox_fusion_url: str, concurrent_semaphore: Any, memory_limit_mb: int | None, completion: str, test_cases: Any,
    continuous: bool = False, timeout: float = 10,
) -> tuple[float, list[dict[str, Any]]]:  # fmt: skip
    """(score, the report of each case): the cases run at the service concurrently, scored as by `prime_code`.

    `concurrent_semaphore` (acquire and release, or None) bounds the requests. The service gets programs and inputs,
    never expected outputs. Raises SandboxServiceError when it gives no verdict, which says nothing about the program.
    """
    code = extract_code(completion)
    if code is None:
        return 0.0, [{"error": "no fenced code block in the answer"}]
    cases = cases_of(code, test_cases)
    outcomes = run_cases(sandbox_fusion_url, cases, timeout, memory_limit_mb, "python", concurrent_semaphore)
    passed = [result is True for result, _ in outcomes]
    return share_passed(passed, len(cases), continuous), [report for _, report in outcomes]
