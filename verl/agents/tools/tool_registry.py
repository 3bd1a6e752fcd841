"""Creates the tools that a yaml file lists."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

from verl.agents.entries_file import each_entry
from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.function_tool import load_function_tools
from verl.agents.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.import_utils import load_class_from_fqn


class ToolType(Enum):
    """`config.type` of an entry: a tool of this process, or the tools of MCP servers."""

    NATIVE = "native"
    MCP = "mcp"


async def initialize_mcp_tool(tool_cls: type, tool_config: dict[str, Any]) -> list[BaseTool]:
    """One tool for each function that the servers of an MCP entry offer, or for those in `mcp.tool_selected_list`."""
    from verl.agents.tools.mcp_servers import read_servers

    mcp = tool_config.get("mcp") or {}
    if not mcp.get("mcp_servers_config_path"):
        raise ValueError("an entry of type mcp needs mcp.mcp_servers_config_path, a JSON file with mcpServers")
    servers = read_servers(mcp["mcp_servers_config_path"])
    offered = [(server, schema) for server in servers for schema in await server.list_tools()]
    known = [schema.function.name for _, schema in offered]
    selected = known if mcp.get("tool_selected_list") is None else mcp["tool_selected_list"]
    if absent := [name for name in selected if name not in known]:
        raise ValueError(f"mcp.tool_selected_list has {absent[0]!r}, which no server offers. Known: {', '.join(known)}")
    tools = []
    for server, schema in offered:
        if schema.function.name in selected:
            tool = tool_cls(tool_config.get("config") or {}, schema)
            tool.server = server
            tools.append(tool)
    return tools


def get_tool_class(cls_name: str) -> type:
    """The class for a dotted name such as `package.module.Class`."""
    return load_class_from_fqn(cls_name, "tool class")


def initialize_tools_from_config(
    tools_config_file: str | None, function_tool_path: str | None = None
) -> list[BaseTool]:
    """The tools of a yaml file with the list `tools`: {class_name, config: {type, ...}, tool_schema, mcp}.

    `config.type` is native (the default) or mcp. An entry without `tool_schema` takes the schema that its class brings.
    The public functions of the Python file `function_tool_path` follow.

    FileNotFoundError, or a ValueError that names file and entry.
    """
    entries = each_entry(tools_config_file, "tools", _tools_of) if tools_config_file else []
    tools = [tool for some in entries for tool in some]
    if function_tool_path:
        tools += load_function_tools(function_tool_path)
    names = [tool.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        where = " and ".join(filter(None, (tools_config_file, function_tool_path)))
        raise ValueError(f"{where}: two tools have the name {twice.pop()!r}; rename one (its tool_schema or function)")
    return tools


def _tools_of(entry: dict[str, Any]) -> list[BaseTool]:
    cls = get_tool_class(entry["class_name"])
    config = entry.get("config") or {}
    if not (isinstance(cls, type) and issubclass(cls, BaseTool)):
        raise TypeError("the class is no subclass of verl.agents.tools.base_tool.BaseTool")
    kind = config.get("type") or ToolType.NATIVE.value
    if kind not in [known.value for known in ToolType]:
        raise ValueError(f"config.type={kind!r} is unknown. Known: {', '.join(t.value for t in ToolType)}.")
    if entry.get("mcp") and kind != ToolType.MCP.value:
        raise ValueError("an entry with mcp needs config.type=mcp")
    if kind == ToolType.MCP.value:
        with ThreadPoolExecutor(1) as thread:  # this one may be running an event loop
            return thread.submit(asyncio.run, initialize_mcp_tool(cls, entry)).result()
    schema = entry.get("tool_schema")
    return [cls(config, None if schema is None else OpenAIFunctionToolSchema(**schema))]


def tool_schemas(tools: Iterable[BaseTool]) -> list[dict[str, Any]]:
    """The schemas of tools, as a chat template gets them."""
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]


def schemas_of_files(tools_config_file: str | None, function_tool_path: str | None) -> list[dict[str, Any]]:
    """The schemas of the tools that a yaml file lists and a Python file defines."""
    return tool_schemas(initialize_tools_from_config(tools_config_file, function_tool_path))
