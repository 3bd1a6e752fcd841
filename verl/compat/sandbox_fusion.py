"""Compatibility with verl: `sandbox_fusion.utils.check_correctness`, whose `call_sandbox_api` may be replaced."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from verl.reward.rules.code_cases import Case, cases_of
from verl.reward.rules.sandbox_fusion import DEFAULT_TIMEOUT, call_sandbox_api, unanswered, verdict
from verl.reward.rules.sandbox_fusion import check_correctness as check_by_service

_SERVICE = call_sandbox_api  # as long as no program has replaced the name in this module


def check_correctness(
    sandbox_fusion_url: str, in_outs: dict | None, generation: str, timeout: float = DEFAULT_TIMEOUT,
    memory_limit_mb: int | None = 1024, language: str = "python", concurrent_semaphore: Any = None,
) -> tuple[list[Any], list[dict[str, Any]]]:  # fmt: skip
    """Results and reports of a program's cases, as `verl.reward.rules.sandbox_fusion.check_correctness` returns them.

    Differences: without cases the result is ([-1], [{"error": ...}]), and a program may replace `call_sandbox_api`,
    which is then called for each case.
    """
    if not in_outs or "inputs" not in in_outs or "outputs" not in in_outs:
        return [-1], [{"error": "Invalid input/output data"}]
    if call_sandbox_api is _SERVICE:
        where = (timeout, memory_limit_mb, language, concurrent_semaphore)
        return check_by_service(sandbox_fusion_url, in_outs, generation, *where)

    def run(case: Case) -> tuple[Any, dict[str, Any]]:
        with concurrent_semaphore or nullcontext():
            reply, error = call_sandbox_api(
                sandbox_fusion_url=sandbox_fusion_url, code=case.program, stdin=case.stdin, compile_timeout=timeout,
                run_timeout=timeout, memory_limit_mb=memory_limit_mb, language=language,
            )  # fmt: skip
        if reply is None:
            return unanswered(case, error)
        return verdict(case, reply)

    cases = cases_of(generation, in_outs)
    with ThreadPoolExecutor(max(1, len(cases))) as pool:
        outcomes = list(pool.map(run, cases))
    return [result for result, _ in outcomes], [report for _, report in outcomes]
