"""MCP tools against real servers: a process on stdin and stdout, and HTTP on 127.0.0.1."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.agents.tools.mcp_base_tool import MCPBaseTool
from verl.agents.tools.mcp_search_tool import MCPSearchTool
from verl.agents.tools.runner import ToolRunner
from verl.agents.tools.tool_registry import initialize_tools_from_config
from verl.utils.ports import free_port

pytest.importorskip("mcp.server.mcpserver", reason="the package mcp, version 2")
pytestmark = pytest.mark.process
SERVER = str(Path(__file__).with_name("mcp_server.py"))


def tools_of(folder, entry, selected=None, cls="mcp_base_tool.MCPBaseTool", **config):
    servers = folder / "servers.json"
    servers.write_text(json.dumps({"mcpServers": {"test": entry}}))
    mcp = {"mcp_servers_config_path": str(servers), **({"tool_selected_list": selected} if selected else {})}
    file = folder / "tools.yaml"
    entry = {"class_name": f"verl.tools.{cls}", "config": {"type": "mcp", **config}, "mcp": mcp}
    file.write_text(json.dumps({"tools": [entry]}))  # JSON is yaml
    return initialize_tools_from_config(str(file))


def run(tools, *calls, **settings):
    async def converse():
        runner = ToolRunner(tools, max_tool_response_length=500, **settings)
        async with runner.conversation() as conversation:
            return [await conversation.call(name, arguments) for name, arguments in calls]

    return asyncio.run(converse())


@pytest.fixture
def http_server():
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def test_a_process_answers_keeps_its_state_and_reports_errors(tmp_path):
    tools = tools_of(tmp_path, {"command": sys.executable, "args": [SERVER]})
    server = tools[0].server
    try:
        assert [tool.name for tool in tools] == ["add", "note", "fail", "die", "hang", "search"]
        assert all(type(tool) is MCPBaseTool and tool.server is server for tool in tools)
        parameters = tools[0].tool_schema.function.parameters
        assert parameters.required == ["a"] and parameters.properties["b"].type == "integer"
        added, once, twice, failed, wrong = run(
            tools, ("add", '{"a": 41}'), ("note", '{"text": "x"}'), ("note", '{"text": "y"}'), ("fail", "{}"),
            ("add", '{"a": "b"}'),
        )  # fmt: skip
        assert [r.response.text for r in (added, once, twice)] == ["42", "x", "x y"]
        assert failed.failure == "exception" and "on purpose" in failed.response.text
        assert wrong.failure == "invalid_arguments"
        late, after = run(tools, ("hang", "{}"), ("note", '{"text": "z"}'), timeout=3)
        assert late.failure == "timeout" and after.response.text == "x y z"
        died, again = run(tools, ("die", "{}"), ("note", '{"text": "new"}'))
        assert died.failure == "exception" and again.response.text == "new"  # another process
    finally:
        server.close()


def test_http_with_selected_tools(tmp_path, http_server):
    tools = tools_of(
        tmp_path, {"url": http_server, "auth_token": "secret"}, ["search"], "mcp_search_tool.MCPSearchTool",
        rate_limit=1000, timeout=20,
    )  # fmt: skip
    try:
        assert [(type(tool), tool.name) for tool in tools] == [(MCPSearchTool, "search")]
        (result,) = run(tools, ("search", '{"query": "Bonn"}'))
        assert result.response.text == "Doc 1 (Title: Bonn)\nText.\nhttp://a"
    finally:
        tools[0].server.close()


def test_a_server_that_cannot_start_and_an_absent_function_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"tools\[0\].*MCP server 'test'"):
        tools_of(tmp_path, {"command": str(tmp_path / "absent")})
    folder = tmp_path / "other"
    folder.mkdir()
    with pytest.raises(ValueError, match="tool_selected_list has 'divide', which no server offers. Known: add, note"):
        tools_of(folder, {"command": sys.executable, "args": [SERVER]}, ["add", "divide"])
