"""RayDAPOTrainer: gathers a batch from as many generations as it takes until enough groups teach something."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from loguru import logger

from verl.protocol import DataProto
from verl.trainer.ppo import batching
from verl.trainer.ppo.batching import DropCounts
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.groupwise import as_torch_index

SUMMED = ("training/requested_samples", "training/scored_samples", "training/dropped_samples", "reward/errors",
          "reward/timeouts")  # fmt: skip
FINAL_REWARD = "seq_final_reward"


class RayDAPOTrainer(RayPPOTrainer):
    """Dynamic sampling (DAPO, section 3.2): groups whose samples all score the same carry no gradient and are filtered.

    Prompts with differing samples beyond `data.train_batch_size` come first in the next batch and are answered anew by
    the weights of that step (`algorithm.filter_groups.keep_surplus`); a checkpoint holds them.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.filter = self.config.algorithm.filter_groups
        self.surplus: list[dict[str, Any]] = []  # {"item": place in the data set, "uid"} of each prompt
        self.keeps_surplus = self.filter.keep_surplus

    def _gather_batch(self) -> DataProto:
        if not self.filter.enable:
            return super()._gather_batch()
        wanted, kept = self.config.data.train_batch_size, []
        prompts = filtered = 0
        before, found = self.metrics, []
        while prompts < wanted:
            self._stop_at_limit(len(found), prompts)
            self.metrics = {}
            samples = self._gather_from(self._next_prompts())
            if self.filter.metric == FINAL_REWARD:
                self._reward_with_penalty(samples)
            found.append(self.metrics)
            chosen = self._differing(samples)
            filtered += len(samples) - len(chosen)
            if len(chosen):
                kept.append(samples.select_idxs(chosen))
                prompts += len(batching.group_rows(kept[-1]))
            logger.debug(f"step {self.global_steps}: generation {len(found)} brings {prompts} of {wanted} prompts")
        self.metrics = before | _merged(found)
        return self._cut(DataProto.concat(kept), wanted, filtered)

    def _drop_lost(self, samples: DataProto) -> tuple[DataProto, DropCounts]:
        """Lost samples alone: what the ranks share evenly is cut from the whole batch, not from each generation."""
        if not self.filter.enable:
            return super()._drop_lost(samples)
        return batching.drop_lost(samples, self.n, 1, self._keeps_groups_whole())

    def _stop_at_limit(self, generations: int, prompts: int) -> None:
        limit = self.filter.max_num_gen_batches
        if 0 < limit <= generations:
            wanted = f"data.train_batch_size={self.config.data.train_batch_size}"
            raise ValueError(
                f"{generations} generations gave {prompts} of {wanted} prompts whose samples differ in "
                f"{self.filter.metric!r} (algorithm.filter_groups.max_num_gen_batches={limit}). The data may be too "
                "hard or too easy: all samples of a group score the same. Look at the rewards, raise the limit, or set "
                "it to 0 for none."
            )

    def _next_prompts(self) -> DataProto:
        """What the batch before left over, with a draw of the loader where that is no batch by itself."""
        left, self.surplus = self.surplus, []
        if not left:
            return self._draw_prompts()
        again = DataProto.from_single_dict(collate_fn([self.train_dataset[row["item"]] for row in left]))
        again.non_tensor_batch["uid"] = np.array([row["uid"] for row in left], dtype=object)
        if len(left) >= self.config.data.train_batch_size:
            self.metrics["training/epoch"] = self.prompt_stream.epoch
            return again
        return DataProto.concat([again, self._draw_prompts()])

    def _reward_with_penalty(self, samples: DataProto) -> None:
        """token_level_rewards, before the filter that looks at them; the steps of the loop see that it is done."""
        if self.config.algorithm.use_kl_in_reward:
            samples.batch["group_index"] = as_torch_index(samples.non_tensor_batch["uid"])  # balancing comes later
            samples.union(self._compute_old_log_prob(samples))
            samples.union(self._compute_ref_log_prob(samples))
        self._assign_token_rewards(samples)

    def _differing(self, samples: DataProto) -> np.ndarray:
        """Rows of the groups in which the metric is not the same for all samples, in the batch's order."""
        values = self._metric_of(samples)
        groups = batching.group_rows(samples)
        chosen = [rows for rows in groups if len(rows) == 1 or np.ptp(values[rows]) > 0]
        if not chosen:
            logger.warning(
                f"step {self.global_steps}: in none of {len(groups)} groups do the samples differ in "
                f"{self.filter.metric!r}; the next prompts are drawn"
            )
            return np.empty(0, dtype=np.int64)
        return np.concatenate(chosen)

    def _metric_of(self, samples: DataProto) -> np.ndarray:
        name, columns = self.filter.metric, samples.non_tensor_batch
        if name in ("seq_reward", FINAL_REWARD):
            key = "token_level_scores" if name == "seq_reward" else "token_level_rewards"
            return samples.batch[key].sum(-1).numpy()
        if name == "score" and name not in columns:
            return samples.batch["token_level_scores"].sum(-1).numpy()
        if name not in columns:
            raise ValueError(
                f"algorithm.filter_groups.metric={name!r} is nothing that the reward gives. It gives: "
                f"{', '.join(['seq_reward', FINAL_REWARD, *self.reward_extra_keys])}."
            )
        return columns[name].astype(float)

    def _cut(self, samples: DataProto, wanted: int, filtered: int) -> DataProto:
        """The first `wanted` prompts, or as many of them as the ranks share; the others wait for the next batch."""
        groups = batching.group_rows(samples)
        sizes = [len(group) for group in groups[:wanted]]
        count = batching.shareable(sizes, self.n, self.ranks, self._keeps_groups_whole())
        if not count:
            raise ValueError(
                f"data.train_batch_size={wanted} with lost samples gives {self.ranks} ranks no even share: groups that "
                f"are not full stay on one rank. Use data.train_batch_size={self.ranks} or more."
            )
        rows = np.sort(np.concatenate(groups[:count]))
        self._keep_surplus(samples, [group[0] for group in groups[count:]])
        surplus = len(samples) - len(rows)
        metrics = self.metrics
        metrics["training/dropped_samples/filtered"] = filtered
        metrics["training/dropped_samples/surplus"] = surplus
        metrics["training/dropped_samples"] += filtered + surplus
        metrics["training/scored_samples"] -= filtered + surplus
        if metrics["training/scored_samples"] != len(rows):
            raise RuntimeError(f"{metrics['training/scored_samples']} samples are counted, {len(rows)} are trained on")
        return samples.select_idxs(torch.from_numpy(rows))

    def _keep_surplus(self, samples: DataProto, rows: list[int]) -> None:
        """Note the prompts of these rows, by their places in the data set, for the next batch."""
        columns = samples.non_tensor_batch
        if rows and self.keeps_surplus and "sample_index" not in columns:
            logger.warning(
                "algorithm.filter_groups.keep_surplus has no effect: the data set (data.custom_cls) gives no column "
                "'sample_index', the number of the row, by which a prompt is found again"
            )
            self.keeps_surplus = False
        if self.keeps_surplus:
            self.surplus = [{"item": int(columns["sample_index"][i]), "uid": str(columns["uid"][i])} for i in rows]

    def variant_state(self) -> dict[str, Any]:
        return {"surplus": self.surplus}

    def load_variant_state(self, state: dict[str, Any], same_data: bool) -> None:
        surplus = state["surplus"] if "surplus" in state else []  # none in a checkpoint of the plain trainer
        if surplus and not same_data:
            logger.warning(f"{len(surplus)} surplus prompts of the checkpoint are let go: they are rows of other data")
            surplus = []
        self.surplus = surplus


def _merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of several generations as those of one step: sums of counts, the last version and epoch, means else."""
    columns: dict[str, list] = defaultdict(list)
    for metrics in found:
        for name, value in metrics.items():
            columns[name].append(value)
    merged = {name: float(np.mean(values)) for name, values in columns.items()}
    merged.update({name: sum(columns[name]) for name in columns if name.startswith(SUMMED)})
    last = ("training/epoch", "training/weights_version")
    merged.update({name: columns[name][-1] for name in last if name in columns})
    return merged | {"train/num_gen_batches": len(found)}
