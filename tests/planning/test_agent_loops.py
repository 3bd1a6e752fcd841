"""What the dry run says of agent loops, tools and interactions."""

import json
from types import SimpleNamespace

import pytest

from tests.agents.agent_loop.parts import AddTool, listed
from tests.agents.agent_loop.test_tool_agent_loop import PARTS, TEMPLATE, WORDS
from tests.helpers.chat_templates import FORMATS, byte_tokenizer
from tests.helpers.configs import SOUND, compose_ppo
from tests.helpers.models import make_tokenizer
from verl.config.compose import to_settings
from verl.config.ppo import PPOConfig
from verl.planning.checks import Findings
from verl.planning.rollouts import check_agent_loops
from verl.utils.problems import wrong

ROLLOUT = "actor_rollout_ref.rollout"
SERVED = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.mode=async", f"{ROLLOUT}.agent.default_agent_loop=tool_agent")
FUNCTION = 'def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b + missing\n'


def problems(*overrides, template=TEMPLATE, rows=(), tokenizer=None):
    tokenizer = tokenizer or make_tokenizer(WORDS)
    tokenizer.chat_template = template
    dataset = SimpleNamespace(rows=list(rows), error=lambda i, what: f"row {i}: {what}")
    findings = Findings(datasets={"data.train_files": dataset}, tokenizer=tokenizer)
    reported = list(check_agent_loops(to_settings(compose_ppo(*SOUND, *overrides), PPOConfig), findings))
    return [(problem.key.removeprefix(f"{ROLLOUT}."), problem.message) for problem in reported]


@pytest.fixture
def tools(tmp_path):
    """A function that writes a file of one AddTool with this config; the override that names it."""
    return lambda **config: f"{ROLLOUT}.multi_turn.tool_config_path={listed(tmp_path, 'tools', 'AddTool', **config)}"


SUM = {"example_arguments": {"a": 1, "b": 2}}


def test_a_tool_answers_its_example_with_the_kwargs_of_the_example(tools):
    unused = "the chat template leaves out the schemas of the tools"
    ((_, message),) = problems(*SERVED, tools(**SUM))
    assert unused in message
    raising = {**SUM, "example_kwargs": {"execute_kwargs": {"raises": True}}}
    ((key, message),) = problems(*SERVED, tools(**raising))
    assert key == "multi_turn.tool_config_path"
    assert "the call of example_arguments failed: Error: 'add' raised ZeroDivisionError: no." in message
    ((_, message),) = problems(*SERVED, tools(example_arguments={"a": 1}))
    assert "the arguments of 'add' do not fit its schema: arguments: 'b' is a required property." in message


class UngradedTool(AddTool):
    """AddTool without a reward."""

    async def calc_reward(self, instance_id, **kwargs):
        raise LookupError("no reward")


def test_the_reward_of_a_tool_is_computed_after_its_example(tools, tmp_path):
    findings = Findings()
    config = to_settings(compose_ppo(*SOUND, *SERVED, tools(**SUM)), PPOConfig)
    assert list(check_agent_loops(config, findings)) == []
    assert findings.tools == {"add": "answers '3' to its example_arguments"}
    ungraded = {"class_name": f"{__name__}.UngradedTool", "config": SUM}
    (tmp_path / "ungraded.yaml").write_text(json.dumps({"tools": [ungraded]}))
    ((key, message),) = problems(*SERVED, f"{ROLLOUT}.multi_turn.tool_config_path={tmp_path}/ungraded.yaml")
    assert key == "multi_turn.tool_config_path" and "calc_reward failed after the call of example_arguments" in message


