"""ToolRunner: instances per conversation, kwargs, limits, error texts, release; the journal of earlier results."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from tests.agents.tools.helpers import Acts, Counter, schema
from tests.helpers.logs import logged
from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.journal import ToolJournal
from verl.agents.tools.runner import ToolRunner, truncate
from verl.agents.tools.schemas import ToolResponse, ToolResult
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
    assert both == [(["total 11", "total 13"], {"counter": 13.0}), (["total 1", "total 3"], {"counter": 3.0})]
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


@pytest.mark.parametrize(
    "what, kind, text",
    [
        (hang, "timeout", "gave no answer in time (took longer than 0.2 s)."),
        (hang_against_cancellation, "timeout", "gave no answer in time (took longer than 0.2 s)."),
        (fail, "exception", "raised KeyError: 'left'."),
        (AsyncMock(side_effect=SystemExit(3)), "exception", "raised RuntimeError: SystemExit: 3."),
        (AsyncMock(side_effect=asyncio.CancelledError()), "exception",
         "raised RuntimeError: the tool cancelled itself."),
        (AsyncMock(return_value=("text", 0.0, {})), "exception",
         "raised TypeError: execute returned ('text', 0.0, {}), not (ToolResponse, reward, metrics)."),
        (AsyncMock(return_value=(ToolResponse(text="x"), float("nan"), {})), "exception",
         "raised ValueError: the reward is nan."),
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
    tool.release = AsyncMock()
    runner = runner_of(tool, timeout=0.2 if what is hang else 30)
    result, rewards = asyncio.run(one_call(runner))
    assert result.failure == kind and rewards == {} and tool.release.await_count == 1
    assert runner.counts == {"calls": 1, kind: 1}


async def test_an_instance_whose_create_failed_is_released_after_a_later_create_too():
    given, released = [], []

    class Flaky(Counter):
        async def create(self, instance_id=None, **kwargs):
            given.append(instance_id)
            if len(given) == 1:
                raise OSError("busy")
            return await super().create("own", **kwargs)

        async def release(self, instance_id, **kwargs):
            released.append(instance_id)

    async with runner_of(Flaky()).conversation() as tools:
        failures = [(await tools.call("counter", '{"by": 1}')).failure for _ in range(2)]
    assert failures == ["exception", None] and released == [given[0], "own"]


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
    tool = Acts("execute", AsyncMock(side_effect=FatalGradingError("no sandbox here")))
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

    answer = AsyncMock(return_value=(ToolResponse(text="0123456789", image=[1]), 0.0, {}))
    runner = runner_of(Acts("execute", answer), max_tool_response_length=4, tool_response_truncate_side=side)
    response = asyncio.run(one_call(runner))[0].response
    assert response.text == cut and response.image == [1]


def test_odd_lengths_in_the_middle_and_half_surrogates():
    assert truncate("0123", 3, "middle") == "0...(truncated)...3"
    assert runner_of(Counter()).cut("a\ud800b") == "a?b"


def test_the_first_failure_of_each_kind_is_logged_and_each_is_counted():
    runner = runner_of(Acts("execute", fail), Counter(None, schema("add", {"by": {"type": "integer"}})))
    calls = (("counter", "{}"), ("add", '{"by": "x"}'), ("absent", "{}"))
    with logged() as messages:
        for name, arguments in calls * 2:
            asyncio.run(one_call(runner, name, arguments))
    assert runner.counts == {"calls": 6, "exception": 2, "invalid_arguments": 2, "unknown_tool": 2}
    for message, said in zip(messages, ("KeyError: 'left'", "'x' is not of type 'integer'", "'absent'"), strict=True):
        assert said in message
    assert "test_runner.py" in messages[0]


def test_wrong_schemas_and_kwargs_of_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'counter': its parameters are no JSON schema: properties.by.type: 'int'"):
        runner_of(Counter(None, schema("counter", {"by": {"type": "int"}})))
    runner = runner_of(Counter())
    with pytest.raises(ValueError, match="tools_kwargs names the tool 'abacus'; loaded are: counter"):
        runner.conversation({"abacus": {"create_kwargs": {}}})
    with pytest.raises(ValueError, match="tools_kwargs.counter has 'creat_kwargs'; known are: create_kwargs"):
        runner.conversation({"counter": {"creat_kwargs": {}}})
    with pytest.raises(ValueError, match="tools_kwargs.counter is 3, not a dict of create_kwargs"):
        runner.conversation({"counter": 3})
    rows = {"abacus": None, "counter": {"create_kwargs": None, "execute_kwargs": {"b": 2}}}  # as parquet fills
    assert asyncio.run(one_call(runner, "counter", '{"by": 5}', rows))[1] == {"counter": 5.0}


class Counting(BaseTool):
    """Answers with the number of calls so far; raises for "raise"."""

    calls: list[str]

    def get_openai_tool_schema(self):
        return schema("echo", {"text": {"type": "string"}}, ["text"])

    async def execute(self, instance_id, parameters, **kwargs):
        self.calls.append(parameters["text"])
        if parameters["text"] == "raise":
            raise ZeroDivisionError("no")
        return ToolResponse(text=f"{parameters['text']} {len(self.calls)}"), 0.5, {"n": len(self.calls)}


class Stateful(Counting):
    async def calc_reward(self, instance_id, **kwargs):
        return 7.0


def started(folder, cls=Counting, config=None):
    """A tool of a run that has just started, its runner and journal."""
    tool = cls(config or {}, None)
    tool.calls = []
    return tool, ToolRunner([tool]), ToolJournal(folder, [tool])


def converse(start, *texts, step=3, seed=1, ids=(5, 6)):
    """The outcomes of calls of one conversation, and its rewards."""
    _, runner, journal = start

    async def run():
        async with runner.conversation({}, journal) as tools:
            results = []
            for number, text in enumerate(texts):
                key = journal.key(step, seed, ids, number)
                results.append(await tools.call("echo", {"text": text}, key))
            return results, await tools.calc_rewards()

    results, rewards = asyncio.run(run())
    return [(r.response.text, r.reward, r.metrics, r.failure) for r in results], rewards


def test_a_run_that_starts_again_gets_the_results_without_calls(tmp_path):
    expected = converse(started(tmp_path), "a", "raise", "b")
    assert expected[0][0] == ("a 1", 0.5, {"n": 1}, None) and expected[0][1][3] == "exception"
    again = started(tmp_path)
    assert converse(again, "a", "raise", "b") == expected
    assert again[0].calls == []
    # a call beyond those that were made, other tokens, another seed, another step
    assert converse(again, "a", "raise", "b", "c")[0][3][0] == "c 1"
    for other in ({"ids": (5, 7)}, {"seed": 2}, {"step": 4}):
        before = len(again[0].calls)
        converse(again, "a", **other)
        assert len(again[0].calls) == before + 1


def test_calls_of_another_worker_of_the_same_run_are_no_earlier_calls(tmp_path):
    one, other = started(tmp_path), started(tmp_path)
    other[2].begun = one[2].begun - 60  # so that no clock tick decides
    converse(one, "a")
    converse(other, "a")
    assert (other[0].calls, other[2].results) == (["a"], {3: {}})


def test_a_tool_that_was_changed_is_called_again(tmp_path):
    converse(started(tmp_path), "a")
    changed = started(tmp_path, config={"limit": 2})
    converse(changed, "a")
    assert changed[0].calls == ["a"]


def test_a_tool_with_a_reward_of_its_state_is_called_again(tmp_path):
    assert converse(started(tmp_path, Stateful), "a")[1] == {"echo": 7.0}
    again = started(tmp_path, Stateful)
    assert converse(again, "a")[1] == {"echo": 7.0} and again[0].calls == ["a"]
    assert not (tmp_path / "tool_journal").exists()


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    converse(started(tmp_path), "a", "b")
    (file,) = (tmp_path / "tool_journal").iterdir()
    file.write_text(file.read_text()[:-20])
    again = started(tmp_path)
    assert [r[0] for r in converse(again, "a", "b")[0]] == ["a 1", "b 1"]
    assert again[0].calls == ["b"]


def test_journals_of_steps_that_a_checkpoint_made_final_are_removed(tmp_path):
    for step in (1, 2, 3):
        converse(started(tmp_path), "a", step=step)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    converse(started(tmp_path), "a", step=4)
    steps = sorted(file.name.split("-")[0] for file in (tmp_path / "tool_journal").iterdir())
    assert steps == ["step_3", "step_4"]


def test_calls_of_several_steps_at_a_time_are_found_under_their_own(tmp_path):
    """As in asynchronous training: a call of step 4 ends after one of step 5 began."""
    _, _, journal = started(tmp_path)
    key = journal.key(4, 1, [5], 0)
    journal.key(5, 1, [6], 0)
    journal.add(key, ToolResult(response=ToolResponse(text="a")))
    _, _, again = started(tmp_path)
    key = again.key(4, 1, [5], 0)
    again.key(5, 1, [6], 0)
    assert again.find(key)["response"] == {"text": "a"} and again.find(again.key(5, 1, [5], 0)) is None


def test_images_are_not_kept(tmp_path):
    _, _, journal = started(tmp_path)
    key = journal.key(1, 0, [1], 0)
    journal.add(key, ToolResult(response=ToolResponse(text="a", image=[object()])))
    assert not (tmp_path / "tool_journal").exists()
