"""RayPPOTrainer: the RL loop, one short method per step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import psutil
import torch
from loguru import logger
from torch.utils.data import Dataset, Sampler
from tqdm import tqdm

from verl.agents.tools.journal import TOOL_JOURNAL
from verl.algos import advantage, aggregation, kl
from verl.algos.names import AdvantageEstimator
from verl.algos.rollout_correction import apply_bypass_mode
from verl.config.compose import to_omegaconf, to_settings
from verl.config.ppo import PPOConfig
from verl.config.roles import need_critic, serves_reward_model
from verl.profiling.performance import marked_timer
from verl.protocol import DataProto
from verl.protocol.serialization import object_array
from verl.reward.loading import load_served_reward
from verl.reward.rows import EXTRAS
from verl.reward.served import RewardModelManager
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo import batching, metric_utils, utils
from verl.trainer.ppo.batching import DropCounts, apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.data_loading import RLData
from verl.trainer.ppo.health import RunHealth
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_timing_metrics
from verl.trainer.ppo.rollout_phase import LateScores, RolloutPhase, without_lost
from verl.trainer.ppo.turn_rows import RankRows
from verl.trainer.ppo.utils import Role, WorkerType
from verl.trainer.ppo.weight_sync import WEIGHT_SYNCS, RolloutCheck, WeightSync
from verl.trainer.ppo.worker_groups import ResourcePoolManager, WorkerGroups, actor_role, classes, nsight_options
from verl.trainer.run.checkpoints import Checkpoints
from verl.trainer.run.failure import count_skipped
from verl.trainer.run.run_log import RunLog, update_best
from verl.trainer.run.timing import step, timed_step
from verl.trainer.run.validator import Validator
from verl.utils.jsonl import set_aside

__all__ = [
    "AdvantageEstimator", "RayPPOTrainer", "ResourcePoolManager", "Role", "apply_kl_penalty", "compute_advantage",
    "compute_data_metrics", "compute_response_mask", "compute_timing_metrics", "marked_timer",
]  # fmt: skip

Metrics = dict[str, Any]


class RayPPOTrainer:
    """Trains a policy by RL. The driver holds batches and advantages; models live in worker groups.

    A step of `fit` changes the batch in place and returns metrics; one that may drop rows returns the batch as well.
    Variants override a step: `_gather_batch` to draw prompts differently, `_make_rollout_phase` to generate elsewhere,
    `variant_state` and `load_variant_state` to save more.

    Args:
        config: a PPOConfig or a composed config; `self.config` is always the PPOConfig.
        role_worker_mapping: worker class of each role; the roles decide which models there are.
        reward_fn, val_reward_fn: score samples, (DataProto, return_dict=True) -> {reward_tensor [B, R],
            reward_extra_info}. Without `val_reward_fn` there is no validation.
        train_dataset, val_dataset, collate_fn, train_sampler: built from the config where they are None.
    """

    def __init__(
        self, config, tokenizer, role_worker_mapping: dict[Role, WorkerType],
        resource_pool_manager: ResourcePoolManager, ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
        processor=None, reward_fn=None, val_reward_fn=None,
        train_dataset: Dataset | None = None, val_dataset: Dataset | None = None,
        collate_fn=None, train_sampler: Sampler | None = None, device_name: str | None = None,
    ) -> None:  # fmt: skip
        self.config = config = to_settings(config, PPOConfig)
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
        self.use_critic = need_critic(config)
        self.actor_rollout_wg: RayWorkerGroup | None = None
        self.rollout: RolloutPhase | None = None
        self.critic_wg: RayWorkerGroup | None = None
        self.rm_wg: RayWorkerGroup | None = None
        self.n = config.actor_rollout_ref.rollout.n
        self.kl_ctrl = kl.get_kl_controller(config.algorithm.kl_ctrl)
        self.correction = utils.rollout_correction(config)
        self.keeps_groups_whole = bool(config.actor_rollout_ref.actor.share_prompt_forward)
        self.needs_old_log_probs = batching.needs_old_log_probs(config)
        self.late_scores = LateScores(self._score)
        self.rollout_check, self.health = RolloutCheck(config), RunHealth(config)
        self.needs_greedy_baseline = "reward_baselines" in advantage.inputs_of(config.algorithm.adv_estimator)
        self.global_steps = self.resumed_step = 0
        self.counters = {"requested": 0, "scored": 0, "dropped": 0, "nonfinite_in_row": 0, "skipped": 0}
        self.best: dict[str, Any] = {}
        # Set by the task runner, asked after each step.
        self.stop_requested: Callable[[], bool] = lambda: False
        self.data = RLData(config, tokenizer, processor, train_dataset, val_dataset, collate_fn, train_sampler)
        self.train_dataset, self.val_dataset = self.data.train_dataset, self.data.val_dataset
        self.train_dataloader, self.val_dataloader = self.data.train_loader, self.data.val_loader
        self.prompt_stream, self.total_training_steps = self.data.stream, self.data.total_steps
        self.run_log = RunLog(config, self.total_training_steps)

    def init_workers(self) -> None:
        """Create the resource pools, start the ranks, load the models."""
        pools = self.resource_pool_manager
        pools.use_gpu = self.device_name != "cpu" if pools.use_gpu is None else pools.use_gpu
        pools.create_resource_pool()
        roles = classes(self.config, self.role_worker_mapping, self.device_name, self.total_training_steps)
        self.groups = WorkerGroups(
            pools, roles, self.ray_worker_group_cls, device_name=self.device_name,
            ray_wait_register_center_timeout=self.config.trainer.ray_wait_register_center_timeout,
            time_limits=self.config.trainer.watchdog, nsight_options=nsight_options(self.config),
        )  # fmt: skip
        self.critic_wg = self.groups.roles.get(Role.Critic)
        self.rm_wg = self.groups.roles.get(Role.RewardModel)
        self.actor_rollout_wg = self.groups.roles[actor_role(self.role_worker_mapping)]
        for group in (self.critic_wg, self.rm_wg, self.actor_rollout_wg):  # a rollout engine takes what memory is left
            if group is not None:
                group.init_model()
        if serves_reward_model(self.config):
            address = RewardModelManager(self.config.reward_model, self.rm_wg).get_router_address()
            served = load_served_reward(to_omegaconf(self.config), self.tokenizer, address)
            self.reward_fn = self.val_reward_fn = served
        self.ranks = self.actor_rollout_wg.world_size
        parts = {"actor": self.actor_rollout_wg}
        if self.use_critic:
            parts["critic"] = self.critic_wg
        trainer = self.config.trainer
        self.checkpoints = Checkpoints(
            trainer, parts, self.prompt_stream, self.data.fingerprint, trainer.max_actor_ckpt_to_keep,
            delete_after_load=trainer.del_local_ckpt_after_load,
        )  # fmt: skip
        self.rank_rows = RankRows(self.n, self.ranks, self.keeps_groups_whole)
        self.rollout = self._make_rollout_phase()
        self.weight_sync = WeightSync(
            self.rollout_check, self.rollout, self.actor_rollout_wg, self.rank_rows, self.train_dataloader, self._timed
        )
        self.validator = Validator(self.config, self.val_dataloader, self.tokenizer, self.rollout, self.val_reward_fn)

    def _make_rollout_phase(self) -> RolloutPhase:
        return RolloutPhase(self.config, self.tokenizer, self.actor_rollout_wg, self.rm_wg)

    def shutdown(self) -> None:
        """End the ranks and free their pools."""
        if self.rollout is not None:
            self.rollout.close()
        if self.actor_rollout_wg is not None:
            self.groups.end()
            self.actor_rollout_wg = self.critic_wg = self.rm_wg = None

    def fit(self) -> None:
        """Train until the last step, or until a stop is requested, then leave checkpoint, metrics and report."""
        with self.run_log:
            self._load_checkpoint()
            self._send_first_weights()
            self._validate_before_training()
            for self.global_steps in self._remaining_steps():  # noqa: B020
                profiled = self.groups.profiled(
                    self.config.global_profiler, self.global_steps, self.is_finished, self._timed
                )
                with self._timed("step"), profiled:
                    with self._rollout_awake() as metrics:
                        batch, gathered = self._gather_batch()  # prompts, generate, reward: [prompts * n, T]
                    metrics |= gathered
                    metrics |= self._balance_batch(batch)  # reorders rows; uid keeps groups together
                    metrics |= self._compute_old_log_prob(batch)
                    if self.use_reference_policy:
                        metrics |= self._compute_ref_log_prob(batch)
                    if self.use_critic:
                        metrics |= self._compute_values(batch)
                    if self.late_scores.pending is not None:  # reward_model.launch_reward_fn_async
                        batch, scored = self._await_scores(batch)
                        metrics |= scored
                    metrics |= self._assign_token_rewards(batch)  # scores minus the KL penalty
                    metrics |= self._correct_rollout(batch)
                    metrics |= self._assign_advantages(batch)  # registry call, on the driver
                    if self.use_critic:
                        metrics |= self._update_critic(batch)
                    if self.global_steps >= self.config.trainer.critic_warmup:
                        metrics |= self._update_actor(batch)
                    self._watch_nonfinite(metrics)
                self._validate_if_due(metrics)
                self._log(batch, metrics)  # before saving: a checkpoint is never newer than the logged metrics
                self._publish_pending()
                if self.checkpoints.is_due(self.global_steps, self.is_finished, self.run_log.longest_step_s):
                    self._save_checkpoint()
            self._publish_pending(wait=True)
        self.run_log.print_end(self.resumed_step, self.checkpoints.saved_step)

    def _gather_batch(self) -> tuple[DataProto, Metrics]:
        """One step's samples with scores: prompts of one draw, n samples each, without those that were dropped."""
        prompts, metrics = self._draw_prompts()
        samples, gathered = self._gather_from(prompts)
        return samples, metrics | gathered

    def _gather_from(self, prompts: DataProto) -> tuple[DataProto, Metrics]:
        """Samples of these prompts that have a score and can be trained on; raises ValueError if there are none."""
        baselines = self._greedy_baselines(prompts) if self.needs_greedy_baseline else None
        samples, metrics = self._generate(prompts)
        if baselines is not None:
            batching.mark_without_baseline(samples, baselines)
        samples, counts = self._drop_lost(samples)
        if self.config.reward_model.launch_reward_fn_async and counts.scored:
            self.late_scores.begin(samples, counts)  # runs during the forwards; `_await_scores` takes the result
        elif counts.scored:  # else no sample is left, and check_any_scored raises
            samples, counts, scored = self._score(samples, counts)
            metrics |= scored
        metrics |= counts.metrics()
        counts.check_any_scored()
        if baselines is not None:
            own = [baselines[uid] for uid in samples.non_tensor_batch["uid"]]
            samples.batch["reward_baselines"] = torch.tensor(own, dtype=torch.float32)
        return samples, metrics

    def _drop_lost(self, samples: DataProto) -> tuple[DataProto, DropCounts]:
        """Leave out lost samples, groups that became too small and rows that the ranks cannot share evenly; counted."""
        return batching.drop_lost(samples, self.n, self.ranks, self.keeps_groups_whole)

    @step("gen_max")
    def _greedy_baselines(self, prompts: DataProto) -> dict[str, float]:
        """The score of each prompt's greedy answer, by uid, where it was not lost (ReMax, arXiv 2310.10505)."""
        answers, _ = self.rollout.generate(prompts, self.global_steps, False, self.reward_fn, n=1, do_sample=False)
        answers, lost = without_lost(answers)
        if lost == len(prompts):
            return {}
        answers, scores, _, _ = self.rollout.score(answers, self.reward_fn)
        return dict(zip(answers.non_tensor_batch["uid"].tolist(), scores.sum(-1).tolist(), strict=True))

    @step("data")
    def _draw_prompts(self) -> tuple[DataProto, Metrics]:
        metrics = {"training/epoch": self.prompt_stream.epoch}
        prompts = self.prompt_stream.draw()
        level = "INFO" if self.global_steps == self.resumed_step + 1 else "DEBUG"  # later, each step has its line
        logger.log(level, f"step {self.global_steps}: generating {self.n} answers to each of {len(prompts)} prompts")
        return prompts, metrics

    @step("gen")
    def _generate(self, prompts: DataProto) -> tuple[DataProto, Metrics]:
        """n samples of each prompt, those of one prompt adjacent: [prompts * n, T]."""
        samples, metrics = self.rollout.generate(prompts, self.global_steps, reward_fn=self.reward_fn)
        self.weight_sync.recent = prompts  # whose log-probs the next sync compares
        version = int(samples.non_tensor_batch["weights_version"][0])  # one for all: weights change between steps
        return samples, metrics | {"training/weights_version": version}

    def _send_first_weights(self) -> None:
        """Send the rollout its first weights and check them, before anything else is computed."""
        self.weight_sync.send_first()

    def _rollout_awake(self) -> AbstractContextManager[Metrics]:
        """The rollout holds the actor's newest weights within the block and sleeps after it; yields metrics."""
        return self.weight_sync.awake()

    @step("reward")
    def _score(self, samples: DataProto, counts: DropCounts) -> tuple[DataProto, DropCounts, Metrics]:
        """The samples with token_level_scores [B, R] and the reward's extras, whose means become metrics.

        Without the samples whose reward failed (reward_model.error=drop) and those that cannot be trained on then.
        """
        samples, scores, extras, failed = self.rollout.score(samples, self.reward_fn)
        metrics: Metrics = {"reward/errors": failed["error"], "reward/timeouts": failed["timeout"]}
        samples.batch["token_level_scores"] = scores
        rows = [{name: values[i] for name, values in extras.items()} for i in range(len(samples))]
        samples.non_tensor_batch[EXTRAS] = object_array(rows)
        metrics |= metric_utils.mean_extras(extras)
        if failed:
            samples, later = self._drop_lost(samples)
            counts = counts.after_rewards(failed.total(), later)
        return samples, counts, metrics

    @step("await_reward")
    def _await_scores(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """The batch with the scores that were computed meanwhile, and their metrics; see `_score`."""
        scored, metrics = self.late_scores.take(batch)
        if len(scored) < len(batch):
            metrics |= self._balance_batch(scored)
        return scored, metrics

    @step("balance")
    def _balance_batch(self, batch: DataProto) -> Metrics:
        """Reorder rows, in place, so that every rank gets about the same tokens of each mini-batch."""
        return batching.balance(
            batch, self.n, self.ranks, self.config.actor_rollout_ref.actor.ppo_mini_batch_size, self.keeps_groups_whole,
            by_length=self.config.trainer.balance_batch,
        )  # fmt: skip

    @step("old_log_prob")
    def _compute_old_log_prob(self, batch: DataProto) -> Metrics:
        """old_log_probs [B, R]: of a forward, or the rollout's in bypass mode and with use_rollout_log_probs.

        Nothing where an earlier step computed them (DAPO's filter), or where the update's own detached log-probs are
        the same.
        """
        bypasses = self.correction is not None and self.correction.bypass_mode
        if bypasses or self.config.actor_rollout_ref.actor.use_rollout_log_probs:
            apply_bypass_mode(batch)
            return {}
        if not self.needs_old_log_probs or "old_log_probs" in batch.batch:
            return {}
        output = self.rank_rows.forward(self.actor_rollout_wg.compute_log_prob, batch)
        batch.batch.update(output.batch.exclude("entropys"))
        actor = self.config.actor_rollout_ref.actor
        entropy = aggregation.agg_loss(
            output.batch["entropys"], batch.batch["response_mask"], actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor,
        )  # fmt: skip
        return {"actor/entropy": entropy.item()}

    @step("ref")
    def _compute_ref_log_prob(self, batch: DataProto) -> Metrics:
        """ref_log_prob [B, R], unless DAPO's filter computed it earlier."""
        if "ref_log_prob" not in batch.batch:
            output = self.rank_rows.forward(self.actor_rollout_wg.compute_ref_log_prob, batch)
            batch.batch["ref_log_prob"] = output.batch["ref_log_prob"]
        return {}

    @step("values")
    def _compute_values(self, batch: DataProto) -> Metrics:
        """values [B, R]."""
        batch.batch["values"] = self.rank_rows.forward(self.critic_wg.compute_values, batch).batch["values"]
        return {}

    @step("adv")
    def _assign_token_rewards(self, batch: DataProto) -> Metrics:
        """token_level_rewards [B, R]: the scores, minus the KL penalty where it is part of the reward."""
        if "token_level_rewards" in batch.batch:
            return {}
        if self.config.algorithm.use_kl_in_reward:
            return apply_kl_penalty(batch, self.kl_ctrl, self.config.algorithm.kl_penalty)[1]
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        return {}

    @step("adv")
    def _correct_rollout(self, batch: DataProto) -> Metrics:
        """Compare the rollout's log-probs with the trained model's, if both are given; weight or reject samples."""
        if "rollout_log_probs" not in batch.batch or "old_log_probs" not in batch.batch:
            return {}
        if self.correction is None or not self.correction.bypass_mode:
            self.rollout_check.watch(batch)
        return batching.correct_rollout(batch, self.correction)

    @step("adv")
    def _assign_advantages(self, batch: DataProto) -> Metrics:
        """advantages and returns [B, R]."""
        conf = self.config.algorithm
        compute_advantage(
            batch, conf.adv_estimator, conf.gamma, conf.lam, self.n, conf.norm_adv_by_std_in_grpo, config=conf
        )
        if conf.use_pf_ppo:
            batching.resample_by_score(batch, conf.pf_ppo)
        return {}

    @step("update_critic")
    def _update_critic(self, batch: DataProto) -> Metrics:
        """One pass of value updates over the batch."""
        return self.rank_rows.update(self.critic_wg.update_critic, batch)

    @step("update_actor")
    def _update_actor(self, batch: DataProto) -> Metrics:
        """One pass of PPO updates over the batch."""
        batching.add_loss_columns(batch, self.config.actor_rollout_ref.actor.policy_loss.loss_mode)
        return self.rank_rows.update(self.actor_rollout_wg.update_actor, batch)

    def _watch_nonfinite(self, metrics: Metrics) -> None:
        """Count the steps whose updates, of either model, were skipped; raise NonFiniteRun after too many.

        Too many are `trainer.nonfinite_steps_max` steps in a row with a loss or gradient that is not finite, or, after
        the last step, all steps: no weight was changed then.
        """
        nonfinite = any(value for name, value in metrics.items() if name.endswith("/nonfinite_steps"))
        empty = any(value for name, value in metrics.items() if name.endswith("/empty_steps"))
        changed = any(name in metrics for name in ("actor/grad_norm", "critic/grad_norm"))  # of an update that was made
        self.counters["skipped"] += (nonfinite or empty) and not changed
        count_skipped(
            self.counters, nonfinite, self.config.trainer.nonfinite_steps_max,
            f"{'loss or gradient was NaN or infinite' if nonfinite else 'no token was counted'} in",
            "those updates were skipped and the weights are unchanged. Lower the learning rate or check the rewards.",
            self.global_steps if self.is_finished else None,
        )  # fmt: skip

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return timed_step(name, self.run_log.timing, self.global_steps)

    def _remaining_steps(self) -> Iterator[int]:
        """Numbers of the steps still to do; ends early, with a checkpoint, when a stop is requested."""
        if self.config.trainer.val_only:
            return
        done, total = self.global_steps, self.total_training_steps
        for number in tqdm(range(done + 1, total + 1), "Training", total, initial=done, unit="step", disable=None):
            yield number
            if self.stop_requested():
                logger.warning(f"stop requested: step {number} is finished; the run is saved and ends")
                self._publish_pending(wait=True)
                if self.checkpoints.saved_step != number:
                    self._save_checkpoint()
                return

    def _due(self, every: int) -> bool:
        """Whether a thing done `every` steps is due: 0 or less is never, and the last step always."""
        return every > 0 and (self.is_finished or self.global_steps % every == 0)

    @property
    def is_finished(self) -> bool:
        """Whether the last step was done, or there was none to do (trainer.val_only)."""
        return self.global_steps >= self.total_training_steps or self.config.trainer.val_only

    def _validate_before_training(self) -> None:
        trainer = self.config.trainer
        fresh = self.global_steps == 0  # a resumed run has that row already
        if self.val_reward_fn is not None and (trainer.val_only or (trainer.val_before_train and fresh)):
            self.run_log.write(self.global_steps, self._validate())

    def _validate_if_due(self, metrics: Metrics) -> None:
        """Add the validation's metrics to those of the step; weight syncs of both are summed."""
        if self.val_reward_fn is not None and self._due(self.config.trainer.test_freq):
            validated = self._validate()
            validated[WEIGHT_SYNCS] += metrics[WEIGHT_SYNCS]
            metrics |= validated

    @step("testing")
    def _validate(self) -> Metrics:
        """Generate and score the validation set; its metrics by name."""
        with self._rollout_awake() as metrics:
            metrics |= self.validator.run(self.global_steps)
        update_best(self.best, metrics, self.global_steps, max)
        return metrics

    @step("save_checkpoint")
    def _save_checkpoint(self) -> None:
        """Publish global_step_N: models, data position, trainer state."""
        self.checkpoints.save(
            self.global_steps, counters=self.counters, best=self.best, kl_controller=self.kl_ctrl.state_dict(),
            variant=self.variant_state(), start=self.run_log.starts.number,
        )  # fmt: skip
        self.run_log.write_report()

    def _publish_pending(self, wait: bool = False) -> None:
        """Publish a checkpoint that is written in the background (checkpoint.async_save), once it is."""
        if self.checkpoints.pending is not None:
            with self._timed("save_checkpoint"):
                self.checkpoints.complete() if wait else self.checkpoints.advance()

    @step("load_checkpoint")
    def _load_checkpoint(self) -> None:
        """Resume the run as trainer.resume_mode says; later rows of the run's files are removed."""
        resumed = self.checkpoints.resume()
        if resumed is not None:
            state, same_data = resumed
            self.kl_ctrl.load_state_dict(state.kl_controller)
            self.counters |= state.counters  # one that an older checkpoint lacks stays 0
            self.best = state.best
            self.global_steps = self.resumed_step = state.global_step
            self.load_variant_state(state.variant, same_data)
        self.run_log.open(self.global_steps, self.checkpoints.origin)
        # The journal has tool calls of steps that run again. After a kill they are this run's own, and it reads them.
        if self.checkpoints.origin.leaves:
            set_aside(self.run_log.run_dir / TOOL_JOURNAL)
        self.health.replay(self.run_log.metrics_log.path)

    def variant_state(self) -> dict[str, Any]:
        """What a subclass adds to trainer_state.json (plain JSON values)."""
        return {}

    def load_variant_state(self, state: dict[str, Any], same_data: bool) -> None:
        """Restore what `variant_state` returned; without `same_data`, row numbers of the data set are invalid."""

    def _log(self, batch: DataProto, metrics: Metrics) -> None:
        """Close the step: hooks of data set and sampler, dumps, metrics to every logger."""
        self.data.update_from_batch(batch)
        with self._timed("dump_rollout_generations"):
            self.run_log.write_samples(batch, self.tokenizer, self.global_steps, self.is_finished)
        for key in ("requested", "scored", "dropped"):
            self.counters[key] += metrics[f"training/{key}_samples"]
        timing = self.run_log.take_timing()  # saving happens later: its time is logged with the next step
        ranks = self.resource_pool_manager.get_n_gpus()
        metrics["training/global_step"] = self.global_steps
        if overlong := getattr(self.train_dataset, "dropped_overlong", 0):
            metrics["training/overlong_prompts"] = overlong / (overlong + len(self.train_dataset))
        metrics["perf/cpu_memory_used_gb"] = psutil.virtual_memory().used / 1024**3
        corrections = {key: value for key, value in metrics.items() if key.startswith("rollout_corr/")}
        metrics |= {key.replace("rollout_corr/", "mismatch/"): value for key, value in corrections.items()}
        metrics |= compute_data_metrics(batch=batch, use_critic=self.use_critic)
        metrics |= self.health.measure(batch, self.global_steps, metrics)
        self.health.explain_no_reward(batch, self.tokenizer, self.global_steps)
        metrics |= compute_timing_metrics(batch=batch, timing_raw=timing)
        metrics |= metric_utils.compute_throughout_metrics(batch=batch, timing_raw=timing, n_gpus=ranks)
        self.run_log.write(self.global_steps, metrics)