@pytest.mark.parametrize(("kwargs", "what"), [
    ({"subtract": {}}, "names the tool 'subtract'; loaded are: add"),
    ({"add": {"kwargs": {}}}, "add has 'kwargs'; known are: create_kwargs, "), ("{}", "is '{}', not a dict"),
])  # fmt: skip
def test_rows_name_tools_that_exist(tools, kwargs, what):
    rows = [{"extra_info": {"tools_kwargs": given}} for given in ({"add": {"create_kwargs": {}}}, None, kwargs)]
    (key, message), = (found for found in problems(*SERVED, tools(), rows=rows) if "tools_kwargs" in found[1])
    assert key == "data.train_files" and "row 2: extra_info.tools_kwargs" in message and what in message
    assert not any("tools_kwargs" in message for _, message in problems(*SERVED, tools(), rows=rows[:2]))


@pytest.mark.parametrize(("model", "parser", "other"), [
    ("qwen2.5", "hermes", "llama3_json"), ("qwen3", "hermes", "qwen3_coder"), ("llama3.1", "llama3_json", "hermes"),
    ("mistral v7", "mistral", "hermes"),
])  # fmt: skip
def test_the_parser_reads_calls_as_the_chat_template_writes_them(tools, model, parser, other):
    overrides = (*SERVED, tools(), f"{ROLLOUT}.multi_turn.format=")
    given = {"template": "{{ tools }}" + FORMATS[model].template, "tokenizer": byte_tokenizer(FORMATS[model])}
    assert problems(*overrides[:-1], overrides[-1] + parser, **given) == []
    ((key, message),) = problems(*overrides[:-1], overrides[-1] + other, **given)
    assert key == "multi_turn.format" and f"{other} finds no call in what the chat template writes for one" in message


def test_an_example_has_the_limits_of_the_training(tools):
    hanging = tools(**SUM, example_kwargs={"execute_kwargs": {"hangs": True}})
    ((_, message),) = problems(*SERVED, hanging, f"{ROLLOUT}.multi_turn.tool_timeout=0.2")
    assert "gave no answer in time (took longer than 0.2 s)" in message
    ((_, message),) = problems(*SERVED, hanging, f"{ROLLOUT}.multi_turn.tool_timeout=0.2",
                               f"{ROLLOUT}.multi_turn.max_tool_response_length=20")  # fmt: skip
    assert "...(truncated)..." in message


def test_an_error_of_a_tool_file_is_reported_once(tmp_path):
    path = f"{ROLLOUT}.multi_turn.tool_config_path"
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{"class_name": "absent.Tool", "config": {}}]}))
    error = f"{tmp_path}/tools.yaml, tools[0] (absent.Tool): tool class 'absent.Tool': module 'absent' cannot be "
    error += "imported: No module named 'absent'"
    findings = Findings(problems=[wrong("data.train_files", f"data.train_files: {error}")])
    config = to_settings(compose_ppo(*SOUND, *SERVED, f"{path}={tmp_path}/tools.yaml"), PPOConfig)
    ((key, message),) = [(p.key, p.message) for p in check_agent_loops(config, findings)]
    assert key == path and error in message and not findings.problems


def test_a_function_has_its_example_in_an_attribute(tmp_path):
    (tmp_path / "f.py").write_text(f"{FUNCTION}\n\nadd.example_arguments = {{'a': 1, 'b': 2}}\n")
    ((key, message),) = problems(*SERVED, f"{ROLLOUT}.multi_turn.function_tool_path={tmp_path}/f.py")
    assert key == "multi_turn.function_tool_path" and "NameError: name 'missing' is not defined" in message


def test_a_template_without_messages_of_tools_is_named(tools):
    template = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}")
    ((key, message),) = problems(*SERVED, tools(), template=template)
    assert key == "actor_rollout_ref.model.path" and "tool" in message


def test_the_program_of_a_command_exists(tmp_path):
    key, served = f"{ROLLOUT}.agent.command", SERVED[:2]
    (tmp_path / "agent.py").touch()
    assert problems(*served, f"{key}='python {tmp_path}/agent.py x'") == []
    for command, missing in (("pythonic a.py", "pythonic"), (f"python {tmp_path}/a.py", f"{tmp_path}/a.py")):
        ((name, message),) = problems(*served, f"{key}='{command}'")
        assert name == "agent.command" and f"{missing} does not exist." in message
    ((name, message),) = problems(f"{key}='python {tmp_path}/agent.py'")
    assert name == "agent.command" and "needs conversations with a server" in message


