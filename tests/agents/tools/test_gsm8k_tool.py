"""The GSM8K tool: rewards of a conversation by hand."""

import asyncio

import pytest

from tests.agents.tools.helpers import schema
from verl.agents.tools.gsm8k_tool import Gsm8kTool
from verl.agents.tools.runner import ToolRunner


def tool():
    return Gsm8kTool({}, schema("judge", {"answer": {"type": "string"}}, ["answer"]))


async def test_rewards_of_three_answers_and_nothing_is_left():
    judge = tool()
    runner = ToolRunner([judge])
    async with runner.conversation({"judge": {"create_kwargs": {"ground_truth": "72"}}}) as tools:
        steps = [await tools.call("judge", {"answer": a}) for a in ("71", "#### 72", "72")]
        rewards = await tools.calc_rewards()
    assert [(step.reward, step.response.text) for step in steps] == [
        (-0.05, "Current parsed answer='71' reward=0.0"), (0.0, "Current parsed answer='#### 72' reward=1.0"),
        (-0.05, "Current parsed answer='72' reward=1.0"),
    ]  # fmt: skip
    assert rewards == {"judge": 1.0} and judge._instance_dict == {}


def test_a_missing_ground_truth_is_named():
    with pytest.raises(ValueError, match="create_kwargs.ground_truth"):
        asyncio.run(tool().create())
