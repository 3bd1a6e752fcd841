"""Compatibility with verl: `verl.reward.rules.sandbox_fusion`, whose `call_sandbox_api` may be replaced here."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from verl.reward.rules import sandbox_fusion
from verl.reward.rules.code_cases import Case, cases_of
from verl.reward.rules.sandbox_fusion import (  # noqa: F401
    API_TIMEOUT,
    DEFAULT_TIMEOUT,
    INITIAL_RETRY_DELAY,
    MAX_RETRIES,
    SUPPORTED_LANGUAGES,
    SandboxServiceError,
    call_sandbox_api,
    run_cases,
    verdict,
)

_SERVICE = call_sandbox_api


def check_correctness(
    sandbox_fusion_url: str, in_outs: dict | None, generation: str, timeout: float = DEFAULT_TIMEOUT,
    memory_limit_mb: int | None = 1024, language: str = "python", concurrent_semaphore: Any = None,
) -> tuple[list[Any], list[dict[str, Any]]]:  # fmt: skip
    """As verl.reward.rules.sandbox_fusion.check_correctness, by `call_sandbox_api` of this module.

    Without cases the result is ([-1], [{"error": ...}]).
    """
    if not in_outs or "inputs" not in in_outs or "outputs" not in in_outs:
        return [-1], [{"error": "Invalid input/output data"}]
    if call_sandbox_api is _SERVICE:
        where = (timeout, memory_limit_mb, language, concurrent_semaphore)
        return sandbox_fusion.check_correctness(sandbox_fusion_url, in_outs, generation, *where)

    def run(case: Case) -> tuple[Any, dict[str, Any]]:
        with concurrent_semaphore or nullcontext():
            reply, error = call_sandbox_api(
                sandbox_fusion_url=sandbox_fusion_url, code=case.program, stdin=case.stdin, compile_timeout=timeout,
                run_timeout=timeout, memory_limit_mb=memory_limit_mb, language=language,
            )  # fmt: skip
        if reply is None:
            return -1, {"passed": False, "status": "api_error", "api_request_error": error}
        return verdict(case, reply)

    cases = cases_of(generation, in_outs)
    with ThreadPoolExecutor(max(1, len(cases))) as pool:
        outcomes = list(pool.map(run, cases))
    return [result for result, _ in outcomes], [report for _, report in outcomes]
