"""A harness of verifiers that leads the conversation in the environment's process, without starting a program."""

import json
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any, ClassVar

import httpx

HARNESS = "verl_chat"  # under which verifiers imports the harness


async def lead(
    model: str, messages: list[dict[str, Any]], trace: Any, url: str, secret: str, servers: dict[str, dict[str, Any]]
) -> str | None:
    """Ask the model, call the tools of the servers, and end at an answer without calls.

    `servers` has the url and timeout of each MCP server. Returns an error, or None; a limit of turns or tokens ends the
    conversation without one.
    """
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    async with AsyncExitStack() as stack:
        tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
        headers = {"Authorization": f"Bearer {secret}"}
        while True:
            body = {"model": model, "messages": messages} | ({"tools": tools} if tools else {})
            response = await client.post(f"{url}/chat/completions", json=body, headers=headers)
            if response.status_code in (400, 409) and (trace.stop_condition or "context_length" in response.text):
                return None
            if response.status_code != 200:
                return f"the model's answer: {response.status_code} {response.text}"
            choice = response.json()["choices"][0]
            message = choice["message"]
            messages.append({name: value for name, value in message.items() if value is not None})
            if not message.get("tool_calls") or choice["finish_reason"] == "length":
                return None
            for call in message["tool_calls"]:
                name, text = call["function"]["name"], call["function"]["arguments"]
                content: Any = f"error: there is no tool {name!r}"
                if name in dispatch:
                    content = await call_mcp(connections, dispatch, name, json.loads(text or "{}"))
                messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})


def harness_module(vf: ModuleType) -> ModuleType:
    """A module as verifiers imports one, with the class ChatHarness. `vf` is verifiers.v1."""
    from verifiers.v1.dialects.chat import message_to_wire

    class ChatHarnessConfig(vf.HarnessConfig):
        """Settings of ChatHarness: those of every harness."""

    class ChatHarness(vf.Harness[ChatHarnessConfig]):
        """Leads the conversation in this process."""

        APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
        SUPPORTS_MCP: ClassVar[bool] = True
        SUPPORTS_RESUME: ClassVar[bool] = True
        EXECUTES_CODE: ClassVar[bool] = False
        NEEDS_CONTAINER: ClassVar[bool] = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
        ) -> Any:
            """Run one segment of the conversation."""
            system, prompt = self.resolve_prompt(data)
            messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or ()]
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            error = await lead(ctx.model, messages, trace, endpoint, secret, servers)
            return vf.ProgramResult(int(error is not None), "", error or "")

    module = ModuleType(HARNESS)
    module.__all__, module.ChatHarness = ["ChatHarness"], ChatHarness
    return module