def test_names_of_loops(tmp_path, tools):
    default = f"{ROLLOUT}.agent.default_agent_loop"
    ((key, message),) = problems(*SERVED, f"{default}=nobody")
    assert key == "agent.default_agent_loop"
    assert message.startswith(f"{default}=nobody is unknown. Known: ") and "single_turn_agent, tool_agent" in message
    (tmp_path / "loops.yaml").write_text(json.dumps([{"name": "nobody", "_target_": f"{PARTS}.SilentLoop"}]))
    path = f"{ROLLOUT}.agent.agent_loop_config_path"
    assert problems(*SERVED, f"{default}=nobody", f"{path}={tmp_path}/loops.yaml") == []
    ((key, message), _) = problems(*SERVED, f"{default}=nobody", f"{path}={tmp_path}/absent.yaml")[::-1]
    assert key == "agent.agent_loop_config_path" and "absent.yaml' is no file in" in message
    (tmp_path / "half.yaml").write_text(json.dumps([{"name": "a", "_target_": "b.C"}, {"name": "nobody"}]))
    ((key, message), _) = problems(*SERVED, f"{default}=nobody", f"{path}={tmp_path}/half.yaml")[::-1]
    assert key == "agent.agent_loop_config_path" and "entry 2: {'name': 'nobody'} lacks name or _target_" in message


def test_tools_need_a_loop_that_uses_them_and_a_server(tools):
    single = f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent"
    rows = [{"prompt": []}]
    assert [m for _, m in problems(*SERVED[:2], single, tools(), rows=rows)][-1].endswith("Set " + ROLLOUT
           + ".agent.default_agent_loop=tool_agent.")  # fmt: skip
    reported = problems(*SERVED[:2], single, tools(), rows=[{"agent_name": "tool_agent"}])
    assert not any("uses neither tools nor interactions" in message for _, message in reported)
    ((key, message),) = problems(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.mode=sync", tools())
    assert key == "multi_turn.tool_config_path" and "needs conversations with a server: set" in message


def test_upstream_s_rows_of_one_turn_under_multi_turn_name_the_loop_to_set(tools):
    """Rows as upstream's gsm8k.py writes them, with and without the arguments of tools: none has agent_name."""
    plain = {
        "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1 + 2 = ?"}], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0, "answer": "#### 3", "question": "1 + 2 = ?"},
    }  # fmt: skip
    create = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "3"}}}
    with_tools = plain | {"extra_info": plain["extra_info"] | {"need_tools_kwargs": True, "tools_kwargs": create}}
    served = (*SERVED[:2], f"{ROLLOUT}.multi_turn.enable=true", tools())
    for row in (plain, with_tools, with_tools | {"agent_name": None}):
        key, message = problems(*served, rows=[row])[-1]
        assert key == "agent.default_agent_loop" and "no row has a value in column agent_name. Set " in message
        assert message.endswith(f"{SERVED[2]}.")
        named = row | {"agent_name": "tool_agent"}
        for advised in (problems(*served, SERVED[2], rows=[row]), problems(*served, rows=[row, named])):
            assert not any("agent_name" in message for _, message in advised)
    assert problems(*served[:3], rows=[plain]) == []  # no tools: one turn is what such a run is to train


def test_an_unknown_loop_in_the_data_is_named_with_its_row():
    rows = [{"agent_name": "tool_agent"}, {"agent_name": None}, {"agent_name": "chekc"}]
    ((key, message),) = problems(*SERVED, rows=rows)
    assert key == "data.train_files"
    assert message.startswith("data.train_files: row 2: agent_name='chekc' is unknown. Known: ")
