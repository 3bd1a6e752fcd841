"""The interaction that tells a model whether its answer to a GSM8K question is right."""

from typing import Any

from verl.agents.interactions.base import BaseInteraction
from verl.reward.rules import gsm8k


class Gsm8kInteraction(BaseInteraction):
    """Judges the last assistant message by the number after "####"; needs `interaction_kwargs.ground_truth`.

    A right answer ends the conversation. The score of a turn is 1.0 or 0.0.
    """

    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        """A new instance for one question; ValueError without `ground_truth`."""
        if ground_truth is None:
            raise ValueError("ground_truth is missing; set extra_info.interaction_kwargs.ground_truth")
        instance_id = await super().start_interaction(instance_id)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(right, a sentence that says so, 1.0 or 0.0, {})."""
        state = self._instance_dict[instance_id]
        last = next((m.get("content") for m in reversed(messages) if m.get("role") == "assistant"), "")
        if isinstance(last, list):  # parts of text and media
            last = "".join(part.get("text") or "" for part in last)
        state["response"] = last or ""
        state["reward"] = score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "Your response is correct!", score, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """1.0 if the last response's number after "####" is right, else 0.0."""
        state = self._instance_dict[instance_id]
        return gsm8k.compute_score(state["response"], state["ground_truth"], method="strict")

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the instance; KeyError for an unknown one."""
        del self._instance_dict[instance_id]
