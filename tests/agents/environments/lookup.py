"""An environment of verifiers with a tool, for tests: the model has to look a code up."""

import verifiers.v1 as vf

__all__ = ["LookupTaskset"]


class Codes(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "codes"

    @vf.tool
    def lookup(self, name: str) -> str:
        """Return the code of a name."""
        return f"code of {name}: {len(name)}"


class LookupData(vf.TaskData):
    answer: str


class LookupTask(vf.Task[LookupData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class LookupTaskset(vf.Taskset[LookupTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Codes(vf.SharedToolsetConfig())]

    def load(self):
        for name in ("ann", "robert", "kim", "alexander") * 3:
            yield LookupTask(LookupData(prompt=f"What is the code of {name}?", answer=str(len(name))))


if __name__ == "__main__":
    Codes.run()
