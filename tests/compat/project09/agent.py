"""An agent loop that asks once more after a tool of its own."""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.tools.tool_registry import load_all_tools


@register("count_then_answer")
class CountThenAnswer(AgentLoopBase):
    """Lets a function tool count the words of the question, appends its answer, and asks for the rest."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.rollout_config.response_length
        self.prompt_key = self.data_config.prompt_key
        multi_turn = self.rollout_config.multi_turn
        self.functions = {
            tool.name: tool for tool in load_all_tools(multi_turn.tool_config_path, multi_turn.function_tool_path)
        }

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs) -> AgentLoopOutput:
        assert self.prompt_key == "prompt"
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.apply_chat_template(messages)
        request_id = uuid4().hex
        first = await self.server_manager.generate(
            request_id, prompt_ids=prompt_ids, sampling_params={**sampling_params, "max_tokens": 2}, image_data=None,
            video_data=None, audio_data=None, mm_processor_kwargs=None, priority=priority,
        )  # fmt: skip
        assert first.num_preempted in (None, 0) and first.extra_fields == {}
        counted = await self.functions["count_words"].call({"text": messages[-1]["content"]})
        tool_ids = self.tokenizer.encode(str(counted), add_special_tokens=False)
        room = self.response_length - len(first.token_ids) - len(tool_ids)
        second = await self.server_manager.generate(
            request_id, prompt_ids=prompt_ids + first.token_ids + tool_ids,
            sampling_params={**sampling_params, "max_tokens": max(1, room)}, priority=priority + 1,
        )  # fmt: skip
        response_ids = first.token_ids + tool_ids + second.token_ids
        response_mask = [1] * len(first.token_ids) + [0] * len(tool_ids) + [1] * len(second.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids[: self.response_length],
            response_mask=response_mask[: self.response_length],
            num_turns=4,
            metrics=AgentLoopMetrics(),
            extra_fields={"counted": counted},
        )
