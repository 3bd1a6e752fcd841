"""Connections to MCP servers (package `mcp`, extra `mcp`), over HTTP or a process's stdin and stdout."""

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from verl.agents.tools.schemas import OpenAIFunctionToolSchema

_CONNECT_S = 60.0
# JSON-RPC: unknown method, wrong parameters, internal error. The server refused this request and still runs.
_ANSWERED = (-32601, -32602, -32603)


class McpServer:
    """One connection to a server, kept by a thread with an event loop of its own; a broken one is made again.

    Args:
        name: the server's key in the file.
        entry: {url, auth_token?} for HTTP, or {command, args?, env?, cwd?} for a process.
    """

    def __init__(self, name: str, entry: dict[str, Any]) -> None:
        if not isinstance(entry, dict) or not ("url" in entry or "command" in entry):
            raise ValueError(f"mcpServers.{name}: expected an object with url or command, not {entry!r:.200}")
        self.name, self.entry = name, entry
        self._lock = threading.Lock()
        self._connected: Future | None = None  # (client, loop, stop)

    def _connection(self) -> Future:
        """The connection that is open or being opened."""
        with self._lock:
            if self._connected is None:
                self._connected = Future()
                serving, name = self._serve(self._connected), f"MCP server {self.name}"
                threading.Thread(target=asyncio.run, args=(serving,), name=name, daemon=True).start()
            return self._connected

    async def _serve(self, connected: Future) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._client(stack))
                stop = asyncio.Event()
                connected.set_result((client, asyncio.get_running_loop(), stop))
                await stop.wait()
        except BaseException as error:
            if not connected.done():
                reason = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
                connected.set_exception(ConnectionError(f"MCP server {self.name!r}: {type(reason).__name__}: {reason}"))
        finally:
            with self._lock:
                if self._connected is connected:
                    self._connected = None

    async def _client(self, stack: contextlib.AsyncExitStack) -> Any:
        try:
            from mcp import Client, StdioServerParameters
            from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
        except ImportError as error:
            raise ImportError(f"tools of type mcp need the package mcp (pip install 'mcp>=2'): {error}") from error
        if "command" in self.entry:
            options = {key: self.entry[key] for key in ("args", "env", "cwd") if self.entry.get(key) is not None}
            return Client(StdioServerParameters(command=self.entry["command"], **options))
        token = self.entry.get("auth_token")
        headers = {"Authorization": f"Bearer {token}"} if token else None
        http = await stack.enter_async_context(create_mcp_http_client(headers=headers))
        return Client(streamable_http_client(self.entry["url"], http_client=http))

    async def list_tools(self) -> list[OpenAIFunctionToolSchema]:
        """The schemas of the server's tools; ConnectionError where it cannot be reached."""

        async def all_pages(client: Any) -> list[Any]:
            page = await client.list_tools()
            tools = list(page.tools)
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
            return tools

        tools = await self._ask(all_pages, _CONNECT_S)
        return [OpenAIFunctionToolSchema.of(t.name, t.description or "", t.input_schema) for t in tools]

    async def call_tool(self, name: str, arguments: dict[str, Any], timeout: float) -> Any:
        """The server's result of a call (mcp.types.CallToolResult); TimeoutError after `timeout` seconds."""
        return await self._ask(lambda client: client.call_tool(name, arguments), timeout)

    async def _ask(self, request: Callable[[Any], Coroutine], timeout: float) -> Any:
        connected = self._connection()
        try:  # shielded: other calls wait for the same connection
            client, loop, stop = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(connected)), timeout)
            asked = asyncio.run_coroutine_threadsafe(request(client), loop)
            return await asyncio.wait_for(asyncio.wrap_future(asked), timeout)
        except TimeoutError:
            raise TimeoutError(f"MCP server {self.name!r} gave no answer in {timeout:g} s") from None
        except Exception as error:
            if getattr(error, "code", None) not in _ANSWERED:
                self.close()  # it may be broken: the next call opens another one
            raise

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            connected, self._connected = self._connected, None
        if connected is not None and connected.done() and connected.exception() is None:
            _, loop, stop = connected.result()
            loop.call_soon_threadsafe(stop.set)


@functools.cache
def read_servers(mcp_servers_config_path: str) -> tuple[McpServer, ...]:
    """The servers of a JSON file {"mcpServers": {name: entry}}, the same objects for each tool of the process."""
    try:
        servers = json.loads(Path(mcp_servers_config_path).read_text(encoding="utf-8"))["mcpServers"]
        return tuple(McpServer(name, entry) for name, entry in servers.items())
    except FileNotFoundError:
        raise FileNotFoundError(f"mcp.mcp_servers_config_path: there is no file {mcp_servers_config_path!r}") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{mcp_servers_config_path}: expected JSON with {{\"mcpServers\": {{name: {{url or command}}}}}} ({error})"
        ) from error
