"""Answers every generation with the first one, kept on disk, to work on what follows the rollout."""

from pathlib import Path
from typing import Any

from loguru import logger
from omegaconf import OmegaConf

from verl.config.common import TrainerConfig
from verl.config.data import DataConfig
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto


class RolloutSkip:
    """Stores the first generated batch in `rollout.skip_dump_dir` and returns it from then on, also in later runs.

    One batch per experiment, project, number of prompts and of samples: `<exp>_<project>_GBS<prompts>__N<samples>`.
    `config` is the trainer's, or a plain mapping; keys that it lacks have their defaults. `rollout_wg` is any object
    with `generate_sequences`. Attributes: `n` samples of each of `gbs` prompts, `dumped_dir` the folder of all batches.
    """

    def __init__(self, config: Any, rollout_wg: Any) -> None:
        config = OmegaConf.create(config) if isinstance(config, dict) else config
        rollout = {**RolloutConfig(name="any"), **config.actor_rollout_ref.rollout}
        data, trainer = {**DataConfig(), **config.data}, {**TrainerConfig(), **getattr(config, "trainer", {})}
        self.n, self.do_sample = rollout["n"], rollout["do_sample"]
        self.gbs = data["gen_batch_size"] if "gen_batch_size" in config.data else data["train_batch_size"]
        self.dumped_dir = Path(rollout["skip_dump_dir"]).expanduser()
        name = f"{trainer['experiment_name']}_{trainer['project_name']}_GBS{self.gbs}__N{self.n}"
        self.directory = self.dumped_dir / name
        self._rollout_wg = rollout_wg

    @property
    def curr_path_dump(self) -> Path:
        """The file that holds the generation."""
        return self.directory / "generation.safetensors"

    def wrap_generate_sequences(self) -> None:
        """Make `generate_sequences` of the worker group answer training batches from the file."""
        self._rollout_wg.generate_sequences = wrap_generate_sequences(self, self._rollout_wg)

    def try_load(self) -> DataProto | None:
        """The stored generation; None when there is none yet."""
        return DataProto.load_from_disk(self.curr_path_dump) if self.curr_path_dump.exists() else None

    def dump(self, outputs: DataProto) -> None:
        """Store a generation."""
        self.directory.mkdir(parents=True, exist_ok=True)
        outputs.save_to_disk(self.curr_path_dump)


def wrap_generate_sequences(rolloutskip: RolloutSkip, rollout_wg: Any) -> Any:
    """A `generate_sequences` that returns the stored generation, or generates once and stores it.

    Prompts [B, P] give samples [B * n, T]. Validation and ReMax's greedy baseline are always generated. Raises
    ValueError when the stored batch has another number of samples, unless the prompts are no DataProto.
    """
    generate, n, do_sample = rollout_wg.generate_sequences, rolloutskip.n, rolloutskip.do_sample

    def stored_or_generated(batch: DataProto, *args: Any, **kwargs: Any) -> DataProto:
        meta = {"validate": False, "n": n, "do_sample": do_sample, **batch.meta_info}
        if meta["validate"] or meta["n"] != n or meta["do_sample"] != do_sample:
            return generate(batch, *args, **kwargs)
        stored = rolloutskip.try_load()
        if stored is None:
            samples = generate(batch, *args, **kwargs)
            rolloutskip.dump(samples)
            return samples
        if isinstance(batch, DataProto) and len(stored) != len(batch) * n:
            raise ValueError(
                f"{rolloutskip.curr_path_dump} holds {len(stored)} samples; this run needs {len(batch) * n}. Delete "
                "it, or set actor_rollout_ref.rollout.skip_rollout=false."
            )
        logger.warning("rollout.skip_rollout: samples come from {}, not the model", rolloutskip.curr_path_dump)
        return stored

    return stored_or_generated
