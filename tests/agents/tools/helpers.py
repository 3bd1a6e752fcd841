"""Tools whose every call is known."""

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


def schema(name, properties=None, required=()):
    parameters = {"type": "object", "properties": properties or {}, "required": list(required)}
    function = {"name": name, "description": f"The tool {name}.", "parameters": parameters}
    return OpenAIFunctionToolSchema(type="function", function=function)


class Counter(BaseTool):
    """Adds `by` to the total of its instance; notes each call with its keyword arguments."""

    def __init__(self, config=None, tool_schema=None):
        super().__init__(config or {}, tool_schema or schema("counter", {"by": {"type": "integer"}}, ["by"]))
        self.log, self.totals = [], {}

    async def create(self, instance_id=None, start=0, **kwargs):
        instance_id, response = await super().create(instance_id)
        self.log.append(("create", {"start": start, **kwargs}))
        self.totals[instance_id] = start
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        self.log.append(("execute", kwargs))
        self.totals[instance_id] += parameters["by"]
        return ToolResponse(text=f"total {self.totals[instance_id]}"), 0.5, {"by": parameters["by"]}

    async def calc_reward(self, instance_id, **kwargs):
        self.log.append(("calc_reward", kwargs))
        return self.totals[instance_id]

    async def release(self, instance_id, **kwargs):
        self.log.append(("release", kwargs))
        del self.totals[instance_id]


class Acts(Counter):
    """Counter whose method `config["at"]` does what the coroutine function `config["what"]` does."""

    def __init__(self, at, what, name="counter"):
        super().__init__({"at": at, "what": what}, schema(name))

    async def _maybe(self, at):
        if self.config["at"] == at:
            return await self.config["what"]()

    async def create(self, instance_id=None, **kwargs):
        await self._maybe("create")
        return await super().create(instance_id, **kwargs)

    async def execute(self, instance_id, parameters, **kwargs):
        answer = await self._maybe("execute")
        self.log.append(("execute", kwargs))
        return answer or (ToolResponse(text="done"), 0.0, {})

    async def calc_reward(self, instance_id, **kwargs):
        answer = await self._maybe("calc_reward")
        return 1.0 if answer is None else answer

    async def release(self, instance_id, **kwargs):
        await self._maybe("release")
        await super().release(instance_id, **kwargs)
