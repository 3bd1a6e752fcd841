"""Conversations with correct tool calls, from RL rows of GSM8K: for a short SFT before RL with the tool.

    python -m examples.pretrained.gsm8k.tool_calls --rows FILE --tools YAML --out FILE [--limit 200]

A model that never calls a tool in the format of its chat template gets no reward for calls, so RL alone cannot teach
it. --rows is a parquet file for the agent loop tool_agent, with GSM8K's solution in extra_info.answer and the tool in
extra_info.tools_kwargs; --tools is the file of `rollout.multi_turn.tool_config_path`. In each conversation the solution
ends with a call of the tool, whose only required argument is the answer; the tool's own response follows, and then the
answer after `####`.
"""

import argparse
import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from verl.agents.tools.runner import ToolRunner
from verl.agents.tools.tool_registry import initialize_tools_from_config, tool_schemas
from verl.utils.fs import output_file

_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's notes for a calculator


def conversation(row: Mapping[str, Any], runner: ToolRunner) -> list[dict[str, Any]]:
    """The messages of a row; ValueError unless it has a solution, a tool of --tools, and the call succeeds."""
    info = row["extra_info"]
    steps, marker, number = _CALCULATION.sub("", info.get("answer") or "").rpartition("####")
    given = {name: kwargs for name, kwargs in (info.get("tools_kwargs") or {}).items() if kwargs is not None}
    if not marker or len(given) != 1:
        raise ValueError("extra_info needs GSM8K's solution as `answer` and one tool in `tools_kwargs`")
    ((name, _),) = given.items()
    answer = number.strip().replace(",", "")

    async def called() -> tuple[dict[str, Any], str]:
        async with runner.conversation(given) as tools:
            (argument,) = runner.tools[name].tool_schema.function.parameters.required
            result = await tools.call(name, {argument: answer})
        if result.failure:
            raise ValueError(f"the call of {name} failed: {result.response.text}")
        return {argument: answer}, result.response.text

    arguments, response = asyncio.run(called())
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        *({"role": message["role"], "content": message["content"]} for message in row["prompt"]),
        {"role": "assistant", "content": steps.strip(), "tool_calls": [call]},
        {"role": "tool", "content": response},
        {"role": "assistant", "content": f"#### {answer}"},
    ]


def main(argv: list[str] | None = None) -> None:
    """Write --out, with the columns messages and tools."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="parquet file of RL rows")
    parser.add_argument("--tools", required=True, help="yaml file of tools")
    parser.add_argument("--out", type=output_file, required=True, help="parquet file for fsdp_sft_trainer")
    parser.add_argument("--limit", type=int, default=200, help="conversations, of the first rows")
    args = parser.parse_args(argv)
    runner, messages = ToolRunner(initialize_tools_from_config(args.tools)), []
    for number, row in enumerate(pd.read_parquet(args.rows)[: args.limit].to_dict("records")):
        try:
            messages.append(conversation(row, runner))
        except ValueError as error:
            raise SystemExit(f"{args.rows}, row {number}: {error}") from error
    schemas = json.dumps(tool_schemas(runner.tools.values()))
    pd.DataFrame({"messages": messages, "tools": schemas}).to_parquet(args.out)
    print(f"{args.out}: {len(messages)} conversations with a call of {', '.join(runner.tools)}")


if __name__ == "__main__":
    main()
