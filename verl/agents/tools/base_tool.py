"""The interface of a tool."""

from abc import ABC, abstractmethod
from typing import Any
from uuid import uuid4

from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

#: Settings of a tool for the dry run: the arguments of a call, and its extra_info.tools_kwargs.
EXAMPLES = ("example_arguments", "example_kwargs")


class BaseTool(ABC):
    """A tool: one object per process, with one instance (an id, with state if it keeps any) per conversation.

    Life of an instance: `create` before the first call, `execute` for each call, `calc_reward` and `release` at the
    end of the conversation. Keyword arguments are those of the row: `extra_info.tools_kwargs[name]`, a dict with
    `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs` and `release_kwargs`, each for the method of its name.

    The methods share one event loop with all conversations of the process: code that blocks belongs into
    `verl.utils.threads.in_thread`.
    """

    #: Whether several calls of one conversation may run at the same time; false makes them wait for each other.
    parallel_calls: bool = False
    #: The schema of a tool that is configured without one.
    default_schema: OpenAIFunctionToolSchema | None = None

    @property
    def replayable(self) -> bool:
        """Whether a run that was killed and started again may take an answer from its journal instead of `execute`.

        By default where the tool has no reward of an instance's state: it may then keep no state between calls. A
        subclass sets it as a class attribute.
        """
        return type(self).calc_reward is BaseTool.calc_reward

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema | None):
        self.config = config
        self.source: Any = type(self)  # whose file is the tool's code, for the journal of calls
        self.tool_schema = tool_schema
        self.tool_schema = self.get_openai_tool_schema() if tool_schema is None else tool_schema
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no schema of its own: give it a tool_schema")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The schema that was given, else `default_schema`."""
        return self.tool_schema or self.default_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create an instance; returns its id, a new one without `instance_id`, and a response."""
        return instance_id or str(uuid4()), ToolResponse()

    @abstractmethod
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Answer one call, whose `parameters` fit the schema: (response, step reward, metrics).

        The model reads an exception as the result; it gives no step reward.
        """

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the instance's state at the end of the conversation."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:  # noqa: B027
        """Free what the instance holds. Also called after a `create` that failed, with the id that it was given."""
