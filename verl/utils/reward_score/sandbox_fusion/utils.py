"""Single requests to a SandboxFusion service, and the check of one answer, case by case."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp

from verl.utils.reward_score import sandbox_fusion
from verl.utils.reward_score.code_cases import Case, cases_of

DEFAULT_TIMEOUT = 10  # seconds of one program
MAX_RETRIES = sandbox_fusion._ATTEMPTS
INITIAL_RETRY_DELAY = sandbox_fusion._BACKOFF_S  # seconds
API_TIMEOUT = 30  # seconds of a request beyond those of its program
SUPPORTED_LANGUAGES = [
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda",
    "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog",
    "python_gpu", "lean", "swift", "racket",
]  # fmt: skip


def call_sandbox_api(
    sandbox_fusion_url: str, code: str, stdin: str | None, compile_timeout: int, run_timeout: int,
    memory_limit_mb: int, language: str = "python",
) -> tuple[dict[str, Any] | None, str | None]:
    """(the service's reply, None), or (None, why there is none) after several attempts.

    Times are in seconds, memory in MB.
    """
    if language not in SUPPORTED_LANGUAGES:
        return None, f"language {language!r} is unknown. Known: {', '.join(SUPPORTED_LANGUAGES)}."
    body = {
        "code": code, "stdin": stdin or "", "compile_timeout": compile_timeout, "run_timeout": run_timeout,
        "memory_limit_MB": memory_limit_mb, "language": language, "files": {}, "fetch_files": [],
    }  # fmt: skip

    async def ask() -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=compile_timeout + run_timeout + API_TIMEOUT)
        async with aiohttp.ClientSession(timeout=limit, trust_env=False) as session:
            return await sandbox_fusion._ask(session, sandbox_fusion_url, body)

    try:
        return asyncio.run(ask()), None
    except sandbox_fusion.SandboxServiceError as error:
        return None, str(error)


def check_correctness(
    sandbox_fusion_url: str, in_outs: dict | None, generation: str, timeout: int = DEFAULT_TIMEOUT,
    memory_limit_mb: int = 1024, language: str = "python", concurrent_semaphore: threading.Semaphore | None = None,
) -> tuple[list[Any], list[dict[str, Any]]]:  # fmt: skip
    """(results, reports) of a program for the cases `in_outs`: {inputs, outputs, fn_name (Python only)}.

    A result is True (passed), False (wrong output), -1 (the service gave no verdict), -2 (the program failed), -3
    (time limit), -4 (it does not compile). Raises ValueError for cases that cannot be read.
    """
    if in_outs is None:
        raise ValueError("check_correctness needs in_outs: {inputs, outputs}; got None.")
    if in_outs.get("fn_name") and language != "python":
        raise ValueError(f"fn_name={in_outs['fn_name']!r} works with Python programs only, not {language}.")

    def run(case: Case) -> tuple[Any, dict[str, Any]]:
        with concurrent_semaphore or threading.Semaphore():
            reply, error = call_sandbox_api(
                sandbox_fusion_url, case.program, case.stdin, timeout, timeout, memory_limit_mb, language
            )
        if reply is None:
            return -1, {"status": "api_error", "api_request_error": error}
        compiled, ran = reply.get("compile_result") or {}, reply.get("run_result") or {}
        report = {
            "api_status": reply["status"], "compile_status": compiled.get("status"), "run_status": ran.get("status"),
            "stdout": ran.get("stdout"), "stderr": ran.get("stderr") or compiled.get("stderr"),
            "exit_code": ran.get("return_code"), "input": case.stdin, "expected_output": case.expected,
        }  # fmt: skip
        if compiled and compiled.get("status") != "Finished" or compiled.get("return_code"):
            return (-3 if compiled.get("status") == "TimeLimitExceeded" else -4), report
        if ran.get("status") == "TimeLimitExceeded":
            return -3, report
        if reply["status"] != "Success" or ran.get("return_code") != 0:
            return -2, report
        return case.passes(ran.get("stdout") or ""), report

    cases = cases_of(generation, in_outs)
    with ThreadPoolExecutor(min(32, len(cases))) as pool:
        results = list(pool.map(run, cases))
    return [result for result, _ in results], [report for _, report in results]
