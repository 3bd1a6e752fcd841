"""verl's import paths of agent loops, tools, interactions and samplers name the same objects."""

import importlib

import pytest

from verl.utils.import_utils import load_class_from_fqn

NEW = "verl.workers.rollout"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("verl.tools.gsm8k_tool.Gsm8kTool", f"{NEW}.tools.gsm8k_tool.Gsm8kTool"),
        ("verl.tools.code_tool.CodeTool", f"{NEW}.tools.code_tool.CodeTool"),
        ("verl.tools.schemas.ToolResponse", f"{NEW}.tools.schemas.ToolResponse"),
        ("verl.tools.utils.tool_registry.get_tool_class", f"{NEW}.tools.tool_registry.get_tool_class"),
        ("verl.interactions.base.BaseInteraction", f"{NEW}.interactions.base.BaseInteraction"),
        ("verl.interactions.utils.interaction_registry.get_interaction_class",
         f"{NEW}.interactions.interaction_registry.get_interaction_class"),
        ("verl.experimental.agent_loop.AgentLoopManager", f"{NEW}.agent_loop.AgentLoopManager"),
        ("verl.experimental.agent_loop.agent_loop.AgentLoopOutput", f"{NEW}.agent_loop.base.AgentLoopOutput"),
        ("verl.experimental.agent_loop.agent_loop.register", f"{NEW}.agent_loop.registry.register"),
        ("verl.experimental.agent_loop.agent_loop._agent_loop_registry",
         f"{NEW}.agent_loop.registry._agent_loop_registry"),
        ("verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop", f"{NEW}.agent_loop.ToolAgentLoop"),
        ("verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop",
         f"{NEW}.agent_loop.SingleTurnAgentLoop"),
        ("verl.experimental.agent_loop.tool_parser.ToolParser", f"{NEW}.agent_loop.tool_parser.ToolParser"),
        ("verl.experimental.agent_loop.utils.resolve_config_path", f"{NEW}.agent_loop.registry.resolve_config_path"),
        ("verl.experimental.dataset.sampler.AbstractSampler", "verl.data.sampler.AbstractSampler"),
        ("verl.experimental.dynamic_dataset.dynamicgen_dataset.DynamicGenDataset",
         "verl.data.dynamicgen_dataset.DynamicGenDataset"),
    ],
)  # fmt: skip
def test_a_path_of_verl_names_the_same_object(old, new):
    modules = [importlib.import_module(name.rpartition(".")[0]) for name in (old, new)]
    first, second = (getattr(module, new.rpartition(".")[2]) for module in modules)
    assert first is second
    if isinstance(first, type):
        assert load_class_from_fqn(old, "class") is first
