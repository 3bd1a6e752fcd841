"""One pass over the validation set: generate, score, name the figures."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.batching import LOST
from verl.trainer.ppo.metric_utils import process_validation_metrics, reduce_metrics
from verl.trainer.ppo.reward import compute_reward, drop_failed

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class ValidationPass:
    """Collects what the rows of all validation batches gave."""

    def __init__(self, trainer: RayPPOTrainer) -> None:
        self.trainer = trainer
        self.n = trainer.config.actor_rollout_ref.rollout.val_kwargs.n
        self.sources: list[str] = []
        self.uids: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.truths: list[Any] = []
        self.infos: dict[str, list[Any]] = defaultdict(list)
        self.rollout_metrics: dict[str, list[float]] = defaultdict(list)
        self.requested = 0
        self.prompts = 0

    def run(self) -> dict[str, float]:
        """All batches through `add`; returns the metrics `val-core/...`, `val-aux/...`."""
        for batch in self.trainer.val_dataloader:
            self.add(DataProto.from_single_dict(batch))
        if not self.uids:
            raise ValueError(
                f"validation scored none of {self.requested} samples: data.val_files gave no prompt, or every "
                "generation failed."
            )
        metrics = name_validation_metrics(process_validation_metrics(self.sources, self.uids, dict(self.infos)))
        metrics.update(reduce_metrics(dict(self.rollout_metrics)))
        metrics["val-aux/requested_samples"] = self.requested
        metrics["val-aux/dropped_samples"] = self.requested - len(self.uids)
        return metrics

    def add(self, prompts: DataProto) -> None:
        """Generate and score one batch of prompts."""
        trainer = self.trainer
        prompts.non_tensor_batch["uid"] = np.array([f"v{self.prompts + i}" for i in range(len(prompts))], dtype=object)
        self.prompts += len(prompts)
        self.requested += len(prompts) * self.n
        samples, metrics = trainer.generate_rows(prompts, trainer.generation_meta(validate=True))
        for key, value in metrics.items():
            self.rollout_metrics[f"val-aux/{key}"].append(value)
        if LOST in samples.non_tensor_batch:
            samples = samples.select_idxs(np.flatnonzero(~samples.non_tensor_batch.pop(LOST).astype(bool)))
        if not len(samples):
            return
        samples.meta_info["validate"] = True
        trainer._add_rm_scores(samples)
        samples, scores, extras, _ = drop_failed(samples, *compute_reward(samples, trainer.val_reward_fn))  # [B, R]
        self.take(samples, scores.sum(-1).tolist(), extras)

    def take(self, samples: DataProto, scores: list[float], extras: dict[str, Any]) -> None:
        """File the scored rows; a reward key that some batch lacks would shift the columns, hence the check."""
        before = len(self.uids)
        self.sources += [str(s) for s in samples.non_tensor_batch[self.trainer.config.data.reward_fn_key]]
        self.uids += samples.non_tensor_batch["uid"].tolist()
        self.texts += self.trainer.decode_texts(samples)
        self.truths += self.trainer.ground_truths(samples)
        self.infos["reward"] += scores
        for key, values in extras.items():
            if len(self.infos[key]) != before:
                raise ValueError(f"reward key {key!r} is missing from an earlier validation batch; each row needs it.")
            self.infos[key] += list(values)

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Rows of `trainer.validation_data_dir/<step>.jsonl`."""
        return dump_rows(self.texts, self.truths, self.infos["reward"], self.infos, step)


def dump_rows(
    texts: list[tuple[str, str]], truths: list[Any], scores: list[float], extras: dict[str, Any], step: int
) -> list[dict[str, Any]]:
    """One row a sample: input, output, gts, score, step and the reward's extra keys."""
    rows = []
    for i, (prompt, response) in enumerate(texts):
        row = {"input": prompt, "output": response, "gts": truths[i], "score": scores[i], "step": step}
        rows.append(row | {key: values[i] for key, values in extras.items() if key not in row})
    return rows


def name_validation_metrics(by_source: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """{source: {var: {metric: value}}} -> flat names; core are mean, maj and best of the main var at the largest N."""
    named = {}
    for source, variables in by_source.items():
        core_var = "acc" if "acc" in variables else "reward"
        for var, metrics in variables.items():
            largest = max(int(name.split("@")[-1].split("/")[0]) for name in metrics)
            for name, value in metrics.items():
                is_core = var == core_var and name.startswith(("mean", "maj", "best")) and f"@{largest}" in name
                named[f"{'val-core' if is_core else 'val-aux'}/{source}/{var}/{name}"] = value
    return named
