"""RayDAPOTrainer: draws prompts until enough groups have samples with different rewards."""

from typing import Any

import numpy as np
from loguru import logger

from verl.data.rl_dataset import collate_fn
from verl.protocol import DataProto
from verl.reward.rows import reward_extras
from verl.trainer.ppo import batching
from verl.trainer.ppo.batching import DropCounts
from verl.trainer.ppo.ray_trainer import Metrics, RayPPOTrainer

SUMMED = ("training/requested_samples", "training/scored_samples", "training/dropped_samples", "reward/errors",
          "reward/timeouts")  # fmt: skip
NEWEST = ("training/epoch", "training/weights_version")
FINAL_REWARD = "seq_final_reward"


class RayDAPOTrainer(RayPPOTrainer):
    """Dynamic sampling (DAPO, section 3.2): groups whose samples all have the same score carry no gradient and are
    filtered out.

    Prompts beyond `data.train_batch_size` come first in the next batch, where the weights of that step generate their
    samples (`algorithm.filter_groups.keep_surplus`); checkpoints contain them.
    """

    filters_groups = True

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.filter = self.config.algorithm.filter_groups
        self.surplus: list[dict[str, Any]] = []  # {"item": row number in the data set, "uid"} of each prompt
        self.keeps_surplus = self.filter.keep_surplus

    def _gather_batch(self) -> tuple[DataProto, Metrics]:
        if not self.filter.enable:
            return super()._gather_batch()
        wanted, limit = self.config.data.train_batch_size, self.filter.max_num_gen_batches
        kept, draws = [], []  # samples and metrics of each draw
        prompts = filtered = 0  # prompts that were kept, samples that were not
        while prompts < wanted:
            if 0 < limit <= len(draws):
                raise ValueError(
                    f"{len(draws)} generations gave {prompts} of data.train_batch_size={wanted} prompts whose samples "
                    f"differ in {self.filter.metric!r} (algorithm.filter_groups.max_num_gen_batches={limit}). The data "
                    "may be too hard or too easy: all samples of a group have the same score. Check the rewards, raise "
                    "the limit, or set it to 0 for no limit."
                )
            drawn, metrics = self._next_prompts()
            samples, gathered = self._gather_from(drawn)
            metrics |= gathered
            if self.filter.metric == FINAL_REWARD:
                metrics |= self._reward_with_penalty(samples)
            draws.append(metrics)
            groups = self._differing_groups(samples)
            filtered += len(samples) - sum(map(len, groups))
            prompts += len(groups)
            if groups:
                kept.append(samples.select_idxs(np.concatenate(groups)))
            logger.debug(f"step {self.global_steps}: draw {len(draws)} brings {prompts} of {wanted} prompts")
        samples = DataProto.concat(kept)
        batch = self._first_prompts(samples, wanted)
        surplus = len(samples) - len(batch)
        metrics = _merged(draws)
        metrics["training/dropped_samples/filtered"] = filtered
        metrics["training/dropped_samples/surplus"] = surplus
        metrics["training/dropped_samples"] += filtered + surplus
        metrics["training/scored_samples"] -= filtered + surplus
        return batch, metrics

    def _drop_lost(self, samples: DataProto) -> tuple[DataProto, DropCounts]:
        """Drop lost samples only: an even share of the ranks is cut from the complete batch, not from each draw."""
        if not self.filter.enable:
            return super()._drop_lost(samples)
        return batching.drop_lost(samples, self.n, 1, self.keeps_groups_whole)

    def _next_prompts(self) -> tuple[DataProto, Metrics]:
        """The prompts that the previous batch left over, with a draw of the loader if they do not fill a batch."""
        left, self.surplus = self.surplus, []
        if not left:
            return self._draw_prompts()
        again = DataProto.from_single_dict(collate_fn([self.train_dataset[row["item"]] for row in left]))
        again.non_tensor_batch["uid"] = np.array([row["uid"] for row in left], dtype=object)
        if len(left) >= self.config.data.train_batch_size:
            return again, {"training/epoch": self.prompt_stream.epoch}
        drawn, metrics = self._draw_prompts()
        return DataProto.concat([again, drawn]), metrics

    def _reward_with_penalty(self, samples: DataProto) -> Metrics:
        """token_level_rewards [B, R] ahead of the filter, which reads them; the later steps of the loop skip it."""
        metrics: Metrics = {}
        if self.config.algorithm.use_kl_in_reward:
            samples.batch["group_index"] = batching.prompt_groups(samples)  # balancing comes later
            metrics |= self._compute_old_log_prob(samples)
            metrics |= self._compute_ref_log_prob(samples)
        return metrics | self._assign_token_rewards(samples)

    def _differing_groups(self, samples: DataProto) -> list[np.ndarray]:
        """Row numbers of each group in which the metric differs between samples, in the batch's order."""
        values, groups = self._metric_of(samples), batching.group_rows(samples)
        chosen = []
        for rows in groups:
            known = values[rows][~np.isnan(values[rows])]
            if len(rows) == 1 or len(np.unique(known)) > 1:
                chosen.append(rows)
        if not chosen:
            logger.warning(
                f"step {self.global_steps}: none of {len(groups)} groups has samples that differ in "
                f"{self.filter.metric!r}; drawing the next prompts"
            )
            self.health.explain_no_reward(samples, self.tokenizer, self.global_steps)
        return chosen

    def _metric_of(self, samples: DataProto) -> np.ndarray:
        """algorithm.filter_groups.metric of each sample, [B]; NaN where a row lacks it."""
        name, extras = self.filter.metric, reward_extras(samples)
        if name == FINAL_REWARD:
            return samples.batch["token_level_rewards"].sum(-1).numpy()
        if name == "seq_reward" or (name == "score" and name not in extras):
            return samples.batch["token_level_scores"].sum(-1).numpy()
        if name not in extras:
            known = ", ".join(["seq_reward", FINAL_REWARD, *extras])
            raise ValueError(f"algorithm.filter_groups.metric={name!r} is unknown: the reward returns {known}.")
        return np.array(extras[name], float)

    def _first_prompts(self, samples: DataProto, wanted: int) -> DataProto:
        """The first `wanted` prompts, or as many of them as the ranks share; the others go into the next batch."""
        groups = batching.group_rows(samples)
        sizes = [len(group) for group in groups[:wanted]]
        count = batching.shareable(sizes, self.n, self.ranks, self.keeps_groups_whole)
        if not count:
            raise ValueError(
                f"data.train_batch_size={wanted} with lost samples gives {self.ranks} ranks no even share: incomplete "
                f"groups stay on one rank. Use data.train_batch_size={self.ranks} or more."
            )
        columns = samples.non_tensor_batch
        first_rows = [group[0] for group in groups[count:]]
        if first_rows and self.keeps_surplus and "sample_index" not in columns:
            logger.warning(
                "algorithm.filter_groups.keep_surplus has no effect: the data set (data.custom_cls) has no column "
                "'sample_index', the row number by which a prompt is loaded again"
            )
            self.keeps_surplus = False
        if self.keeps_surplus:
            self.surplus = [
                {"item": int(columns["sample_index"][row]), "uid": str(columns["uid"][row])} for row in first_rows
            ]
        return samples.select_idxs(np.sort(np.concatenate(groups[:count])))

    def variant_state(self) -> dict[str, Any]:
        return {"surplus": self.surplus}

    def load_variant_state(self, state: dict[str, Any], same_data: bool) -> None:
        self.surplus = state.get("surplus", [])  # none in a checkpoint of the plain trainer
        if self.surplus and not same_data:
            count = len(self.surplus)
            logger.warning(f"{count} surplus prompts of the checkpoint are dropped: they are rows of other data")
            self.surplus = []


def _merged(draws: list[Metrics]) -> Metrics:
    """Metrics of several draws as those of one step: sums of counts, the last version and epoch, else means."""
    merged: Metrics = {"train/num_gen_batches": len(draws)}
    for name in dict.fromkeys(name for metrics in draws for name in metrics):
        values = [metrics[name] for metrics in draws if name in metrics]
        if name.startswith(SUMMED):
            merged[name] = sum(values)
        else:
            merged[name] = values[-1] if name in NEWEST else float(np.mean(values))
    return merged
