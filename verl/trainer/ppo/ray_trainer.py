"""RayPPOTrainer: the RL loop, one short method a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch.utils.data import Dataset, Sampler

from verl.algos.rollout_correction import (
    apply_bypass_mode,
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_add_to_batch,
)
from verl.planning.batch_arithmetic import prompts_a_step
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.ray import RayWorkerGroup
from verl.single_controller.ray.watchdog import limits
from verl.trainer.ppo import batching, core_algos, utils
from verl.trainer.ppo.advantages import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.batching import DropCounts, compute_response_mask
from verl.trainer.ppo.metric_utils import reduce_metrics
from verl.trainer.ppo.resources import ResourcePoolManager
from verl.trainer.ppo.reward import compute_reward, drop_failed
from verl.trainer.ppo.run_keeping import RunKeeping
from verl.trainer.ppo.utils import Role, WorkerType
from verl.trainer.ppo.worker_groups import WorkerGroups, actor_role, classes
from verl.trainer.run.timing import step
from verl.utils.groupwise import as_torch_index
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance

__all__ = ["RayPPOTrainer", "ResourcePoolManager", "Role", "apply_kl_penalty", "compute_advantage"]
__all__ += ["compute_response_mask"]


class RayPPOTrainer(RunKeeping):
    """Trains a policy by RL. The driver holds batches and advantages; models live in Ray worker groups.

    Variants override a step: `_gather_batch` to draw differently, `variant_state`/`load_variant_state` to save more.
    """

    def __init__(
        self,
        config,
        tokenizer,
        role_worker_mapping: dict[Role, WorkerType],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
        processor=None,
        reward_fn=None,
        val_reward_fn=None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        collate_fn=None,
        train_sampler: Sampler | None = None,
        device_name: str | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn
        self.device_name = config.trainer.device if device_name is None else device_name
        self.use_reference_policy = utils.need_reference_policy(role_worker_mapping)
        self.use_rm = utils.need_reward_model(role_worker_mapping)
        self.use_critic = utils.need_critic(config)
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self.actor_rollout_wg: RayWorkerGroup | None = None
        self.critic_wg: RayWorkerGroup | None = None
        self.rm_wg: RayWorkerGroup | None = None
        self.n = rollout.n
        self.critic_warmup = config.trainer.critic_warmup
        self.kl_ctrl = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
        self.correction = utils.rollout_correction(config)
        # One update on the whole batch sees ratio 1: its own detached log-probs are the old ones.
        self.needs_old_log_probs = bool(
            actor.ppo_epochs > 1
            or prompts_a_step(config)[1] > actor.ppo_mini_batch_size
            or config.algorithm.use_kl_in_reward
            or rollout.calculate_log_probs
        )
        self.needs_greedy_baseline = "reward_baselines" in core_algos.inputs_of(config.algorithm.adv_estimator)
        self._init_run(train_dataset, val_dataset, collate_fn, train_sampler)

    def init_workers(self) -> None:
        """Make the pools, start the ranks, load the models."""
        self.resource_pool_manager.create_resource_pool()
        parts = classes(self.config, self.role_worker_mapping, self.device_name, self.total_training_steps)
        self.groups = WorkerGroups(
            self.resource_pool_manager, parts, self.ray_worker_group_cls, device_name=self.device_name,
            ray_wait_register_center_timeout=self.config.trainer.ray_wait_register_center_timeout,
            time_limits=limits(self.config.trainer.watchdog),
        )  # fmt: skip
        self.critic_wg, self.rm_wg = (self.groups.roles.get(role) for role in (Role.Critic, Role.RewardModel))
        self.actor_rollout_wg = self.groups.roles[actor_role(self.role_worker_mapping)]
        for group in (self.critic_wg, self.rm_wg, self.actor_rollout_wg):  # a rollout engine takes what memory is left
            if group is not None:
                group.init_model()
        self.ranks = self.actor_rollout_wg.world_size

    def shutdown(self) -> None:
        """End the ranks and free their pools."""
        if self.actor_rollout_wg is not None:
            self.groups.end()
            self.actor_rollout_wg = self.critic_wg = self.rm_wg = None

    def fit(self) -> None:
        """Train until the last step, or until a stop is asked for, then leave checkpoint, metrics and report."""
        with self._run_files_kept():
            self._load_checkpoint()
            self._validate_before_training()
            for self.global_steps in self._remaining_steps():  # noqa: B020
                with self._timed("step"):
                    batch = self._gather_batch()  # prompts, generate, reward: [prompts * n, T]
                    self._balance_batch(batch)  # reorders rows; uid keeps groups together
                    batch.union(self._compute_old_log_prob(batch))
                    if self.use_reference_policy:
                        batch.union(self._compute_ref_log_prob(batch))
                    if self.use_critic:
                        batch.union(self._compute_values(batch))
                    self._assign_token_rewards(batch)  # scores less the KL penalty
                    self._correct_rollout(batch)
                    self._assign_advantages(batch)  # registry call, on the driver
                    if self.use_critic:
                        self._update_critic(batch)
                    if self.global_steps >= self.critic_warmup:
                        self._update_actor(batch)
                    self._watch_nonfinite()
                self._validate_if_due()
                self._log(batch)  # before saving: a checkpoint never lies behind its step's metrics
                self._save_if_due()

    def _gather_batch(self) -> DataProto:
        """One step's samples with scores: prompts of one draw, n samples each, less what was dropped."""
        return self._gather_from(self._draw_prompts())

    def _gather_from(self, prompts: DataProto) -> DataProto:
        baselines = self._greedy_baselines(prompts) if self.needs_greedy_baseline else None
        samples, counts = self._drop_lost(self._generate(prompts))
        if counts.scored:
            samples, counts = self._score(samples, counts)
        self.metrics.update(counts.metrics())
        if not counts.scored:
            raise ValueError(
                f"none of the {counts.requested} samples can be trained on: {counts.lost} generations failed, "
                f"{counts.masked} are masked by their rollout, {counts.no_reward} have no reward, "
                f"{counts.small_group} were alone in their group, {counts.uneven} gave the ranks no even share."
            )
        if baselines is not None:
            own = [baselines[uid] for uid in samples.non_tensor_batch["uid"]]
            samples.batch["reward_baselines"] = torch.tensor(own, dtype=torch.float32)
        return samples

    def _drop_lost(self, samples: DataProto) -> tuple[DataProto, DropCounts]:
        """The samples that can be trained on, as many as the ranks share evenly."""
        return batching.drop_lost(samples, self.n, self.ranks, self._keeps_groups_whole())

    @step("gen_max")
    def _greedy_baselines(self, prompts: DataProto) -> dict[str, float]:
        """The score of each prompt's greedy answer, by uid (ReMax, arXiv 2310.10505)."""
        again = DataProto(prompts.batch, dict(prompts.non_tensor_batch), dict(prompts.meta_info))
        meta = {**self.generation_meta(validate=False), "n": 1, "do_sample": False}
        answers, _ = self.generate_rows(again, meta)
        if batching.LOST in answers.non_tensor_batch:
            lost = answers.non_tensor_batch.pop(batching.LOST).astype(bool)
            if lost.any():
                raise ValueError(f"{lost.sum()} greedy answers were lost; advantages need one of each prompt.")
        self._add_rm_scores(answers)
        answers, scores, _, failed = drop_failed(answers, *compute_reward(answers, self.reward_fn))
        if failed:
            raise ValueError(f"{failed.total()} greedy answers have no reward; advantages need one of each prompt.")
        return dict(zip(answers.non_tensor_batch["uid"].tolist(), scores.sum(-1).tolist(), strict=True))

    @step("data")
    def _draw_prompts(self) -> DataProto:
        self.metrics["training/epoch"] = self.prompt_stream.epoch
        prompts = self.prompt_stream.draw()
        logger.debug(f"step {self.global_steps}: {len(prompts)} prompts from the data loader")
        return prompts

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """Take the tensors out of `batch` as the rollout's input; every column goes along, extra_info too [SPD Fix]."""
        gen_batch = DataProto(batch.batch, dict(batch.non_tensor_batch), {})
        batch.batch = None
        return gen_batch

    def generation_meta(self, validate: bool) -> dict[str, Any]:
        """What a rollout must know of a batch: number of samples a prompt, sampling, special tokens."""
        rollout = self.config.actor_rollout_ref.rollout
        sampling = rollout.val_kwargs if validate else rollout
        return {
            "n": sampling.n,
            "temperature": sampling.temperature,
            "do_sample": sampling.do_sample,
            "eos_token_id": self.tokenizer.eos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
            "validate": validate,
            "recompute_log_prob": False,
            "global_steps": self.global_steps,
        }

    @step("gen")
    def _generate(self, prompts: DataProto) -> DataProto:
        """n samples of each prompt, those of one prompt adjacent: [prompts * n, T]."""
        samples, metrics = self.generate_rows(prompts, self.generation_meta(validate=False))
        self.metrics.update(metrics)
        self.metrics["training/weights_version"] = _one_version(samples)
        return samples

    def generate_rows(self, prompts: DataProto, meta: dict[str, Any]) -> tuple[DataProto, dict[str, float]]:
        """Samples of the prompts joined with the prompts' own columns; the rollout's metrics. Serves validation too."""
        gen_batch = self._get_gen_batch(prompts)
        gen_batch.meta_info.update(meta)
        n = gen_batch.meta_info["n"]
        padded, pad = pad_dataproto_to_divisor(gen_batch, self.ranks)
        output = unpad_dataproto(self.actor_rollout_wg.generate_sequences(padded), pad_size=pad * n)
        metrics = reduce_metrics(output.meta_info["metrics"]) if "metrics" in output.meta_info else {}
        output.meta_info = {}
        samples = prompts.repeat(n, interleave=True)
        if len(output) != len(samples):
            raise ValueError(
                f"rollout '{self.config.actor_rollout_ref.rollout.name}' returned {len(output)} rows for "
                f"{len(prompts)} prompts x n={n}; expected {len(samples)}, samples of one prompt adjacent."
            )
        for key in output.non_tensor_batch.keys() & samples.non_tensor_batch.keys():
            samples.non_tensor_batch.pop(key)  # the rollout may have added to it (extra_info): its column holds
        samples.union(output)
        if "response_mask" not in samples.batch:
            samples.batch["response_mask"] = compute_response_mask(samples)
        samples.meta_info["global_steps"] = self.global_steps
        samples.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return samples, metrics

    @step("reward")
    def _score(self, samples: DataProto, counts: DropCounts) -> tuple[DataProto, DropCounts]:
        """The samples with token_level_scores [B, R] and the reward's extra columns, whose means become metrics.

        Those whose reward failed are gone (reward_model.error=drop), with what cannot be trained on without them.
        """
        prompts = len(batching.group_rows(samples))
        logger.debug(f"step {self.global_steps}: {len(samples)} samples of {prompts} prompts go to the reward")
        self._add_rm_scores(samples)
        samples, scores, extras, failed = drop_failed(samples, *compute_reward(samples, self.reward_fn))
        self.metrics.update({"reward/errors": failed["error"], "reward/timeouts": failed["timeout"]})
        samples.batch["token_level_scores"] = scores
        self.reward_extra_keys = sorted(extras)
        for key, values in extras.items():
            samples.non_tensor_batch[key] = np.array(values)
            if key != "score" and samples.non_tensor_batch[key].dtype.kind in "bif" and len(samples):
                name = key if "/" in key else f"reward/{key}/mean"
                self.metrics[name] = float(samples.non_tensor_batch[key].mean())
        if not failed:
            return samples, counts
        samples, later = self._drop_lost(samples)
        return samples, counts.after_rewards(failed.total(), later)

    def _add_rm_scores(self, samples: DataProto) -> None:
        """rm_scores [B, R] of the reward model, where there is one; the reward manager takes or mixes them."""
        if self.rm_wg is None:
            return
        columns = ["raw_prompt"] if "raw_prompt" in samples.non_tensor_batch else []
        sent = samples.select(
            batch_keys=["input_ids", "attention_mask", "position_ids", "responses", "response_mask"],
            non_tensor_batch_keys=columns,
        )
        padded, pad = pad_dataproto_to_divisor(sent, self.rm_wg.world_size)
        samples.union(unpad_dataproto(self.rm_wg.compute_rm_score(padded), pad_size=pad))

    def _keeps_groups_whole(self) -> bool:
        return bool(self.config.actor_rollout_ref.actor.share_prompt_forward)

    @step("balance")
    def _balance_batch(self, batch: DataProto) -> None:
        """Reorder rows, in place, so that every rank gets about the same tokens of each mini-batch."""
        batch.batch["group_index"] = as_torch_index(batch.non_tensor_batch["uid"])
        tokens = batch.batch["attention_mask"].sum(-1).tolist()  # [B]
        weights = batching.share_weights(batch)
        uneven = any(len(rows) < self.n for rows in weights)
        order = batching.balanced_order(
            weights,
            self.ranks,
            self.config.actor_rollout_ref.actor.ppo_mini_batch_size,
            partial(get_seqlen_balanced_partitions, equal_size=True) if self.config.trainer.balance_batch else None,
            whole_groups=uneven or self._keeps_groups_whole(),
        )
        batch.reorder(torch.from_numpy(order))
        if not uneven:
            shares = np.split(order, self.ranks)
            self.metrics.update(log_seqlen_unbalance(tokens, [s.tolist() for s in shares], prefix="global_seqlen"))
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()

    @step("old_log_prob")
    def _compute_old_log_prob(self, batch: DataProto) -> DataProto:
        """old_log_probs [B, R], or nothing where the update's own detached log-probs are the same."""
        if self.correction is not None and self.correction.bypass_mode:
            apply_bypass_mode(batch)
            return DataProto()
        if not self.needs_old_log_probs or "old_log_probs" in batch.batch:
            return DataProto()
        output = self._on_ranks(self.actor_rollout_wg.compute_log_prob, batch)
        actor = self.config.actor_rollout_ref.actor
        entropy = core_algos.agg_loss(
            output.batch["entropys"], batch.batch["response_mask"], actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor,
        )  # fmt: skip
        self.metrics["actor/entropy"] = entropy.item()
        return output.select(batch_keys=["old_log_probs"], meta_info_keys=[])

    @step("ref")
    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """ref_log_prob [B, R]; nothing where a step before has asked for it."""
        if "ref_log_prob" in batch.batch:
            return DataProto()
        output = self._on_ranks(self.actor_rollout_wg.compute_ref_log_prob, batch)
        return output.select(batch_keys=["ref_log_prob"], meta_info_keys=[])

    @step("values")
    def _compute_values(self, batch: DataProto) -> DataProto:
        """values [B, R]."""
        return self._on_ranks(self.critic_wg.compute_values, batch).select(meta_info_keys=[])

    def _on_ranks(self, method, batch: DataProto) -> DataProto:
        filled, own = batching.fill_groups(batch, self.n)
        even = self.ranks * (self.n if self._keeps_groups_whole() else 1)  # one generation of DAPO may not be
        padded, pad = pad_dataproto_to_divisor(filled.select(non_tensor_batch_keys=[]), even)
        return unpad_dataproto(method(padded), pad_size=pad).select_idxs(own)

    @step("adv")
    def _assign_token_rewards(self, batch: DataProto) -> None:
        """token_level_rewards [B, R]: the scores, less the KL penalty where it is part of the reward."""
        if "token_level_rewards" in batch.batch:
            return
        if self.config.algorithm.use_kl_in_reward:
            _, metrics = apply_kl_penalty(batch, self.kl_ctrl, self.config.algorithm.kl_penalty)
            self.metrics.update(metrics)
        else:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]

    @step("adv")
    def _correct_rollout(self, batch: DataProto) -> None:
        """Compare the rollout's log-probs with the trained model's, where both are there; weigh, reject, as asked."""
        if "rollout_log_probs" not in batch.batch or "old_log_probs" not in batch.batch:
            return
        self.metrics.update(batching.rollout_probs_diff(batch))
        if self.correction is None:
            columns = (batch.batch[key] for key in ("old_log_probs", "rollout_log_probs", "response_mask"))
            self.metrics.update(compute_rollout_corr_metrics_from_logprobs(*columns))
        elif not self.correction.bypass_mode:  # there the update does it, with the log-probs of each step
            _, found = compute_rollout_correction_and_add_to_batch(batch, self.correction)
            self.metrics.update(found)

    @step("adv")
    def _assign_advantages(self, batch: DataProto) -> None:
        """advantages and returns [B, R]."""
        conf = self.config.algorithm
        by_std = conf.norm_adv_by_std_in_grpo
        compute_advantage(batch, conf.adv_estimator, conf.gamma, conf.lam, self.n, by_std, config=conf)
        if conf.use_pf_ppo:
            batching.draw_again(batch, self.n, conf.pf_ppo)

    @step("update_critic")
    def _update_critic(self, batch: DataProto) -> None:
        """One pass of value updates over the batch."""
        filled, _ = batching.fill_groups(batch, self.n)
        output = self.critic_wg.update_critic(filled.select(non_tensor_batch_keys=[]))
        self.metrics.update(reduce_metrics(output.meta_info["metrics"]))

    @step("update_actor")
    def _update_actor(self, batch: DataProto) -> None:
        """One pass of PPO updates over the batch."""
        filled, _ = batching.fill_groups(batch, self.n)
        output = self.actor_rollout_wg.update_actor(filled.select(non_tensor_batch_keys=[]))
        self.metrics.update(reduce_metrics(output.meta_info["metrics"]))


def _one_version(samples: DataProto) -> int:
    """The version of the weights (number of the last update in them) that made all samples."""
    versions = np.unique(samples.non_tensor_batch["weights_version"]).tolist()
    if len(versions) != 1:
        raise RuntimeError(f"one batch holds samples of several weights versions: {versions}")
    return int(versions[0])
