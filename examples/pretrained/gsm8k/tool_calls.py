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

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.tool_registry import initialize_tools_from_config, tool_schemas
from verl.utils.fs import output_file

_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's notes for a calculator


def conversation(row: Mapping[str, Any], tools: Mapping[str, BaseTool]) -> list[dict[str, Any]]:
    """The messages of a row; KeyError unless --tools has its tool and extra_info has a solution."""
    info = row["extra_info"]
    name, settings = next((name, given) for name, given in info["tools_kwargs"].items() if given)
    tool, (steps, _, number) = tools[name], _CALCULATION.sub("", info["answer"]).rpartition("####")
    (argument,) = tool.tool_schema.function.parameters.required
    arguments = {argument: number.strip().replace(",", "")}

    async def response() -> str:
        instance, _ = await tool.create(**settings["create_kwargs"])
        said, _, _ = await tool.execute(instance, arguments)
        await tool.release(instance)
        return said.text

    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        *({"role": message["role"], "content": message["content"]} for message in row["prompt"]),
        {"role": "assistant", "content": steps.strip(), "tool_calls": [call]},
        {"role": "tool", "content": asyncio.run(response())},
        {"role": "assistant", "content": f"#### {arguments[argument]}"},
    ]


def main(argv: list[str] | None = None) -> None:
    """Write --out, with the columns messages and tools."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="parquet file of RL rows")
    parser.add_argument("--tools", required=True, help="yaml file of tools")
    parser.add_argument("--out", type=output_file, required=True, help="parquet file for fsdp_sft_trainer")
    parser.add_argument("--limit", type=int, default=200, help="conversations, of the first rows")
    args = parser.parse_args(argv)
    tools = {tool.name: tool for tool in initialize_tools_from_config(args.tools)}
    schemas = json.dumps(tool_schemas(tools.values()))
    rows = pd.read_parquet(args.rows)[: args.limit].to_dict("records")
    pd.DataFrame({"messages": [conversation(row, tools) for row in rows], "tools": schemas}).to_parquet(args.out)
    print(f"{args.out}: {len(rows)} conversations with a call of {', '.join(tools)}")


if __name__ == "__main__":
    main()
