"""Programs judged by test cases in a remote sandbox service (the SandboxFusion protocol: POST run_code)."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import tenacity

from verl.reward.rules.code_cases import Case, cases_of, extract_code, share_passed
from verl.utils.http_json import HttpClient, ServiceBusy, ServiceError
from verl.utils.threads import in_thread

DEFAULT_TIMEOUT = 10  # seconds of one program
MAX_RETRIES = 5  # requests for one verdict
INITIAL_RETRY_DELAY = 0.5  # seconds
API_TIMEOUT = 30  # seconds of a request beyond those of its program: it may wait in the service's queue
SUPPORTED_LANGUAGES = [
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda",
    "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog",
    "python_gpu", "lean", "swift", "racket",
]  # fmt: skip


class SandboxServiceError(RuntimeError):
    """The service gave no verdict after several attempts, or refused the request."""


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


def call_sandbox_api(
    sandbox_fusion_url: str, code: str, stdin: str | None, compile_timeout: float, run_timeout: float,
    memory_limit_mb: int | None, language: str = "python",
) -> tuple[dict[str, Any] | None, str | None]:
    """(the service's reply, None), or (None, why there is none) after several attempts.

    Times are in seconds, memory in MB.
    """
    if language not in SUPPORTED_LANGUAGES:
        return None, f"language {language!r} is unknown. Known: {', '.join(SUPPORTED_LANGUAGES)}."
    body = {
        "code": code, "stdin": stdin or "", "compile_timeout": compile_timeout, "run_timeout": run_timeout,
        "language": language, "files": {}, "fetch_files": [],
    }  # fmt: skip
    if memory_limit_mb is not None:
        body["memory_limit_MB"] = memory_limit_mb

    try:
        return _in_thread(_post(sandbox_fusion_url, body, compile_timeout + run_timeout)), None
    except ServiceError as error:
        return None, str(error)
    except (aiohttp.ClientError, TimeoutError) as error:
        return None, (
            f"the sandbox service {sandbox_fusion_url} gave no answer in {MAX_RETRIES} attempts: "
            f"{type(error).__name__}: {error}. Check that it runs, or unset reward_model.sandbox_fusion.url to run "
            "programs here."
        )


def check_correctness(
    sandbox_fusion_url: str, in_outs: dict | None, generation: str, timeout: float = DEFAULT_TIMEOUT,
    memory_limit_mb: int | None = 1024, language: str = "python", concurrent_semaphore: Any = None,
) -> tuple[list[Any], list[dict[str, Any]]]:  # fmt: skip
    """(results, reports) of a program for the cases `in_outs`: {inputs, outputs, fn_name (Python only)}.

    A result is True (passed), False (wrong output), -1 (the service gave no verdict), -2 (the program failed), -3
    (time limit), -4 (it does not compile). `status` of its report is success, wrong_answer, api_error, runtime_error,
    timeout, compile_error or compile_timeout; `api_status` is that of the service. `concurrent_semaphore` (acquire and
    release, or None) bounds the requests. Without cases the result is ([-1], [{"error": ...}]).
    Raises ValueError for an unknown language and for cases that cannot be read.
    """
    if not in_outs or "inputs" not in in_outs or "outputs" not in in_outs:
        return [-1], [{"error": "check_correctness needs in_outs: {inputs, outputs}"}]
    if language not in SUPPORTED_LANGUAGES:
        raise ValueError(f"language {language!r} is unknown. Known: {', '.join(SUPPORTED_LANGUAGES)}.")
    cases = cases_of(generation, in_outs)
    if language != "python" and any(case.is_call for case in cases):
        raise ValueError(f"fn_name works with Python programs only, not {language}.")
    outcomes = run_cases(
        sandbox_fusion_url, cases, timeout, memory_limit_mb, language, concurrent_semaphore, keep_going=True
    )
    return [result for result, _ in outcomes], [report for _, report in outcomes]


def run_cases(
    url: str, cases: list[Case], timeout: float, memory_limit_mb: int | None, language: str, semaphore: Any,
    keep_going: bool = False,
) -> list[tuple[Any, dict[str, Any]]]:  # fmt: skip
    """(result, report) of each case, as `check_correctness` describes them; the cases run concurrently.

    The first case without a verdict raises SandboxServiceError, unless `keep_going`.
    """

    async def run(case: Case) -> tuple[Any, dict[str, Any]]:
        while semaphore is not None and not semaphore.acquire(False):  # a waiting thread cannot be cancelled
            await asyncio.sleep(0.05)
        try:
            reply, error = await in_thread(
                call_sandbox_api, sandbox_fusion_url=url, code=case.program, stdin=case.stdin, compile_timeout=timeout,
                run_timeout=timeout, memory_limit_mb=memory_limit_mb, language=language,
            )  # fmt: skip
        finally:
            if semaphore is not None:
                semaphore.release()
        if reply is not None:
            return verdict(case, reply)
        if not keep_going:
            raise SandboxServiceError(error)
        return -1, _report(case, "api_error", error, {})

    async def all_cases() -> list[tuple[Any, dict[str, Any]]]:
        return list(await asyncio.gather(*map(run, cases)))

    return _in_thread(all_cases())


def verdict(case: Case, reply: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(result, report) of a case from the service's reply; the durations are in seconds."""
    compiled, ran = reply.get("compile_result") or {}, reply.get("run_result") or {}
    if compiled.get("status", "Finished") != "Finished" or compiled.get("return_code"):
        in_time = compiled.get("status") != "TimeLimitExceeded"
        result, status = (-4, "compile_error") if in_time else (-3, "compile_timeout")
    elif ran.get("status") == "TimeLimitExceeded":
        result, status = -3, "timeout"
    elif reply["status"] != "Success" or ran.get("return_code") != 0:
        result, status = -2, "runtime_error"
    else:
        result = case.passes(ran.get("stdout") or "")
        status = "success" if result else "wrong_answer"
    return result, _report(case, status, None, reply)


def _report(case: Case, status: str, error: str | None, reply: dict[str, Any]) -> dict[str, Any]:
    compiled, ran = reply.get("compile_result") or {}, reply.get("run_result") or {}
    return {
        "case_index": case.index, "input": case.stdin, "expected_output": case.expected, "passed": status == "success",
        "status": status, "api_request_error": error, "api_response": reply or None, "api_status": reply.get("status"),
        "stdout": ran.get("stdout"), "stderr": ran.get("stderr"), "exit_code": ran.get("return_code"),
        "run_status": ran.get("status"), "duration": ran.get("execution_time"),
        "compile_status": compiled.get("status"), "compile_stderr": compiled.get("stderr"),
        "compile_duration": compiled.get("execution_time"),
    }  # fmt: skip


def _in_thread(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, also where the caller's thread runs an event loop of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@tenacity.retry(
    retry=tenacity.retry_if_exception_type((ServiceBusy, aiohttp.ClientError, TimeoutError)),
    stop=tenacity.stop_after_attempt(MAX_RETRIES),
    wait=tenacity.wait_exponential_jitter(INITIAL_RETRY_DELAY, max=10, jitter=0.5),
    reraise=True,
)
async def _post(url: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The service's verdict on a program that may run for `seconds`."""
    async with HttpClient() as client:
        reply = await client.post_json(url, body, seconds + API_TIMEOUT, max_bytes=None)
    if not isinstance(reply, dict) or "status" not in reply:
        raise ServiceError(f"{url} answered no verdict: {str(reply)[:200]}")
    if reply["status"] == "SandboxError":
        raise ServiceBusy(f"{url} reported an error of its own: {str(reply.get('message'))[:200]}")
    return reply
