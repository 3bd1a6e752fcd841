"""An environment of verifiers with up to two turns: the model sorts three numbers, and may correct itself once.

    python -m examples.environments.learn_sorted_numbers MODEL [key=value ...]

trains in it. Needs the package: pip install -e .[verifiers]. The rewards below, by their weights, are the score.
"""

import random
from difflib import SequenceMatcher

import verifiers.v1 as vf

__all__ = ["SortedEnv", "SortedTaskset"]

SYSTEM, QUESTION = "Reply with the answer only.", "Sort these numbers in ascending order: "
EXAMPLES = ("41 7 83", "29 95 62")  # solved before each question


def solve(numbers: str) -> str:
    """The numbers in ascending order."""
    return " ".join(sorted(numbers.split(), key=int))


class SortedData(vf.TaskData):
    """A row: `answer` are the numbers in ascending order."""

    answer: str


class SortedTask(vf.Task[SortedData]):
    """Scores the last answer of the conversation."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """Whether the answer is exact."""
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.2)
    async def similar(self, trace: vf.Trace) -> float:
        """How similar the answer is, from 0 to 1."""
        return SequenceMatcher(None, trace.last_reply, self.data.answer).ratio()


class SortedTaskset(vf.Taskset[SortedTask, vf.TasksetConfig]):
    """Three numbers from 1 to 99, always the same questions in the same order."""

    INFINITE = True

    def load(self):
        """Tasks without an end, each of which has other numbers."""
        draw, asked = random.Random(0), {solve(numbers) for numbers in EXAMPLES}
        texts = [text for numbers in EXAMPLES for text in (QUESTION + numbers, solve(numbers))]
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        while True:
            numbers = " ".join(map(str, draw.sample(range(1, 100), 3)))
            answer = solve(numbers)
            if answer not in asked:
                asked.add(answer)
                prompt = [*turns, {"role": "user", "content": QUESTION + numbers}]
                yield SortedTask(SortedData(prompt=prompt, system_prompt=SYSTEM, answer=answer))


class SortedEnv(vf.Env[vf.SingleAgentEnvConfig]):
    """Asks once more after a wrong answer, if data.environment.max_turns allows for it."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Lead the conversation."""
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated and segment.last_reply != task.data.answer:
                await interaction.turn("That is not right. Try once more, with the numbers only.")
