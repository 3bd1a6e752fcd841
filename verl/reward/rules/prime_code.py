"""Programs judged by test cases in the local sandbox: codecontests, apps, codeforces, taco."""

import time
from typing import Any

from verl.reward.rules.code_cases import cases_of, extract_code, share_passed
from verl.reward.sandbox import SandboxConfig, run_python

# All cases of one answer together may take this many times the limit of one.
CASES_BUDGET = 10


def compute_score(
    completion: str, test_cases: Any, continuous: bool = False, sandbox: SandboxConfig | None = None
) -> tuple[float, list[dict[str, Any]]]:
    """(score, the report of each case that was run).

    The score is the share of cases passed (`continuous`), else 1.0 when all did. A program that timed out is not run
    again, nor is one that failed a case when all must pass; the remaining cases count as failed.
    """
    code = extract_code(completion)
    if code is None:
        return 0.0, [{"error": "no fenced code block in the answer"}]
    limits = sandbox or SandboxConfig()
    cases = cases_of(code, test_cases)
    reports = []
    deadline = time.monotonic() + CASES_BUDGET * limits.seconds
    for case in cases:
        outcome = run_python(case.program, case.stdin.encode(), limits)
        good = outcome.ok and case.passes(outcome.stdout.decode(errors="replace"))
        stderr = outcome.stderr.decode(errors="replace")
        reports.append({"passed": good, "stopped": outcome.stopped, "exit_code": outcome.exit_code, "stderr": stderr})
        if outcome.stopped == "time" or time.monotonic() > deadline or not (good or continuous):
            break
    return share_passed([report["passed"] for report in reports], len(cases), continuous), reports
