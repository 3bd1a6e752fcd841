"""The tool with which a model checks its answer to a GSM8K question."""

from typing import Any

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.reward.rules import gsm8k

_NO_PROGRESS = -0.05  # step reward of an answer that is no better than the one before


class Gsm8kTool(BaseTool):
    """Judges the argument `answer`; needs `create_kwargs.ground_truth`.

    The reward of an instance is that of its last answer: 1 or 0. The step reward is 0 for an answer that is better than
    the one before, else -0.05.
    """

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema | None):
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """A new instance for one question; ValueError without `ground_truth`."""
        if ground_truth is None:
            raise ValueError("ground_truth is missing; set extra_info.tools_kwargs.<tool>.create_kwargs.ground_truth")
        instance_id, response = await super().create(instance_id)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Judge `parameters["answer"]`, with or without a leading "####"."""
        state = self._instance_dict[instance_id]
        answer = str(parameters.get("answer", ""))
        state["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        before = state["reward"]
        state["reward"] = await self.calc_reward(instance_id)
        step = 0.0 if state["reward"] > before else _NO_PROGRESS
        return ToolResponse(text=f"Current parsed answer={answer!r} reward={state['reward']}"), step, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """1.0 if the last answer's final number is right, else 0.0."""
        state = self._instance_dict[instance_id]
        return gsm8k.compute_score(state["response"], state["ground_truth"], method="flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the instance."""
        self._instance_dict.pop(instance_id, None)
