"""ToolRunner: instances per conversation, kwargs, limits, error texts, release whatever happens."""

import asyncio
import sys

import pytest

from tests.agents.tools.helpers import Acts, Counter, schema
from tests.helpers.logs import logged
from verl.agents.tools.runner import ToolRunner, truncate
from verl.agents.tools.schemas import ToolResponse
from verl.reward.pool import FatalGradingError

KWARGS = {"counter": {
    "create_kwargs": {"start": 10, "a": 1}, "execute_kwargs": {"b": 2}, "calc_reward_kwargs": {"c": 3},
    "release_kwargs": {"d": 4},
}}  # fmt: skip


def runner_of(*tools, **settings):
    return ToolRunner(tools, **{"timeout": 30, "max_tool_response_length": 1000, **settings})


async def one_call(runner, name="counter", arguments="{}", kwargs=None):
    async with runner.conversation(kwargs) as tools:
        return await tools.call(name, arguments), await tools.calc_rewards()


async def test_one_instance_a_conversation_keeps_state_between_turns_and_all_kwargs_arrive():
    tool = Counter()
    runner = runner_of(tool)

    async def converse(kwargs):
        async with runner.conversation(kwargs) as tools:
            texts = [(await tools.call("counter", '{"by": 1}')).response.text, None]
            await asyncio.sleep(0)  # the other conversation continues
            result = await tools.call("counter", {"by": 2})
            texts[1] = result.response.text
            assert (result.reward, result.metrics, result.failure) == (0.5, {"by": 2}, None)
            return texts, await tools.calc_rewards()

    both = await asyncio.gather(converse(KWARGS), converse(None))
    assert both == [
        (["total 11", "total 13"], {"counter": 13.0}), (["total 1", "total 3"], {"counter": 3.0})
    ]  # fmt: skip
    assert [call for call in tool.log if call[1] not in ({}, {"start": 0})] == [
        ("create", {"start": 10, "a": 1}), ("execute", {"b": 2}), ("execute", {"b": 2}),
        ("calc_reward", {"c": 3}), ("release", {"d": 4}),
    ]  # fmt: skip
    assert [name for name, _ in tool.log].count("create") == 2 and tool.totals == {}
    assert runner.counts == {"calls": 4}


class Concurrency:
    """An action that takes `seconds`; `most` of it ran at the same time."""

    def __init__(self, seconds):
        self.seconds, self.running, self.most = seconds, 0, 0

    async def __call__(self):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1


def test_parallel_calls_create_once_and_wait_for_each_other():
    async def run(tool):
        async with runner_of(tool).conversation() as tools:
            await asyncio.gather(*(tools.call("counter", "{}") for _ in range(4)))
        return [name for name, _ in tool.log]

    slow = Concurrency(0.1)
    assert asyncio.run(run(Acts("execute", slow))) == ["create", *4 * ["execute"], "release"] and slow.most == 1
    parallel = Acts("execute", slow)
    parallel.parallel_calls = True
    assert asyncio.run(run(parallel)) == ["create", *4 * ["execute"], "release"] and slow.most == 4


async def test_no_more_than_max_concurrent_calls_run_and_waiting_is_no_timeout():
    slow = Concurrency(0.6)
    runner = runner_of(Acts("execute", slow), max_concurrent=2, timeout=2)
    results = await asyncio.gather(*(one_call(runner) for _ in range(8)))  # 2.4 s in all, each call 0.6 of 2 s
    assert [result.failure for result, _ in results] == 8 * [None] and slow.most == 2


