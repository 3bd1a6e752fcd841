"""What surrounds the algorithm in a run: data, validation, checkpoints, dumps, logs, the order to stop."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil
from loguru import logger
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.planning.batch_arithmetic import steps_in_all
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.validation import ValidationPass, dump_rows
from verl.trainer.run import checkpointing
from verl.trainer.run.nonfinite import count_skipped
from verl.trainer.run.prompt_stream import PromptStream, data_fingerprint
from verl.trainer.run.run_files import RunFiles, write_jsonl
from verl.trainer.run.timing import step, timed_step
from verl.utils.checkpoint.publish import CheckpointWriter
from verl.utils.dataset.builders import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn
from verl.utils.redact import redact, redacted_yaml
from verl.utils.tracking import Tracking, ValidationGenerationsLogger


@runtime_checkable
class LearnsFromBatches(Protocol):
    """A data set that looks at every finished batch."""

    def on_batch_end(self, batch: DataProto) -> None: ...


@runtime_checkable
class Curriculum(Protocol):
    """A sampler that looks at every finished batch."""

    def update(self, batch: DataProto) -> None: ...


class RunKeeping:
    """The part of the trainer that does not know what is trained; `fit` in the subclass calls it."""

    def _init_run(self, train_dataset, val_dataset, collate_fn, train_sampler) -> None:
        self.global_steps = 0
        self.metrics: dict[str, Any] = {}
        self.timing_raw: defaultdict[str, float] = defaultdict(float)
        self.reward_extra_keys: list[str] = []
        self.counters = {"requested": 0, "scored": 0, "dropped": 0, "nonfinite_in_row": 0}
        self.best: dict[str, Any] = {}
        self.saved_step: int | None = None
        self.stop_requested: Callable[[], bool] = lambda: False
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        trainer = self.config.trainer
        self.run_files = RunFiles(trainer.default_local_dir, self.total_training_steps, trainer.report)

    def _create_dataloader(self, train_dataset, val_dataset, collate_fn, train_sampler) -> None:
        """Loaders of both data sets; what is not given is made from the configuration."""
        data, trainer = self.config.data, self.config.trainer
        make, parts = create_rl_dataset, (data, self.tokenizer, self.processor)
        if train_dataset is None:
            train_dataset = make(data.train_files, *parts, True, data.train_max_samples)
        if val_dataset is None:
            val_dataset = make(data.val_files, *parts, False, data.val_max_samples)
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.train_sampler = create_rl_sampler(data, train_dataset) if train_sampler is None else train_sampler

        batch_size = data.gen_batch_size if data.gen_batch_size else data.train_batch_size
        if len(train_dataset) < batch_size:
            raise ValueError(
                f"data.train_files gives {len(train_dataset)} prompts, fewer than one batch of {batch_size} "
                "(data.train_batch_size); lower the batch size or add prompts."
            )
        options = {
            "num_workers": data.dataloader_num_workers,
            "collate_fn": default_collate_fn if collate_fn is None else collate_fn,
        }
        self.train_dataloader = StatefulDataLoader(
            train_dataset, batch_size=batch_size, sampler=self.train_sampler, drop_last=True, **options
        )
        val_batch = data.val_batch_size if data.val_batch_size else max(1, len(val_dataset))
        self.val_dataloader = StatefulDataLoader(
            val_dataset, batch_size=val_batch, shuffle=data.validation_shuffle, drop_last=False, **options
        )
        self.prompt_stream = PromptStream(self.train_dataloader)
        self.fingerprint = data_fingerprint(data.train_files, len(train_dataset))
        wanted = trainer.total_training_steps
        self.total_training_steps = steps_in_all(len(self.train_dataloader), self.config) if wanted is None else wanted
        logger.info(
            f"{len(train_dataset)} training prompts, {len(self.train_dataloader)} batches an epoch, "
            f"{self.total_training_steps} steps; {len(val_dataset)} validation prompts"
        )

    def _remaining_steps(self) -> Iterator[int]:
        """Numbers of the steps still to do; ends early, with a checkpoint, when a stop was asked for."""
        if self.config.trainer.val_only:
            return
        for number in range(self.global_steps + 1, self.total_training_steps + 1):
            yield number
            if self.stop_requested():
                logger.warning(f"stop asked for: step {number} is finished and saved, the run ends")
                if self.saved_step != number:
                    self._save_checkpoint()
                return

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return timed_step(name, self.timing_raw, self.global_steps)

    @contextmanager
    def _run_files_kept(self) -> Iterator[None]:
        """The loggers' life: whatever ends the run, they are closed and the report is made."""
        trainer = self.config.trainer
        self.tracking = Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            default_backend=list(trainer.logger),
            config=redact(self.config),
        )
        try:
            yield
        finally:
            self.tracking.finish()
            self.run_files.write_report()

    @property
    def _is_last_step(self) -> bool:
        return self.global_steps >= self.total_training_steps

    def _due(self, every: int) -> bool:
        return every > 0 and (self._is_last_step or self.global_steps % every == 0)

    def _validate_before_training(self) -> None:
        trainer = self.config.trainer
        fresh = self.global_steps == 0  # a resumed run has that row already
        if self.val_reward_fn is not None and (trainer.val_only or (trainer.val_before_train and fresh)):
            self._log_rows(self._validate())

    def _validate_if_due(self) -> None:
        if self.val_reward_fn is not None and self._due(self.config.trainer.test_freq):
            self.metrics.update(self._validate())

    @step("testing")
    def _validate(self) -> dict[str, float]:
        """Generate and score the validation set; its figures by name."""
        validation = ValidationPass(self)
        metrics = validation.run()
        trainer = self.config.trainer
        rows = validation.rows(self.global_steps)
        if trainer.validation_data_dir:
            write_jsonl(Path(trainer.validation_data_dir).expanduser() / f"{self.global_steps}.jsonl", rows)
        if trainer.log_val_generations:  # the same samples of the set each time
            shown = [(row["input"], row["output"], row["score"]) for row in rows[: trainer.log_val_generations]]
            loggers = ValidationGenerationsLogger(trainer.project_name, trainer.experiment_name)
            loggers.log(trainer.logger, shown, self.global_steps)
        for name in sorted(metrics):
            if name.startswith("val-core/") and (name not in self.best or metrics[name] > self.best[name]["value"]):
                self.best[name] = {"value": metrics[name], "step": self.global_steps}
        return metrics

    def _save_if_due(self) -> None:
        if self._due(self.config.trainer.save_freq):
            self._save_checkpoint()

    @step("save_checkpoint")
    def _save_checkpoint(self) -> None:
        """Publish global_step_N whole: actor, data position, trainer state."""
        trainer = self.config.trainer
        with CheckpointWriter(trainer.default_local_dir, self.global_steps, trainer.max_actor_ckpt_to_keep) as w:
            self.actor_rollout_wg.save_checkpoint(os.path.join(w.path, "actor"), None, self.global_steps, None)
            if self.use_critic:
                self.critic_wg.save_checkpoint(os.path.join(w.path, "critic"), None, self.global_steps, None)
            checkpointing.write_trainer_state(w.path, self._trainer_state(), self.train_dataloader.state_dict())
        self.saved_step = self.global_steps
        self.run_files.write_report()

    def _trainer_state(self) -> checkpointing.TrainerState:
        return checkpointing.TrainerState(
            global_step=self.global_steps,
            position=self.prompt_stream.position(),
            kl_controller=self.kl_ctrl.state_dict(),
            counters=self.counters,
            best=self.best,
            data=self.fingerprint,
            variant=self.variant_state(),
        )

    def variant_state(self) -> dict[str, Any]:
        """What a subclass adds to trainer_state.json (plain JSON values)."""
        return {}

    def load_variant_state(self, state: dict[str, Any], same_data: bool) -> None:
        """Take back what `variant_state` gave; without `same_data`, numbers of the data set's rows mean others now."""

    @step("load_checkpoint")
    def _load_checkpoint(self) -> None:
        """Take up the run where trainer.resume_mode says; the run files are cut to that step."""
        trainer = self.config.trainer
        path = checkpointing.checkpoint_to_resume(trainer)
        if path is not None:
            logger.info(f"resuming from {path}")
            state, loader_state = checkpointing.read_trainer_state(path)
            same_data = checkpointing.check_same_data(state.data, self.fingerprint, trainer.allow_data_change)
            if same_data:
                self.prompt_stream.resume(state.position, loader_state)
            else:
                self.prompt_stream.restart(state.position)
            self.actor_rollout_wg.load_checkpoint(str(path / "actor"), None, trainer.del_local_ckpt_after_load)
            if self.use_critic:
                self.critic_wg.load_checkpoint(str(path / "critic"), None, trainer.del_local_ckpt_after_load)
            self.kl_ctrl.load_state_dict(state.kl_controller)
            self.counters, self.best = state.counters, state.best
            self.global_steps = self.saved_step = state.global_step
            self.load_variant_state(state.variant, same_data)
        self.run_files.open(redacted_yaml(self.config), self.global_steps)

    def _watch_nonfinite(self) -> None:
        """Count steps with skipped updates, of either model, in a row; end the run at `trainer.nonfinite_steps_max`."""
        skipped = any(value for name, value in self.metrics.items() if name.endswith("/nonfinite_steps"))
        count_skipped(
            self.counters, skipped, self.config.trainer.nonfinite_steps_max, "loss or gradient was NaN or infinite in",
            "those updates were skipped and the weights are as before. Lower the learning rate or look at the rewards.",
        )  # fmt: skip

    def _log(self, batch: DataProto) -> None:
        """Close the step: hooks of data set and sampler, dumps, metrics to every logger."""
        if isinstance(self.train_sampler, Curriculum):
            self.train_sampler.update(batch)
        if isinstance(self.train_dataset, LearnsFromBatches):
            self.train_dataset.on_batch_end(batch)
        self._log_rollout_data(batch)
        for key in ("requested", "scored", "dropped"):
            self.counters[key] += self.metrics[f"training/{key}_samples"]
        self.metrics["training/global_step"] = self.global_steps
        self.metrics["perf/cpu_memory_used_gb"] = psutil.virtual_memory().used / 1024**3
        self.metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
        self.metrics.update(compute_timing_metrics(batch=batch, timing_raw=self.timing_raw))
        ranks = self.resource_pool_manager.get_n_gpus()
        self.metrics.update(compute_throughout_metrics(batch=batch, timing_raw=self.timing_raw, n_gpus=ranks))
        self._log_rows(self.metrics)
        self.metrics = {}
        self.timing_raw.clear()  # what saving takes from here on is told with the next step

    def _log_rows(self, metrics: dict[str, Any]) -> None:
        self.run_files.log_metrics(self.global_steps, metrics)
        self.tracking.log(data=metrics, step=self.global_steps)

    @step("dump_rollout_generations")
    def _log_rollout_data(self, batch: DataProto) -> None:
        """Dump the step's samples where asked, and keep a few of them for the report."""
        directory = self.config.trainer.rollout_data_dir
        sampled = self.run_files.samples_due(self.global_steps, self._is_last_step)
        if not directory and not sampled:
            return
        scores = batch.batch["token_level_scores"].sum(-1).tolist()
        extras = {key: batch.non_tensor_batch[key].tolist() for key in self.reward_extra_keys}
        texts, truths = self.decode_texts(batch), self.ground_truths(batch)
        if directory:
            rows = dump_rows(texts, truths, scores, extras, self.global_steps)
            write_jsonl(Path(directory).expanduser() / f"{self.global_steps}.jsonl", rows)
        if sampled:
            columns = batch.non_tensor_batch
            coloured = columns["spd_text"] if "spd_text" in columns else [None] * len(batch)
            rows = [
                {
                    "prompt": prompt,
                    "response": response,
                    "segments": None if isinstance(coloured[i], str) else coloured[i],
                    "score": scores[i],
                    "ground_truth": truths[i],
                    "extras": {key: values[i] for key, values in extras.items()},
                }
                for i, (prompt, response) in enumerate(texts)
            ]
            self.run_files.log_samples(self.global_steps, rows)

    def decode_texts(self, samples: DataProto) -> list[tuple[str, str]]:
        """(prompt, response) of each row as text; a rollout whose responses are no tokens gives `spd_text` instead."""
        decode = self.tokenizer.batch_decode
        prompts = decode(samples.batch["prompts"], skip_special_tokens=True)
        if "spd_text" in samples.non_tensor_batch:
            responses = [plain_text(value) for value in samples.non_tensor_batch["spd_text"]]
        else:
            mask = samples.batch["attention_mask"][:, -samples.batch["responses"].size(1) :].bool()
            rows = zip(samples.batch["responses"], mask, strict=True)
            responses = decode([ids[kept] for ids, kept in rows], skip_special_tokens=True)
        return list(zip(prompts, responses, strict=True))

    def ground_truths(self, samples: DataProto) -> list[Any]:
        """`reward_model.ground_truth` of each row, None where the data has none."""
        if "reward_model" not in samples.non_tensor_batch:
            return [None] * len(samples)
        return [row["ground_truth"] for row in samples.non_tensor_batch["reward_model"]]


def plain_text(value: Any) -> str:
    """A text, or the texts of coloured segments one after the other."""
    return value if isinstance(value, str) else " ".join(segment["text"] for segment in value)
