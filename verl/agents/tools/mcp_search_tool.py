"""A search function of an MCP server as a tool."""

import json
from typing import Any

from verl.agents.tools.mcp_base_tool import MCPBaseTool
from verl.agents.tools.schemas import ToolResponse


class MCPSearchTool(MCPBaseTool):
    """Shows answers of the form {"results": [{"title", "content", "url"}, ...]} as numbered passages."""

    def _parse_tool_result(self, content: list[Any]) -> ToolResponse:
        text = super()._parse_tool_result(content).text
        try:
            results = json.loads(text)["results"]
            blocks = [
                f"Doc {number} (Title: {page.get('title', '')})\n{page.get('content', '')}\n{page.get('url', '')}"
                for number, page in enumerate(results, start=1)
            ]
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return ToolResponse(text=text)  # another form
        return ToolResponse(text="\n\n".join(block.strip() for block in blocks) or "No results.")
