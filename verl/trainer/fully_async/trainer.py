"""FullyAsyncTrainer: trains batches of samples that servers on other ranks generate meanwhile."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from loguru import logger

from verl.config.asynchronous import AsyncPPOConfig
from verl.config.compose import to_settings
from verl.config.ppo import PPOConfig
from verl.data.rl_dataset import collate_fn
from verl.protocol import DataProto
from verl.reward.stream import can_stream
from verl.trainer.fully_async import journal
from verl.trainer.fully_async.phase import SAMPLE_ID, SeparateRolloutPhase
from verl.trainer.fully_async.samples import Group
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.ray_trainer import Metrics, RayPPOTrainer
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.weight_sync import WEIGHT_SYNCS
from verl.trainer.run.run_log import JsonlLog, update_best
from verl.trainer.run.timing import step

TRAINER = "trainer"


class FullyAsyncTrainer(RayPPOTrainer):
    """RayPPOTrainer whose steps take finished samples from a queue; `async_training` bounds their age.

    Weights go to the servers before the first step and after every trigger_parameter_sync_step steps.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config = to_settings(config, AsyncPPOConfig)
        super().__init__(config, *args, **kwargs)
        if self.reward_fn is not None and not can_stream(self.reward_fn):
            raise ValueError(
                f"reward_manager.name={config.reward_manager.name} scores batches, but asynchronous training grades "
                "each sample as it finishes. Set reward_manager.source=register and reward_manager.name=naive or dapo."
            )
        if self.total_training_steps < 1:
            raise ValueError(
                f"rollout.total_rollout_steps={config.rollout.total_rollout_steps} prompts do not fill an update of "
                f"{config.data.train_batch_size} (async_training.require_batches x ppo_mini_batch_size). Raise it, or "
                "set it to null."
            )
        if self.needs_greedy_baseline:
            name = config.algorithm.adv_estimator
            raise ValueError(f"algorithm.adv_estimator={name} needs greedy answers; it works in main_ppo only.")
        self.bound_settings = config.async_training
        self.rollout: SeparateRolloutPhase
        self.synced: int | None = None  # step after which weights were sent
        self.syncs = 0  # in this run
        self._in_step = 0  # 1 from a step's begin until its update is logged
        self.taken: list[str] = []  # ids of the step's samples
        self.totals: Counter[str] = Counter()
        folder = self.run_log.run_dir
        self.run_log.files += [folder / journal.JOURNAL_FILE, folder / journal.TIMELINE_FILE]
        self.record = JsonlLog(folder / "async_record.jsonl") if config.async_training.record else None
        if self.record is not None:
            self.run_log.files.append(self.record.path)
        self._saved: dict[str, Any] | None = None  # state of the checkpoint that is resumed
        self._validation: tuple[int, Future] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="validation")

    def _make_rollout_phase(self) -> SeparateRolloutPhase:
        total = self.total_training_steps * self.config.data.train_batch_size
        return SeparateRolloutPhase(self.config, self.tokenizer, self.prompt_stream, self.reward_fn, total)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        saved = self._saved
        folder = self.run_log.run_dir
        self.rollout.journal.open(folder / journal.JOURNAL_FILE, saved and saved["journal"], self.global_steps)
        self.rollout.timeline.file.open(folder / journal.TIMELINE_FILE, saved and saved["timeline_rows"])
        if saved is not None:
            self._restore(saved)
        elif self.global_steps:  # the checkpoint is of a synchronous run
            self.rollout.rollouter.restore([], 0, self.global_steps)
        if self.record is not None:
            self.record.cut_after(self.global_steps)

    def _restore(self, saved: dict[str, Any]) -> None:
        """Continue with the groups of a checkpoint, apart from those whose prompts are not known any more."""
        for group in saved["lost"]:
            for sample in group["samples"]:
                if sample["state"] not in journal.ENDS:
                    self.rollout.journal.record(sample["id"], journal.FAILED, reason="the prompt is not known")
        groups = []
        for group in saved["groups"]:
            row = DataProto.from_single_dict(collate_fn([self.train_dataset[group["item"]]]))
            row.non_tensor_batch["uid"] = np.array([str(group["number"])], dtype=object)
            groups.append(Group.load(group, row))
        self.rollout.rollouter.restore(groups, saved["dropped"], self.global_steps)
        self.totals = Counter(saved["totals"])

    def _send_first_weights(self) -> None:
        """Send the first weights, and let the servers begin."""
        with self._timed("update_weights"):
            self._send_weights()
        self.weight_sync.early = 1
        if not self.config.trainer.val_only:
            self.rollout.rollouter.begin()

    @property
    def _updates(self) -> int:
        """Steps that were done: between two steps their number, within a step one less."""
        return self.global_steps - self._in_step

    def _send_weights(self) -> None:
        self._collect_validation(wait=True)  # its samples are of one version
        version = self._updates
        self.rollout.timeline.enter(TRAINER, "sync", version)
        parts = self.actor_rollout_wg.export_weights(self.bound_settings.checkpoint_engine.device_buffer_size_M << 20)
        self.rollout.send_weights(version, parts[0], self.bound_settings.partial_rollout)
        self.rollout.timeline.enter(TRAINER, "idle", version)
        self.synced = self.rollout.synced = version
        self.syncs += 1

    @contextmanager
    def _rollout_awake(self) -> Iterator[Metrics]:
        """Send the weights, where that is due, and begin a validation of them; yields metrics."""
        self._in_step = 1
        sent = self._updates - self.synced >= self.bound_settings.trigger_parameter_sync_step
        if sent:
            with self._timed("update_weights"):
                self._send_weights()
            every = self.config.rollout.test_freq
            if self.val_reward_fn is not None and every > 0 and (self.syncs - 1) % every == 0:
                self._begin_validation()
        yield {WEIGHT_SYNCS: int(sent) + self.weight_sync.early}
        self.weight_sync.early = 0

    @step("gen")
    def _generate(self, prompts: DataProto) -> tuple[DataProto, Metrics]:
        """The samples of the step, once enough groups have finished: [prompts * n, T]."""
        self.rollout.timeline.enter(TRAINER, "idle", self._updates)
        groups = self.rollout.rollouter.take(self.global_steps, self.config.trainer.watchdog.generate)
        self.rollout.timeline.enter(TRAINER, "train", self._updates)
        if self.record is not None:
            saved = [group.saved() for group in groups]
            self.record.append([{"step": self.global_steps, "synced": self.synced, "groups": saved}])
        samples, metrics = self.rollout.batch_of(groups, self.global_steps)
        self.taken = [sample.id for group in groups for sample in group.samples if sample.state == journal.QUEUED]
        oldest = int(samples.non_tensor_batch["weights_version"].min())
        metrics |= {"training/weights_version": oldest, "training/epoch": groups[-1].epoch}
        return samples, metrics | self._async_metrics(samples)

    def _draw_prompts(self) -> tuple[None, Metrics]:
        """Nothing: the rollouter draws them."""
        return None, {}

    @step("update_actor")
    def _check_ages(self, batch: DataProto) -> None:
        self.rollout.bound.check(self.global_steps, int(batch.non_tensor_batch["weights_version"].min()))

    def _update_actor(self, batch: DataProto) -> Metrics:
        self._check_ages(batch)
        return super()._update_actor(batch)

    def _log(self, batch: DataProto, metrics: Metrics) -> None:
        self._in_step = 0
        records, columns = self.rollout.journal, batch.non_tensor_batch
        trained_versions = dict(zip(columns[SAMPLE_ID], columns["weights_version"].tolist(), strict=True))
        for sample in self.taken:
            if sample in trained_versions:
                records.record(sample, journal.TRAINED, trained_versions[sample], step=self.global_steps)
            else:
                records.record(sample, journal.FAILED, reason="not trainable", step=self.global_steps)
        self.taken = []
        records.check()
        super()._log(batch, metrics)

    def _async_metrics(self, samples: DataProto) -> Metrics:
        """Counts of samples, partial generations, seconds of samples, and shares of idle time since the last step."""
        current = self.rollout.synced
        versions = samples.non_tensor_batch["weights_version"]
        stale = versions < current
        self.totals["stale_trajectories"] += int(stale.sum())
        self.totals["stale_samples"] += len(set(samples.non_tensor_batch["uid"][stale]))
        counts, seconds = self.rollout.rollouter.take_counts()
        states = self.rollout.journal.counts
        metrics: Metrics = {
            "fully_async/count/stale_samples_processed": self.totals["stale_samples"],
            "fully_async/count/stale_trajectory_processed": self.totals["stale_trajectories"],
            "fully_async/count/current_param_version": current,
            "fully_async/count/dropped_stale_samples": states[journal.STALE],
            "fully_async/count/total_generated_samples": states[journal.QUEUED] + states[journal.TRAINED],
            "fully_async/count/versions_behind_max": self._updates - int(versions.min()),
            "fully_async/partial/total_partial_num": counts["partial"],
            "fully_async/partial/partial_ratio": counts["partial"] / max(1, counts["samples"]),
            "fully_async/partial/max_partial_span": counts["longest"],
        }
        if seconds:
            statistics = {"avg": np.mean(seconds), "max": max(seconds), "min": min(seconds)}
            statistics |= {f"tp{q}": np.percentile(seconds, q) for q in (50, 95, 99)}
            metrics |= {f"fully_async/processing_time/{name}": float(value) for name, value in statistics.items()}
        spent = self.rollout.timeline.take_seconds()
        for name, members in (("trainer", [TRAINER]), ("rollouter", self.rollout.server_names)):
            total = sum(value for (who, _), value in spent.items() if who in members)
            if total:
                metrics[f"{name}/idle_ratio"] = sum(spent[who, "idle"] for who in members) / total
        return metrics

    def _begin_validation(self) -> None:
        self._validation = self._updates, self._executor.submit(self.validator.run, self._updates)

    def _collect_validation(self, wait: bool = False) -> Metrics:
        """The metrics of the validation that runs, if it has ended; {} otherwise. With `wait` they are logged."""
        if self._validation is None or not (wait or self._validation[1].done()):
            return {}
        version, future = self._validation
        self._validation = None
        metrics = future.result()
        update_best(self.best, metrics, version, max)
        metrics = {**metrics, "val-aux/weights_version": version}
        if wait:
            self.run_log.write(self.global_steps - self._in_step, metrics)
        return metrics

    def _validate_if_due(self, metrics: Metrics) -> None:
        """Add the metrics of a validation that has ended. After the last step, validate its weights."""
        if self.val_reward_fn is None or self.config.rollout.test_freq <= 0:
            return
        if self.is_finished or self.stop_requested():
            self._collect_validation(wait=True)
        if not self.is_finished:
            metrics |= self._collect_validation()
            return
        self._in_step = 0
        if self.synced != self._updates:
            with self._timed("update_weights"):
                self._send_weights()
            metrics[WEIGHT_SYNCS] += 1
        self._begin_validation()
        self._validation[1].exception()  # waits
        metrics |= self._collect_validation()

    def _save_checkpoint(self) -> None:
        self._collect_validation(wait=True)
        self._saved = self.rollout.rollouter.hold()
        try:
            super()._save_checkpoint()
        finally:
            self.rollout.rollouter.release()

    def variant_state(self) -> dict[str, Any]:
        return {**self._saved, "timeline_rows": self.rollout.timeline.file.rows, "totals": dict(self.totals)}

    def load_variant_state(self, state: dict[str, Any], same_data: bool) -> None:
        if not state:  # of a synchronous run
            return
        lost = [group for group in state["groups"] if not same_data or group["item"] is None]
        if lost:
            why = "the data set has no column sample_index" if same_data else "they are rows of other data"
            logger.warning(f"{len(lost)} prompts of the checkpoint that were not trained yet are dropped: {why}")
        self._saved = {**state, "groups": [group for group in state["groups"] if group not in lost], "lost": lost}

    def _validate(self) -> Metrics:
        """Validation before the first step, or alone (trainer.val_only)."""
        self._in_step = 0
        metrics = self.validator.run(self.global_steps)
        update_best(self.best, metrics, self.global_steps, max)
        return metrics

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        super().shutdown()


class FullyAsyncTaskRunner(TaskRunner):
    """TaskRunner with FullyAsyncTrainer, whose ranks train only."""

    def add_actor_rollout_worker(self, config: PPOConfig) -> tuple[Any, Any]:
        from verl.roles.separate_actor import SeparateActorWorker

        _, group_class = super().add_actor_rollout_worker(config)
        self.role_worker_mapping[Role.ActorRollout] = ray.remote(SeparateActorWorker)
        return SeparateActorWorker, group_class

    def make_trainer(self, config: Any, stop_flag: Callable[[], bool] | None = None) -> Any:
        settings = to_settings(config, AsyncPPOConfig)
        if settings.trainer.device == "cpu":  # ranks of both kinds compute at the same time
            ranks = settings.trainer.n_gpus_per_node + settings.rollout.n_gpus_per_node
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        return self.build(FullyAsyncTrainer, settings, stop_flag)
