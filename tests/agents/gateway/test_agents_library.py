"""A program of the openai-agents library, unchanged but for its reward, as a client of the gateway.

`make test-gateway` makes the environment of the library (AGENTS_VENV) and runs this file.
"""

import asyncio
import os
from pathlib import Path

import pytest

from tests.agents.gateway.parts import CALL, run_program, worker_of

pytestmark = pytest.mark.gateway

PYTHON = Path(os.environ.get("AGENTS_VENV", ".venv-agents")).absolute() / "bin" / "python"
PROGRAM = """
import asyncio, json, sys
from agents import Agent, Runner, function_tool, set_default_openai_api

KIND = sys.argv[1]
if KIND == "chat_completions":
    set_default_openai_api("chat_completions")

@function_tool
def lookup(key: str) -> str:
    "Looks a value up."
    return {"sky": "42"}[key]

row = json.load(sys.stdin)
helper = Agent(name="helper", instructions="Be short.", tools=[lookup], model="policy")
if KIND == "sub-agent":
    tool = helper.as_tool("lookup", "Looks a value up.")
    helper = Agent(name="planner", instructions="Ask the helper.", tools=[tool], model="policy")

async def main():
    if KIND == "streamed":
        result = Runner.run_streamed(helper, row["prompt"])
        async for event in result.stream_events():
            pass
    else:
        result = await Runner.run(helper, row["prompt"])
    print(json.dumps({"reward": float(result.final_output == "It is 42.")}))

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["responses", "chat_completions", "streamed", "sub-agent"])
def test_an_agent_of_the_library_is_recorded(tmp_path, kind):
    (tmp_path / "agent.py").write_text(PROGRAM)
    worker = worker_of(tmp_path / "model", None, command=f"{PYTHON} {tmp_path}/agent.py {kind}", response_length=1500)
    decode = worker.tokenizer.decode
    call = CALL.replace("key", "input") if kind == "sub-agent" else CALL

    def answer(prompt):
        text = decode(prompt)
        if "<tool_response>" in text.partition("</tools>")[2] or "<tool_response>" in text[-200:]:
            return "It is 42.<|im_end|>"
        return call if "Ask the helper." in text else CALL

    worker.server_manager.answer = answer
    output = asyncio.run(run_program(worker))
    asked = worker.server_manager.asked
    assert output.reward_score == 1.0 and output.extra_fields["end_reason"] == "stop"
    assert output.num_turns == 2 * len(asked) == (8 if kind == "sub-agent" else 4)
    assert sum(output.response_mask) == sum(len(wrote) for _, wrote, _, _ in asked)
    if kind == "sub-agent":
        rows = [prompt + output.response_ids[start:end] for start, end, prompt in output.extra_fields["turn_prompts"]]
        assert sorted(rows) == sorted(prompt + wrote for prompt, wrote, _, _ in (asked[2], asked[3]))
    else:
        assert output.prompt_ids + output.response_ids == asked[1][0] + asked[1][1]
        assert decode(output.response_ids).startswith(CALL) and "It is 42." in decode(output.response_ids)
