"""The agent loop of one prompt and one answer."""

import functools
import time
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
        prompt_ids = self.check_prompt(list(ids))
        limit = self.rollout_config.response_length
        started = time.perf_counter()
        output = await self.server_manager.generate(
            kwargs.get("request_id") or str(id(self)),
            prompt_ids=prompt_ids,
            sampling_params={"max_tokens": limit, **sampling_params},
        )
        conversation = Conversation(prompt_ids)
        ids = output.token_ids[:limit]
        conversation.add_generated(ids, output.log_probs, output.weights_version, output.kept_tokens)
        metrics = AgentLoopMetrics(generate_sequences=time.perf_counter() - started)
        return output_of(conversation, 2, metrics, {"end_reason": END_REASONS.get(output.stop_reason, "stop")})
