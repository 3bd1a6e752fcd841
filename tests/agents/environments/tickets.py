"""An environment of verifiers for tests: the answer is the number of the ticket."""

import verifiers.v1 as vf

__all__ = ["TicketTaskset"]


class TicketData(vf.TaskData):
    answer: str


class TicketTask(vf.Task[TicketData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "13":
            raise ValueError("no ticket has the number 13")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class TicketTaskset(vf.Taskset[TicketTask, vf.TasksetConfig]):
    def load(self):
        for i in range(10, 60):
            yield TicketTask(TicketData(prompt=f"Ticket {i}?", system_prompt="Give the number.", answer=str(i)))
