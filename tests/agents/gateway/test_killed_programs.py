"""A run with programs that is killed at random moments resumes to the same end, and repeats no conversation that ended.

`python -m tests.agents.gateway.test_killed_programs 10` does so with ten kills.
"""

import sys
import tempfile
from pathlib import Path

import pytest

from tests.agents.agent_loop.test_killed_tools_run import kills, training

AGENT = """
import json, os, sys, urllib.request

def log(event):
    with open({log!r}, "a") as file:
        print(event, file=file)

def ask(messages):
    number = {{"type": "integer"}}
    parameters = {{"type": "object", "properties": {{"a": number, "b": number}}, "required": ["a", "b"]}}
    tools = [{{"type": "function", "function": {{"name": "add", "description": "Adds.", "parameters": parameters}}}}]
    body = json.dumps({{"messages": messages, "tools": tools, "max_tokens": 12}}).encode()
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request) as reply:
        return json.load(reply)["choices"][0]["message"]

log("begin")
messages, calls = json.load(sys.stdin)["prompt"], 0
for _ in range(3):
    messages.append(ask(messages))
    made = messages[-1].get("tool_calls") or []
    if not made:
        break
    calls += len(made)
    messages += [{{"role": "tool", "tool_call_id": call["id"], "content": "7"}} for call in made]
log("end")
print(json.dumps({{"reward": calls}}))
"""


def command(folder: Path, model: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    agent = folder / "agent.py"
    agent.write_text(AGENT.format(log=str(folder / "calls.log")))
    return training(folder, model, response_length=64, agent__command=f"'python {agent}'", agent__command_concurrency=4)


@pytest.mark.process
@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_a_killed_run_resumes_to_the_same_end_without_repeating_conversations_that_ended(tmp_path):
    kills(tmp_path, 1, make=command, sharpness=5.0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        kills(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else 10, make=command, sharpness=5.0)
