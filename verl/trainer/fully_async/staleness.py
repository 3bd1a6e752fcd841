"""How many prompts may be started before a weight sync, and which finished ones an update takes.

Weights versions are counted in updates: version v has had v updates, and step v + 1 trains it. Servers hold the version
of the last weight sync.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.config.asynchronous import versions_allowed
from verl.trainer.fully_async.samples import Group


class StalenessError(RuntimeError):
    """A batch has a sample that is older than async_training.max_staleness allows."""


@dataclass(frozen=True)
class StalenessBound:
    """Bounds the age of samples.

    Between two syncs, `sync_every` updates of `batch` prompts each are made. If prompts are started up to the limit of
    `may_start`, and updates take those first that expire first, no sample of an update is more than `versions` versions
    old, and no prompt has to be dropped: an update waits for prompts that a later one could not take any more
    (`waits`).
    """

    batch: int
    sync_every: int
    threshold: float
    versions: int
    waits: bool = True

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], batch: int) -> "StalenessBound":
        """That of a section async_training, for updates of `batch` prompts."""
        return cls(
            batch, settings["trigger_parameter_sync_step"], settings["staleness_threshold"],
            versions_allowed(settings), settings["stale_samples"] == "wait",
        )  # fmt: skip

    def may_start(self, synced: int, dropped: int) -> int:
        """Prompts of the run that may be started while servers hold version `synced`; `dropped` ones do not count.

        Those of the updates up to the next sync, and `threshold` times as many; never more than updates can take
        before they are too old.
        """
        ahead = min(round((1 + self.threshold) * self.sync_every * self.batch, 6), (self.versions + 1) * self.batch)
        return synced * self.batch + int(ahead) + dropped

    def last_step(self, version: int) -> int:
        """The last step that may train a sample whose oldest token is of `version`."""
        return version + self.versions + 1

    def expired(self, step: int, candidates: Sequence[Group]) -> list[Group]:
        """Those that step `step` may not train any more."""
        return [c for c in candidates if self.last_step(c.oldest_version) < step]

    def choose(self, step: int, candidates: Sequence[Group]) -> list[Group] | None:
        """The prompts of step `step`, in the order of their numbers; None where the step has to wait.

        `candidates` are all prompts that were started and neither trained nor dropped.
        """
        order = sorted(candidates, key=lambda c: (c.oldest_version, c.number))
        ready = [c for c in order if c.is_ready]
        if len(ready) < self.batch:
            return None
        chosen = ready[: self.batch]
        if self.waits and len(ready) < len(order):
            taken = {c.number for c in chosen}
            rest = [c for c in order if c.number not in taken]
            # Step `step + 1 + i // batch` is the first that can take the i-th of the rest.
            if any(self.last_step(c.oldest_version) < step + 1 + i // self.batch for i, c in enumerate(rest)):
                return None
        return sorted(chosen, key=lambda c: c.number)

    def check(self, step: int, oldest: int) -> None:
        """StalenessError if step `step` may not train a sample whose oldest token is of version `oldest`."""
        if self.last_step(oldest) < step:
            raise StalenessError(
                f"step {step} would train a sample of weights version {oldest}, {step - 1 - oldest} versions old; "
                f"async_training.max_staleness allows {self.versions}"
            )
