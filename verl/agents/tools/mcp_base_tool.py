"""A function of an MCP server as a tool."""

import asyncio
import time
from typing import Any

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.mcp_servers import McpServer
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class MCPBaseTool(BaseTool):
    """Sends each call to the server that offers the function; `initialize_tools_from_config` creates it.

    Keys of `config`: timeout (30 s) of a call, rate_limit (calls per second of this process; absent: none). An answer
    that the server marks as an error is shown to the model as one.
    """

    parallel_calls = True
    server: McpServer | None = None  # set by `initialize_tools_from_config`

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema | None):
        if self.server is None and config.get("type") != "mcp":
            raise ValueError("a tool of MCP servers needs config.type=mcp, and mcp.mcp_servers_config_path")
        super().__init__(config, tool_schema)
        self.timeout = config["timeout"] if "timeout" in config else 30
        self._interval = 1.0 / config["rate_limit"] if config.get("rate_limit") else 0.0
        self._next = 0.0  # when the next call may start

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """The server's answer; RuntimeError with its text where it reports an error."""
        if self.server is None:
            raise RuntimeError(f"{self.name!r} has no MCP server; make it by an entry of the tools' file")
        now = time.monotonic()
        start = max(now, self._next)
        self._next = start + self._interval
        await asyncio.sleep(start - now)
        result = await self.server.call_tool(self.name, parameters, self.timeout)
        response = self._parse_tool_result(result.content)
        if result.is_error:
            raise RuntimeError(response.text or "the server reports an error")
        return response, 0.0, {}

    def _parse_tool_result(self, content: list[Any]) -> ToolResponse:
        """The response for the parts of an answer; only text is kept."""
        return ToolResponse(text="\n".join(part.text for part in content if part.type == "text"))
