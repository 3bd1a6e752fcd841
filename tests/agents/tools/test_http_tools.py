"""SearchTool and SandboxFusionTool against a real HTTP server on 127.0.0.1."""

import asyncio
import resource
import threading
import time

import pytest
import tenacity

from tests.agents.tools.helpers import schema
from tests.helpers.http_server import serving
from tests.helpers.watched_runs import becomes
from verl.agents.tools import sandbox_fusion_tools
from verl.agents.tools.runner import ToolRunner
from verl.agents.tools.sandbox_fusion_tools import SandboxFusionTool, init_execution_pool
from verl.agents.tools.search_tool import SearchTool
from verl.utils.http_json import post_json


@pytest.fixture(autouse=True)
def no_pause_between_attempts(monkeypatch):
    monkeypatch.setattr(post_json.retry, "wait", tenacity.wait_none())


def run(tool, *calls, **settings):
    async def converse():
        async with ToolRunner([tool], max_tool_response_length=500, **settings).conversation() as tools:
            return await asyncio.gather(*(tools.call(tool.name, call) for call in calls))

    return asyncio.run(converse())


def passages(request):
    results = [
        [{"document": {"contents": f"{q} {i}\nText {i}."}, "score": 1 / (i + 1)} for i in range(request.body["topk"])]
        for q in request.body["queries"]
    ]
    return 200, {"result": results}


def test_search_asks_for_topk_and_shows_passages():
    with serving(passages) as (url, requests):
        tool = SearchTool({"retrieval_service_url": url, "topk": 2}, None)
        (result,) = run(tool, '{"query_list": ["Bonn", "Köln"]}')
    assert requests == [{"queries": ["Bonn", "Köln"], "topk": 2, "return_scores": True}]
    assert result.response.text == (
        "Doc 1 (Title: Bonn 0)\nText 0.\n\nDoc 2 (Title: Bonn 1)\nText 1.\n---\n"
        "Doc 1 (Title: Köln 0)\nText 0.\n\nDoc 2 (Title: Köln 1)\nText 1."
    )
    assert result.metrics == {"query_count": 2, "total_results": 4} and result.reward == 0.0
    assert run(tool, '{"query_list": "Bonn"}')[0].failure == "invalid_arguments"


def test_a_busy_service_is_asked_again_and_a_refusal_is_not():
    answers = [(503, "busy"), (200, {"result": [[]]})]
    with serving(lambda request: answers.pop(0)) as (url, requests):
        (result,) = run(SearchTool({"retrieval_service_url": url}, None), '{"query_list": ["a"]}')
        assert (result.response.text, len(requests)) == ("No results.", 2)
    with serving(lambda request: (404, "unknown index")) as (url, requests):
        (result,) = run(SearchTool({"retrieval_service_url": url}, None), '{"query_list": ["a"]}')
        assert len(requests) == 1 and result.failure == "exception"
        assert result.response.text == (f"Error: 'search' raised ServiceError: {url} answered 404: \"unknown index\".")
    gone = run(SearchTool({"retrieval_service_url": url}, None), '{"query_list": ["a"]}')[0]  # the server has ended
    assert gone.failure == "exception" and "ClientConnectorError" in gone.response.text


@pytest.mark.parametrize("passage", [{"text": "a"}, {"document": {"contents": None}}])
def test_another_format_is_an_error_text(passage):
    with serving(lambda request: (200, {"result": [[passage]]})) as (url, _):
        (result,) = run(SearchTool({"retrieval_service_url": url}, None), '{"query_list": ["a"]}')
    assert result.failure == "exception" and "answered in another format" in result.response.text


def test_a_service_that_floods_is_cut_off_while_reading():
    sent = []

    def megabytes():
        for _ in range(100):
            sent.append(1 << 20)
            yield b"[" * (1 << 20)

    with serving(lambda request: (200, megabytes())) as (url, _):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (result,) = run(SearchTool({"retrieval_service_url": url}, None), '{"query_list": ["a"]}')
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert result.failure == "exception" and "answered more than 4194304 bytes" in result.response.text
    assert len(sent) < 50 and grown_kb < 50_000


def test_a_service_that_hangs_is_a_timeout():
    release = threading.Event()
    with serving(lambda request: (release.wait(30), (200, {}))[1]) as (url, requests):
        by_tool = run(SearchTool({"retrieval_service_url": url, "timeout": 1}, None), '{"query_list": ["a"]}')[0]
        by_runner = run(SearchTool({"retrieval_service_url": url}, None), '{"query_list": ["a"]}', timeout=1)[0]
        assert becomes(lambda: len(requests) == 2)
        release.set()
    assert by_tool.failure == by_runner.failure == "timeout"


