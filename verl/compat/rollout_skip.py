"""Compatibility with verl: `verl.trainer.ppo.rollout_skip` for settings that are mocks or plain dicts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.trainer.ppo import rollout_skip


class RolloutSkip(rollout_skip.RolloutSkip):
    """As verl.trainer.ppo.rollout_skip.RolloutSkip, with the attributes `gbs` (prompts of a batch) and `dumped_dir`."""

    def __init__(self, config: Any, rollout_wg: Any) -> None:
        config = OmegaConf.create(config) if isinstance(config, dict) else config
        sections = (config.actor_rollout_ref.rollout, config.data, getattr(config, "trainer", None))
        rollout, data, trainer = (dict(section) if isinstance(section, Mapping) else {} for section in sections)
        super().__init__({"actor_rollout_ref": {"rollout": rollout}, "data": data, "trainer": trainer}, rollout_wg)
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
