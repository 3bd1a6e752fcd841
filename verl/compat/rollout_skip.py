"""Compatibility with verl: `verl.trainer.ppo.rollout_skip` for settings that are mocks or plain dicts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.trainer.ppo import rollout_skip

__all__ = ["RolloutSkip", "wrap_generate_sequences"]


def _section(config: Any, *names: str) -> dict[str, Any]:
    """A section by items or attributes; empty where it is no mapping."""
    for name in names:
        config = config[name] if isinstance(config, Mapping) and name in config else getattr(config, name, None)
    return dict(config) if isinstance(config, Mapping) else {}


class RolloutSkip(rollout_skip.RolloutSkip):
    """As verl.trainer.ppo.rollout_skip.RolloutSkip, with the attributes `gbs` (prompts of a batch) and `dumped_dir`."""

    def __init__(self, config: Any, rollout_wg: Any) -> None:
        rollout, data = _section(config, "actor_rollout_ref", "rollout"), _section(config, "data")
        sections = {"actor_rollout_ref": {"rollout": rollout}, "data": data, "trainer": _section(config, "trainer")}
        super().__init__(sections, rollout_wg)
        self.gbs = data.get("gen_batch_size", data.get("train_batch_size"))
        self.dumped_dir = Path(rollout.get("skip_dump_dir", RolloutConfig.skip_dump_dir)).expanduser()

    def wrap_generate_sequences(self) -> None:
        """Make `generate_sequences` of the worker group answer from the file."""
        self._rollout_wg.generate_sequences = wrap_generate_sequences(self, self._rollout_wg)


def wrap_generate_sequences(rolloutskip: RolloutSkip, rollout_wg: Any) -> Any:
    """As verl.trainer.ppo.rollout_skip.wrap_generate_sequences; of a batch that is no DataProto nothing is checked."""
    generate, checked = rollout_wg.generate_sequences, rollout_skip.wrap_generate_sequences(rolloutskip, rollout_wg)

    def answer(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(batch, DataProto):
            return checked(batch, *args, **kwargs)
        stored = rolloutskip.try_load()
        if stored is None:
            stored = generate(batch, *args, **kwargs)
            rolloutskip.dump(stored)
        return stored

    return answer