def test_sandbox_fusion_sends_limits_and_shows_the_outputs():
    def service(request):
        code = request.body["code"]
        ran = {"status": "Finished", "stdout": "42\n", "stderr": "a warning\n", "return_code": 0}
        if "while" in code:
            ran = {"status": "TimeLimitExceeded", "stdout": "", "stderr": ""}
        if "pass" in code:
            ran = {"status": "Finished", "stdout": "", "stderr": ""}
        failed = {"status": "SandboxError", "message": "no room"} if "broken" in code else {"status": "Success"}
        return 200, {**failed, "run_result": ran}

    with serving(service) as (url, requests):
        tool = SandboxFusionTool({"sandbox_fusion_url": url, "default_timeout": 5, "memory_limit_mb": 256}, None)
        results = run(tool, *({"code": code} for code in ("print(42)", "while 1: 0", "pass", "broken")))
    assert [result.response.text for result in results[:3]] == [
        "42\na warning", "The program was stopped after 5 s.", "The program printed nothing."
    ]  # fmt: skip
    assert results[3].failure == "exception" and "gave no verdict" in results[3].response.text
    first = next(request for request in requests if request["code"] == "print(42)")
    assert first == {
        "code": "print(42)", "stdin": "", "language": "python", "files": {}, "compile_timeout": 5, "run_timeout": 5,
        "memory_limit_MB": 256,
    }  # fmt: skip


def test_a_schema_may_offer_language_and_timeout():
    properties = {"code": {"type": "string"}, "language": {"type": "string"}, "timeout": {"type": "number"}}
    with serving(lambda request: (200, {"status": "Success", "run_result": {"stdout": "a"}})) as (url, requests):
        tool = SandboxFusionTool({"sandbox_fusion_url": url}, schema("run", properties, ["code"]))
        run(tool, {"code": "x", "language": "bash", "timeout": 2})
    assert (requests[0]["language"], requests[0]["run_timeout"]) == ("bash", 2)


async def most_at_once(pool, expected, number=6):
    running = most = 0
    deadline = time.monotonic() + 60

    async def one():
        nonlocal running, most
        running += 1
        most = max(most, running)
        while most < expected and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # one more would start within this time
        running -= 1

    await asyncio.gather(*(pool.execute(one) for _ in range(number)))
    return most


async def test_the_pool_bounds_calls_by_workers_and_by_the_rate():
    held = [await most_at_once(init_execution_pool(workers, limited, rate, name=f"pool-{workers}-{rate}"), most)
            for workers, limited, rate, most in ((3, True, 2, 2), (3, False, 2, 3), (10, True, 4, 4))]  # fmt: skip
    assert held == [2, 3, 4]
    with pytest.raises(ValueError, match="use PoolMode.ThreadMode"):
        init_execution_pool(1, mode=sandbox_fusion_tools.PoolMode.ProcessMode)
    with pytest.raises(ValueError, match="rate_limit=0 must be at least 1"):
        init_execution_pool(1, rate_limit=0)


async def test_a_pool_runs_functions_in_threads_and_frees_the_token_of_one_that_raises():
    pool = sandbox_fusion_tools.ExecutionWorker(rate_limit=1)
    with pytest.raises(ZeroDivisionError):
        await pool.execute(lambda a: 1 / a, 0)
    assert pool.ping()
    assert not await pool.execute(lambda: threading.current_thread() is threading.main_thread())


async def test_a_token_whose_holder_died_comes_back_after_its_lease():
    bucket = sandbox_fusion_tools.TokenBucketWorker(1, lease=0.5)
    first = await bucket.acquire()
    second = await bucket.acquire()  # the first was never given back
    assert bucket.get_current_count() == 1
    await bucket.release(first)  # too late: it frees nothing of others
    assert bucket.get_current_count() == 1
    await bucket.release(second)
    assert bucket.get_current_count() == 0


@pytest.mark.process
def test_pools_of_a_ray_cluster_share_the_rate_and_it_outlives_its_creator(ray_cluster):
    import ray

    @ray.remote(num_cpus=0)
    class Process:
        def __init__(self):
            self.pool = init_execution_pool(10, True, 2, name="test-rate-limiter")

        async def hold(self, seconds):
            await self.pool.execute(asyncio.sleep, seconds)

        async def held(self):
            return await ray.get_actor("test-rate-limiter", namespace="verl").get_current_count.remote()

    creator, other = Process.remote(), Process.remote()
    ray.get([creator.held.remote(), other.held.remote()])
    holding = creator.hold.remote(600)  # noqa: F841
    assert becomes(lambda: ray.get(other.held.remote()), 60)
    ray.get([other.hold.remote(0.1), other.hold.remote(0.1)])
    assert ray.get(other.held.remote()) == 1
    ray.kill(creator)
    ray.get(other.hold.remote(0))  # the second token is free, the bucket lives
    ray.kill(ray.get_actor("test-rate-limiter", namespace="verl"))
