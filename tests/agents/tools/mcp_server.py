"""An MCP server: `python mcp_server.py` on stdio, `python mcp_server.py PORT` on a port of 127.0.0.1."""

import json
import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")
notes: list[str] = []


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a text; returns all."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("on purpose")


@server.tool()
def die() -> str:
    """Die."""
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Hang."""
    import asyncio

    await asyncio.sleep(60)
    return "late"


@server.tool()
def search(query: str) -> str:
    """Search."""
    return json.dumps({"results": [{"title": query, "content": "Text.", "url": "http://a"}]})


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
