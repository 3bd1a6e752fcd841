"""Tools from yaml files: what is built, and one message for what is wrong; the GSM8K tool's rewards by hand."""

import json

import pytest

from tests.agents.tools.helpers import Counter, schema
from verl.agents.tools.code_tool import CodeTool
from verl.agents.tools.gsm8k_tool import Gsm8kTool
from verl.agents.tools.journal import ToolJournal
from verl.agents.tools.runner import ToolRunner
from verl.agents.tools.tool_registry import ToolType, get_tool_class, initialize_tools_from_config, schemas_of_files

GOOD = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native, note: "${oc.env:TOOL_NOTE}"}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: Judges an answer.
        parameters:
          type: object
          properties: {answer: {type: string, description: The answer.}}
          required: [answer]
  - class_name: verl.tools.code_tool.CodeTool
  - class_name: tests.agents.tools.helpers.Counter
"""


def test_a_file_with_schemas_given_and_brought_along(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOL_NOTE", "resolved")
    file = tmp_path / "tools.yaml"
    file.write_text(GOOD)
    tools = initialize_tools_from_config(str(file))
    assert [(type(tool), tool.name) for tool in tools] == [
        (Gsm8kTool, "calc_gsm8k_reward"), (CodeTool, "code_interpreter"), (Counter, "counter")
    ]  # fmt: skip
    assert tools[0].config == {"type": "native", "note": "resolved"}
    assert tools[0].tool_schema.function.parameters.required == ["answer"]
    assert get_tool_class("verl.tools.code_tool.CodeTool") is CodeTool
    assert [kind.value for kind in ToolType] == ["native", "mcp"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("tools: [", "no readable yaml"),
        ("tool: []", "the key 'tools' is missing or no list"),
        ("tools: [3]", r"tools\[0\]: expected a mapping with a class_name"),
        ("tools: [{class_name: a.B, config: 3}]", r"tools\[0\]: config is a int, not a mapping"),
        ("tools: [{class_name: Tool}]", r"tools\[0\] \(Tool\): tool class 'Tool' must be a full dotted name"),
        ("tools: [{class_name: verl.tools.code_tool.Tool}]", r"tools\[0\] .*has no 'Tool'"),
        ("tools: [{class_name: builtins.dict}]", r"tools\[0\] .*no subclass of verl.agents.*base_tool.BaseTool"),
        ("tools: [{class_name: verl.tools.code_tool.CodeTool, config: {type: x}}]", "type='x' is unknown. Known: nat"),
        ("tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool}]", "Gsm8kTool has no schema of its own"),
        ("tools: [{class_name: verl.tools.search_tool.SearchTool}]", "retrieval_service_url is empty"),
        ("tools: [{class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool}]", "sandbox_fusion_url is empty"),
        ("tools: [{class_name: verl.tools.code_tool.CodeTool, tool_schema: {type: function}}]",
         r"tools\[0\] .*: function: Field required"),
        ("tools: [{class_name: verl.tools.code_tool.CodeTool}, {class_name: verl.tools.code_tool.CodeTool}]",
         "two tools have the name 'code_interpreter'"),
        ("tools: [{class_name: verl.tools.mcp_base_tool.MCPBaseTool, config: {type: mcp}}]",
         r"tools\[0\] .*needs mcp.mcp_servers_config_path"),
        ("tools: [{class_name: verl.tools.mcp_base_tool.MCPBaseTool, mcp: {a: b}}]", "mcp needs config.type=mcp"),
    ],
)  # fmt: skip
def test_a_broken_file_ends_in_one_message_with_file_and_entry(tmp_path, text, message):
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        initialize_tools_from_config(str(file))
    assert str(raised.value).startswith(str(file))


@pytest.mark.parametrize(
    ("tool", "wrong", "advice", "right"),
    [
        ("code_tool.CodeTool", "seconds: -1", "config.seconds=-1.0 is too small; use a value above 0", "seconds: 1"),
        ("code_tool.CodeTool", "second: 1", "config.second is unknown; did you mean 'seconds'", "seconds: 1"),
        ("sandbox_fusion_tools.SandboxFusionTool", "num_workers: 0", "num_workers=0 is too small", "num_workers: 1"),
    ],
)
def test_the_advice_about_a_tools_settings_helps(tmp_path, tool, wrong, advice, right):
    def load(setting):
        config = f"{{sandbox_fusion_url: http://a, {setting}}}" if "Fusion" in tool else f"{{{setting}}}"
        (tmp_path / "tools.yaml").write_text(f"tools: [{{class_name: verl.tools.{tool}, config: {config}}}]")
        return initialize_tools_from_config(str(tmp_path / "tools.yaml"))

    with pytest.raises(ValueError, match=advice):
        load(wrong)
    assert len(load(right)) == 1


def test_an_absent_file_and_broken_mcp_servers(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file 'absent.yaml' that lists the tools"):
        initialize_tools_from_config("absent.yaml")
    for content, message in (
        (None, "there is no file"), ("{", "expected JSON with"), ("{}", "expected JSON with"),
        (json.dumps({"mcpServers": {"a": {}}}), "mcpServers.a: expected an object with url or"),
    ):  # fmt: skip
        servers = tmp_path / f"servers{len(content or '')}.json"
        if content is not None:
            servers.write_text(content)
        file = tmp_path / "tools.yaml"
        file.write_text(
            "tools: [{class_name: verl.tools.mcp_base_tool.MCPBaseTool, config: {type: mcp}, "
            f"mcp: {{mcp_servers_config_path: {servers}}}}}]"
        )
        with pytest.raises(ValueError, match=rf"tools\[0\].*{message}"):
            initialize_tools_from_config(str(file))


def test_a_tool_of_mcp_servers_without_them_is_refused_when_it_is_loaded(tmp_path):
    file = tmp_path / "tools.yaml"
    for config in ("{}", "{type: native}"):
        file.write_text(f"tools: [{{class_name: verl.tools.mcp_base_tool.MCPBaseTool, config: {config}}}]")
        with pytest.raises(ValueError, match=r"tools\[0\].* needs config.type=mcp, .* mcp.mcp_servers_config_path"):
            initialize_tools_from_config(str(file))


def test_functions_of_a_python_file_follow_the_tools_of_a_yaml_file(tmp_path):
    listed, functions = tmp_path / "tools.yaml", tmp_path / "functions.py"
    listed.write_text("tools: [{class_name: verl.tools.code_tool.CodeTool}]")
    functions.write_text('def double(number: int) -> int:\n    """Doubles."""\n    return 2 * number\n')
    both = initialize_tools_from_config(str(listed), str(functions))
    assert [tool.name for tool in both] == ["code_interpreter", "double"]
    assert [schema["function"]["name"] for schema in schemas_of_files(None, str(functions))] == ["double"]
    assert schemas_of_files(None, None) == []
    journal = ToolJournal(tmp_path, both).identity
    functions.write_text(functions.read_text().replace("2 *", "3 *"))
    assert ToolJournal(tmp_path, both).identity != journal  # the calls of a changed function are made again


async def test_rewards_of_three_answers_and_nothing_is_left():
    judge = Gsm8kTool({}, schema("judge", {"answer": {"type": "string"}}, ["answer"]))
    runner = ToolRunner([judge])
    async with runner.conversation({"judge": {"create_kwargs": {"ground_truth": "72"}}}) as tools:
        steps = [await tools.call("judge", {"answer": a}) for a in ("71", "#### 72", "72")]
        rewards = await tools.calc_rewards()
    assert [(step.reward, step.response.text) for step in steps] == [
        (-0.05, "Current parsed answer='71' reward=0.0"), (0.0, "Current parsed answer='#### 72' reward=1.0"),
        (-0.05, "Current parsed answer='72' reward=1.0"),
    ]  # fmt: skip
    assert rewards == {"judge": 1.0} and judge._instance_dict == {}
    with pytest.raises(ValueError, match="create_kwargs.ground_truth"):
        await judge.create()
