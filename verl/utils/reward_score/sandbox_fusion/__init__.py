"""Programs judged by test cases in a remote sandbox service (the SandboxFusion protocol: POST run_code)."""

import asyncio
from typing import Any

import aiohttp
import tenacity

from verl.utils.reward_score.code_cases import Case, cases_of, extract_code, share_passed

_ATTEMPTS, _BACKOFF_S = 5, 0.5
_BUSY = (429, 500, 502, 503, 504)


class SandboxServiceError(RuntimeError):
    """The service gave no verdict after several attempts, or refused the request."""


class _TryAgain(SandboxServiceError):
    pass


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
    settings = {"run_timeout": timeout, "compile_timeout": timeout, "language": "python", "files": {}}
    if memory_limit_mb is not None:
        settings["memory_limit_MB"] = memory_limit_mb
    reports = asyncio.run(_run_all(sandbox_fusion_url, concurrent_semaphore, cases, settings, timeout))
    return share_passed([report["passed"] for report in reports], len(cases), continuous), reports


async def _run_all(url: str, semaphore: Any, cases: list[Case], settings: dict, timeout: float) -> list[dict[str, Any]]:
    patience = aiohttp.ClientTimeout(total=2 * timeout + 30)  # requests may wait in the service's queue
    async with aiohttp.ClientSession(timeout=patience, trust_env=False) as session:

        async def run(case: Case) -> dict[str, Any]:
            if semaphore is not None:
                await asyncio.to_thread(semaphore.acquire)
            try:
                reply = await _ask(session, url, {**settings, "code": case.program, "stdin": case.stdin})
            finally:
                if semaphore is not None:
                    semaphore.release()
            status, ran = reply["status"], reply.get("run_result") or {}
            good = status == "Success" and ran.get("return_code") == 0 and case.passes(ran.get("stdout") or "")
            return {"passed": good, "status": status, "run_status": ran.get("status"), "stderr": ran.get("stderr")}

        return list(await asyncio.gather(*map(run, cases)))


@tenacity.retry(
    retry=tenacity.retry_if_exception_type((_TryAgain, aiohttp.ClientError, TimeoutError)),
    stop=tenacity.stop_after_attempt(_ATTEMPTS), wait=tenacity.wait_exponential_jitter(_BACKOFF_S, max=10, jitter=0.5),
    reraise=True,
)  # fmt: skip
async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as response:
        if response.status != 200:
            kind = _TryAgain if response.status in _BUSY else SandboxServiceError
            raise kind(f"{url} answered {response.status}: {(await response.text())[:200]}")
        reply = await response.json()
    if not isinstance(reply, dict) or "status" not in reply:
        raise SandboxServiceError(f"{url} answered no verdict: {str(reply)[:200]}")
    if reply["status"] == "SandboxError":
        raise _TryAgain(f"{url} reported an error of its own: {str(reply.get('message'))[:200]}")
    return reply


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        return await _post(session, url, body)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SandboxServiceError(
            f"the sandbox service {url} gave no answer in {_ATTEMPTS} attempts: {type(error).__name__}: {error}. Check "
            "that it runs, or unset reward_model.sandbox_fusion.url to run programs here."
        ) from error
