"""Samples on their way from the data to an update."""

import json
from dataclasses import dataclass, field
from typing import Any

from verl.agents.agent_loop.base import AgentLoopOutput
from verl.protocol import DataProto
from verl.reward.pool import Failure
from verl.trainer.fully_async import journal
from verl.trainer.run.samples import json_value

UNGRADED = object()
ENDED = (journal.QUEUED, journal.FAILED)
SAVED_AS_IS = ("id", "seed", "state", "started_at", "seconds")


@dataclass(eq=False)
class Sample:
    """One conversation: its seed, state, and what is known of it.

    `started_at` is the version that servers held when it began, None before. `spans` are (weights version, tokens) of
    what was generated, in order; `result` is what the reward function returned, UNGRADED before.
    """

    id: str
    seed: int
    state: str = journal.DRAWN
    started_at: int | None = None
    output: AgentLoopOutput | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    result: Any = UNGRADED
    seconds: float = 0.0  # from start to grade

    def restart(self) -> None:
        """Forget what was generated."""
        self.output, self.spans, self.result, self.started_at = None, [], UNGRADED, None

    def saved(self) -> dict[str, Any]:
        """As JSON."""
        result = None if self.result is UNGRADED else [self.result]  # a list: the result itself may be None
        if isinstance(self.result, Failure):
            result = {"kind": self.result.kind, "text": self.result.text, "fatal": self.result.fatal}
        return {
            **{name: getattr(self, name) for name in SAVED_AS_IS}, "result": result,
            "spans": [list(span) for span in self.spans], "output": self.output and self.output.model_dump(),
        }  # fmt: skip

    @classmethod
    def load(cls, saved: dict[str, Any]) -> "Sample":
        """The inverse of `saved`."""
        result = saved["result"]
        if isinstance(result, dict):
            result = Failure(**result)
        else:
            result = UNGRADED if result is None else result[0]
        output = saved["output"] and AgentLoopOutput(**saved["output"])
        spans = [tuple(span) for span in saved["spans"]]
        return cls(output=output, spans=spans, result=result, **{name: saved[name] for name in SAVED_AS_IS})


@dataclass(eq=False)
class Group:
    """A prompt with its samples.

    `row` are the columns of the prompt, a batch of one; `step` is the step whose seeds its samples have, `epoch`
    counts passes over the data, `started_at` is the version that servers held when it was started.
    """

    number: int
    row: DataProto
    params: dict[str, Any]
    step: int
    samples: list[Sample]
    epoch: int = 0
    started_at: int = 0

    @property
    def oldest_version(self) -> int:
        """The version of the oldest token; of samples that run, that of the servers when they began."""
        versions = []
        for sample in self.samples:
            if sample.spans:
                versions.append(sample.spans[0][0])
            elif sample.state != journal.FAILED:
                versions.append(self.started_at if sample.started_at is None else sample.started_at)
        return min(versions, default=self.started_at)

    @property
    def is_ready(self) -> bool:
        """Whether all samples are queued or failed."""
        return all(sample.state in ENDED for sample in self.samples)

    def saved(self) -> dict[str, Any]:
        """As JSON, without the prompt's columns, which `item`, its row in the data set, stands for."""
        columns = self.row.non_tensor_batch
        values = {
            "number": self.number, "item": int(columns["sample_index"][0]) if "sample_index" in columns else None,
            "step": self.step, "epoch": self.epoch, "started_at": self.started_at, "params": self.params,
            "samples": [sample.saved() for sample in self.samples],
        }  # fmt: skip
        return json.loads(json.dumps(values, default=json_value))

    @classmethod
    def load(cls, saved: dict[str, Any], row: DataProto) -> "Group":
        """The inverse of `saved`."""
        samples = [Sample.load(sample) for sample in saved["samples"]]
        names = ("number", "params", "step", "epoch", "started_at")
        return cls(row=row, samples=samples, **{name: saved[name] for name in names})
