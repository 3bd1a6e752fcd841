"""Results of tool calls that a run made before it was killed."""

import asyncio

from tests.agents.tools.helpers import schema
from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.journal import ToolJournal
from verl.agents.tools.runner import ToolRunner
from verl.agents.tools.schemas import ToolResponse


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
    first = started(tmp_path)
    expected = converse(first, "a", "raise", "b")
    assert expected[0][0] == ("a 1", 0.5, {"n": 1}, None) and expected[0][1][3] == "exception"
    again = started(tmp_path)
    assert converse(again, "a", "raise", "b") == expected
    assert (again[0].calls, again[2].replayed) == ([], 3)
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
    assert (other[0].calls, other[2].replayed, other[2].results) == (["a"], 0, {3: {}})


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
    journal.add(key, ToolResponse(text="a"), None, {}, None)
    _, _, again = started(tmp_path)
    key = again.key(4, 1, [5], 0)
    again.key(5, 1, [6], 0)
    assert again.find(key)["response"] == {"text": "a"} and again.find(again.key(5, 1, [5], 0)) is None


def test_images_are_not_kept(tmp_path):
    _, _, journal = started(tmp_path)
    key = journal.key(1, 0, [1], 0)
    journal.add(key, ToolResponse(text="a", image=[object()]), None, {}, None)
    assert not (tmp_path / "tool_journal").exists()
