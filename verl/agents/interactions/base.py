"""The interface of an interaction: what answers the model's turns in words."""

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """A partner in a conversation: one object per process, with one instance (an id) per conversation.

    `start_interaction` gets the row's `extra_info.interaction_kwargs` without `name`; `finalize_interaction` is called
    at the end of the conversation, however it ends.
    """

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name") or "interaction_agent"

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Create an instance; returns its id, a new one without `instance_id`."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the conversation so far: (whether it ends here, text of the user's turn, score, extra values).

        `kwargs` are the row's `extra_info.interaction_kwargs` without `name`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method generate_response, which answers the model.")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the instance's state. Agent loops do not call it; `generate_response` may."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Free what the instance holds."""
