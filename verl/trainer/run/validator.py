"""One pass over a validation set: generate, score, name the metrics."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_phase import RolloutPhase
from verl.trainer.run.samples import sample_rows, write_jsonl
from verl.trainer.run.validation_metrics import process_validation_metrics
from verl.utils.metric import reduce_metrics
from verl.utils.tracking import ValidationGenerationsLogger


@dataclass
class Validator:
    """Generates and scores the validation set, by the trainer's rollout phase."""

    config: PPOConfig
    loader: Iterable[dict[str, Any]]
    tokenizer: Any
    rollout: RolloutPhase
    reward_fn: Any

    def run(self, step: int) -> dict[str, float]:
        """The metrics `val-core/...` and `val-aux/...`; dumps and logs generations where trainer.* requests them.

        Raises ValueError if nothing could be scored.
        """
        sources: list[str] = []
        uids: list[str] = []
        rows: list[dict[str, Any]] = []
        values: list[dict[str, Any]] = []  # reward and extras of each sample; batches may have other extras
        rollout_metrics: dict[str, list[float]] = defaultdict(list)
        prompts_seen, dataset = 0, getattr(self.loader, "dataset", ())
        logger.log("DEBUG" if step else "INFO", f"validating {len(dataset)} prompts")  # later, each step has its line
        for batch in self.loader:
            prompts = DataProto.from_single_dict(batch)
            names = [f"v{prompts_seen + i}" for i in range(len(prompts))]
            prompts.non_tensor_batch["uid"] = np.array(names, dtype=object)
            prompts_seen += len(prompts)
            samples, metrics = self.rollout.generate_for_validation(prompts, step, self.reward_fn)
            for key, value in metrics.items():
                rollout_metrics[f"val-aux/{key}"].append(value)
            if not len(samples):
                continue
            samples.meta_info["validate"] = True
            samples, token_scores, extras, _ = self.rollout.score(samples, self.reward_fn)
            scores = token_scores.sum(-1).tolist()
            columns = {"reward": scores}
            columns |= {"reward_extra" if key == "reward" else key: column for key, column in extras.items()}
            values += [{key: column[i] for key, column in columns.items()} for i in range(len(samples))]
            sources += [str(source) for source in samples.non_tensor_batch[self.config.data.reward_fn_key]]
            uids += samples.non_tensor_batch["uid"].tolist()
            rows += sample_rows(samples, self.tokenizer, scores, columns, step)
        requested = prompts_seen * self.config.actor_rollout_ref.rollout.val_kwargs.n
        if not uids:
            raise ValueError(
                f"validation scored none of {requested} samples: data.val_files has no prompts (data.val_max_samples="
                f"{self.config.data.val_max_samples}), or every generation failed."
            )
        names = dict.fromkeys(name for of_sample in values for name in of_sample)
        variables = {name: [of_sample.get(name) for of_sample in values] for name in names}
        metrics = name_validation_metrics(process_validation_metrics(sources, uids, variables))
        metrics |= reduce_metrics(dict(rollout_metrics))
        metrics["val-aux/requested_samples"] = requested
        metrics["val-aux/dropped_samples"] = requested - len(uids)
        if overlong := getattr(dataset, "dropped_overlong", 0):
            metrics["val-aux/overlong_prompts"] = overlong / (overlong + len(dataset))
        trainer = self.config.trainer
        if trainer.validation_data_dir:
            write_jsonl(Path(trainer.validation_data_dir).expanduser() / f"{step}.jsonl", rows)
        if trainer.log_val_generations:  # the same samples of the set each time
            shown = [(row["input"], row["output"], row["score"]) for row in rows[: trainer.log_val_generations]]
            loggers = ValidationGenerationsLogger(trainer.project_name, trainer.experiment_name)
            loggers.log(trainer.logger, shown, step)
        return metrics


def name_validation_metrics(by_source: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """{source: {variable: {metric: value}}} -> flat names.

    The core metrics are mean, maj and best of the main variable (acc, else reward) at the largest N.
    """
    named = {}
    for source, variables in by_source.items():
        core_var = "acc" if "acc" in variables else "reward"
        for var, metrics in variables.items():
            largest = max(int(name.split("@")[-1].split("/")[0]) for name in metrics)
            for name, value in metrics.items():
                is_core = var == core_var and name.startswith(("mean", "maj", "best")) and f"@{largest}" in name
                named[f"{'val-core' if is_core else 'val-aux'}/{source}/{var}/{name}"] = value
    return named