@pytest.mark.parametrize(
    "name, arguments, kind, text",
    [
        ("abacus", "{}", "unknown_tool", "Error: there is no tool 'abacus'. Tools: counter."),
        ("x" * 10**6, "{}", "unknown_tool", f"Error: there is no tool '{'x' * 100}'. Tools: counter."),
        ("counter", '{"by": 1', "malformed_arguments", "Error: the arguments of 'counter' are not a JSON object: "
         "Expecting ',' delimiter: line 1 column 9 (char 8)."),
        ("counter", "[1]", "malformed_arguments", "Error: the arguments of 'counter' are not a JSON object: a JSON "
         "list, not an object."),
        ("counter", "[" * 10**5, "malformed_arguments", "Error: the arguments of 'counter' are not a JSON object: "
         "nested too deeply."),
        ("counter", '{"by": "1"}', "invalid_arguments", "Error: the arguments of 'counter' do not fit its schema: by: "
         "'1' is not of type 'integer'."),
        ("counter", "{}", "invalid_arguments", "Error: the arguments of 'counter' do not fit its schema: arguments: "
         "'by' is a required property."),
    ],
)  # fmt: skip
def test_a_wrong_call_is_answered_and_counted(name, arguments, kind, text):
    tool = Counter()
    runner = runner_of(tool)
    result, rewards = asyncio.run(one_call(runner, name, arguments))
    assert (result.response.text, result.failure, result.reward) == (text, kind, None)
    assert rewards == {} and tool.log == [] and runner.counts == {"calls": 1, kind: 1}


async def hang():
    await asyncio.Event().wait()


async def hang_against_cancellation():
    until = asyncio.get_running_loop().time() + 1.4
    while asyncio.get_running_loop().time() < until:
        try:
            await asyncio.sleep(1.4)
        except asyncio.CancelledError:
            pass


async def fail():
    raise KeyError("left")


async def leave():
    sys.exit(3)


async def cancel():
    raise asyncio.CancelledError


async def wrong_type():
    return "text", 0.0, {}


async def not_a_number():
    return ToolResponse(text="x"), float("nan"), {}


@pytest.mark.parametrize(
    "what, kind, text",
    [
        (hang, "timeout", "gave no answer in time (took longer than 0.2 s)."),
        (hang_against_cancellation, "timeout", "gave no answer in time (took longer than 0.2 s)."),
        (fail, "exception", "raised KeyError: 'left'."),
        (leave, "exception", "raised RuntimeError: SystemExit: 3."),
        (cancel, "exception", "raised RuntimeError: the tool cancelled itself."),
        (wrong_type, "exception", "raised TypeError: execute returned ('text', 0.0, {}), not (ToolResponse, reward, "
         "metrics)."),
        (not_a_number, "exception", "raised ValueError: the reward is nan."),
    ],
)  # fmt: skip
def test_a_failing_tool_is_answered_counted_and_released(what, kind, text):
    tool = Acts("execute", what)
    runner = runner_of(tool, timeout=0.2 if kind == "timeout" else 30)
    result, rewards = asyncio.run(one_call(runner))
    assert (result.response.text, result.failure, result.reward) == (f"Error: 'counter' {text}", kind, None)
    assert runner.counts == {"calls": 1, kind: 1} and rewards == {"counter": 1.0}
    assert ("release", {}) in tool.log and tool.totals == {}


@pytest.mark.parametrize("what, kind", [(fail, "exception"), (hang, "timeout")])
def test_a_create_that_fails_is_answered_and_its_instance_released(what, kind):
    tool = Acts("create", what)
    tool.release, released = None, []

    async def release(instance_id, **kwargs):
        released.append(instance_id)

    tool.release = release
    runner = runner_of(tool, timeout=0.2 if what is hang else 30)
    result, rewards = asyncio.run(one_call(runner))
    assert result.failure == kind and rewards == {} and len(released) == 1
    assert runner.counts == {"calls": 1, kind: 1}


async def test_failures_of_calc_reward_and_release_are_counted_and_no_score_is_made_up():
    for at, counted, rewards in (("calc_reward", "reward_failed", None), ("release", "release_failed", 1.0)):
        for what in (fail, hang):
            runner = runner_of(Acts(at, what), Acts("never", fail, "other"), timeout=0.2 if what is hang else 30)
            async with runner.conversation() as tools:
                await tools.call("counter", "{}")
                await tools.call("other", "{}")
                assert await tools.calc_rewards() == {"counter": rewards, "other": 1.0}
            assert runner.counts == {"calls": 2, counted: 1} and runner.tools["other"].totals == {}


async def test_release_when_the_conversation_raises_or_is_cancelled_twice():
    tool = Acts("never", fail)
    with pytest.raises(ZeroDivisionError):
        async with runner_of(tool).conversation() as tools:
            await tools.call("counter", "{}")
            raise ZeroDivisionError
    assert tool.log[-1] == ("release", {})

    async def converse():
        async with runner_of(tool).conversation() as tools:
            await tools.call("counter", "{}")
            await hang()

    tool = Acts("release", lambda: asyncio.sleep(0.1))
    task = asyncio.create_task(converse())
    await asyncio.sleep(0.05)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert task.cancelled() and tool.log[-1] == ("release", {}) and tool.totals == {}


