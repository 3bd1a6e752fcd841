"""The agent loop of one prompt and one answer."""

import functools
from typing import Any

from verl.agents.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, output_of
from verl.agents.agent_loop.registry import register
from verl.agents.conversation import Conversation
from verl.agents.rollout_trace import rollout_trace_op
from verl.agents.tools.tool_registry import schemas_of_files

schemas_of = functools.cache(schemas_of_files)
#: By the server's reason.
END_REASONS = {"completed": "stop", "length": "length", "aborted": "cancelled"}


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Answers the prompt once, as rollout.mode=sync does: the same prompt ids, and the same samples."""

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids = kwargs.get("raw_prompt_ids")
        if ids is None:  # a dataset class of the user's
            tools = schemas_of(self.config.data.tool_config_path, self.config.data.function_tool_path)
            ids = self.encoder.prompt(list(kwargs["raw_prompt"]), tools)
        conversation = Conversation(self.check_prompt(list(ids)))
        request_id = kwargs.get("request_id") or str(id(self))
        output, seconds = await self.generate_turn(request_id, conversation, sampling_params)
        metrics = AgentLoopMetrics(generate_sequences=seconds)
        return output_of(conversation, 2, metrics, end_reason=END_REASONS.get(output.stop_reason, "stop"))
