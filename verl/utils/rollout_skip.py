"""Answers every generation with the first one, kept on disk: for work on what comes after the rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loguru import logger

from verl.protocol import DataProto


class RolloutSkip:
    """The first generation batch goes to `rollout.skip_dump_dir`; from then on, also in later runs, it is the answer.

    Kept per experiment, project, number of prompts and samples: `<exp>_<project>_GBS<prompts>__N<samples>`.
    """

    def __init__(self, config: Any, rollout_wg: Any) -> None:
        rollout = config.actor_rollout_ref.rollout
        prompts = config.data.gen_batch_size if "gen_batch_size" in config.data else config.data.train_batch_size
        name = f"{config.trainer.experiment_name}_{config.trainer.project_name}_GBS{prompts}__N{rollout.n}"
        self.directory = Path(rollout.skip_dump_dir).expanduser() / name
        self.rows = prompts * rollout.n
        self._rollout_wg = rollout_wg

    @property
    def curr_path_dump(self) -> Path:
        """The file that holds the generation."""
        return self.directory / "generation.safetensors"

    def wrap_generate_sequences(self) -> None:
        """Let the worker group answer training generations from the file."""
        self._rollout_wg.generate_sequences = wrap_generate_sequences(self, self._rollout_wg)

    def try_load(self) -> DataProto | None:
        """The kept generation; None when there is none yet."""
        if not self.curr_path_dump.exists():
            return None
        data = DataProto.load_from_disk(self.curr_path_dump)
        if len(data) != self.rows:
            what = f"{self.curr_path_dump} holds {len(data)} samples; this run needs {self.rows}"
            raise ValueError(f"{what}. Delete it, or set actor_rollout_ref.rollout.skip_rollout=false.")
        return data

    def dump(self, outputs: DataProto) -> None:
        """Keep a generation."""
        self.directory.mkdir(parents=True, exist_ok=True)
        outputs.save_to_disk(self.curr_path_dump)


def wrap_generate_sequences(rolloutskip: RolloutSkip, rollout_wg: Any) -> Any:
    """A `generate_sequences` that answers from the file, or generates once and keeps it; validation passes by."""
    generate = rollout_wg.generate_sequences

    def answer(batch: DataProto, *args: Any, **kwargs: Any) -> DataProto:
        if "validate" in batch.meta_info and batch.meta_info["validate"]:
            return generate(batch, *args, **kwargs)
        kept = rolloutskip.try_load()
        if kept is not None:
            logger.warning("rollout.skip_rollout: answered from {}, not by the model", rolloutskip.curr_path_dump)
            return kept
        outputs = generate(batch, *args, **kwargs)
        rolloutskip.dump(outputs)
        return outputs

    return answer