def test_what_concerns_every_call_ends_the_run():
    async def unavailable():
        raise FatalGradingError("no sandbox here")

    tool = Acts("execute", unavailable)
    with pytest.raises(FatalGradingError, match="no sandbox here"):
        asyncio.run(one_call(runner_of(tool)))
    assert tool.log[-1] == ("release", {})


async def test_a_call_after_the_end_is_refused():
    async with runner_of(Counter()).conversation() as tools:
        pass
    with pytest.raises(RuntimeError, match="call of 'counter' in a conversation whose tools are released"):
        await tools.call("counter", '{"by": 1}')


@pytest.mark.parametrize(
    "side, cut",
    [("left", "(truncated)...6789"), ("right", "0123...(truncated)"), ("middle", "01...(truncated)...89")],
)
def test_the_side_names_where_the_text_is_cut(side, cut):
    assert truncate("0123456789", 4, side) == cut
    assert truncate("0123", 4, side) == "0123" and truncate("", 4, side) == ""

    async def answer():
        return ToolResponse(text="0123456789", image=[1]), 0.0, {}

    runner = runner_of(Acts("execute", answer), max_tool_response_length=4, tool_response_truncate_side=side)
    response = asyncio.run(one_call(runner))[0].response
    assert response.text == cut and response.image == [1]


def test_one_character_in_the_middle_and_half_surrogates():
    assert truncate("0123", 1, "middle") == "...(truncated)..."
    assert truncate("0123", 3, "middle") == "0...(truncated)...3"
    assert runner_of(Counter()).cut("a\ud800b") == "a?b"


def test_a_failure_is_logged_once_and_counted_each_time():
    runner = runner_of(Acts("execute", fail))
    with logged() as messages:
        for _ in range(3):
            asyncio.run(one_call(runner))
    assert runner.counts["exception"] == 3 and len(messages) == 1
    assert "KeyError: 'left'" in messages[0] and "test_runner.py" in messages[0]


def test_wrong_arguments_and_unknown_tools_are_logged_once_each():
    runner = runner_of(Counter(None, schema("counter", {"by": {"type": "integer"}})))
    with logged() as messages:
        for name, arguments in (("counter", '{"by": "x"}'), ("counter", '{"by": "y"}'), ("a", "{}"), ("b", "{}")):
            asyncio.run(one_call(runner, name, arguments))
    assert runner.counts == {"calls": 4, "invalid_arguments": 2, "unknown_tool": 2}
    assert len(messages) == 2
    assert "'x' is not of type 'integer'" in messages[0] and "there is no tool 'a'" in messages[1]


def test_the_log_says_where_a_tool_that_returns_a_wrong_type_is_defined():
    class Wrong(Acts):
        async def execute(self, instance_id, parameters, **kwargs):
            return "text", 0.0, {}

    with logged() as messages:
        result, _ = asyncio.run(one_call(runner_of(Wrong("never", fail))))
    assert ".py" not in result.response.text  # which the model reads
    assert f"Wrong.execute (tests/agents/tools/test_runner.py:{Wrong.execute.__code__.co_firstlineno})" in messages[0]


def test_wrong_schemas_and_kwargs_of_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'counter': its parameters are no JSON schema: properties.by.type: 'int'"):
        runner_of(Counter(None, schema("counter", {"by": {"type": "int"}})))
    runner = runner_of(Counter())
    with pytest.raises(ValueError, match="tools_kwargs names the tool 'abacus'; loaded are: counter"):
        runner.conversation({"abacus": {"create_kwargs": {}}})
    with pytest.raises(ValueError, match="tools_kwargs.counter has 'creat_kwargs'; known are: create_kwargs"):
        runner.conversation({"counter": {"creat_kwargs": {}}})
    rows = {"abacus": None, "counter": {"create_kwargs": None, "execute_kwargs": {"b": 2}}}  # as parquet fills
    assert asyncio.run(one_call(runner, "counter", '{"by": 5}', rows))[1] == {"counter": 5.0}
