"""What surrounds the steps of a torchrun job: data position, checkpoints, the wish to stop, metrics, report."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from omegaconf import DictConfig
from tensordict import TensorDict
from torch.utils.data import Dataset

from verl.trainer.run import checkpointing
from verl.trainer.run.nonfinite import count_skipped
from verl.trainer.run.prompt_stream import PromptStream, data_fingerprint
from verl.trainer.run.run_files import RunFiles
from verl.trainer.sft.data import PaddedRows, RankShares, make_loader
from verl.trainer.sft.ranks import any_rank, from_first_rank, summed
from verl.utils.checkpoint.publish import CheckpointWriter
from verl.utils.redact import redact, redacted_yaml
from verl.utils.stop_signals import StopSignals
from verl.utils.tracking import Tracking
from verl.workers.engine import FSDPEngine


class RunKeeping:
    """Everything of a supervised run but what a step computes: a subclass has `training_step`, `validation_step`.

    Reads `config.data` and `config.trainer` as sft_trainer.yaml has them. All methods are called on all ranks; rank 0
    alone writes metrics and report.
    """

    config: DictConfig
    engine: FSDPEngine

    def training_step(self, batch: TensorDict) -> dict[str, float]:
        """One optimizer step on this rank's share [B, T] of a batch; metrics of the whole, the same on every rank."""
        raise NotImplementedError(f"{type(self).__name__} does not say what a training step is")

    def validation_step(self, batch: TensorDict) -> dict[str, float]:
        """Sums over this rank's learned tokens, by name of the metric that is their mean."""
        raise NotImplementedError(f"{type(self).__name__} does not say what a validation step is")

    def validation_means(self, sums: dict[str, float], tokens: float) -> dict[str, float]:
        """The metrics of the whole validation set from its sums over all ranks; `tokens`: learned ones."""
        return {name: value / tokens for name, value in sums.items()}

    def variant_state(self) -> dict[str, Any]:
        """What a subclass adds to trainer_state.json (plain JSON values)."""
        return {}

    def load_variant_state(self, state: dict[str, Any]) -> None:
        """Take back what `variant_state` gave."""

    def _init_run(self, train_dataset: Dataset, val_dataset: Dataset | None) -> None:
        data, trainer, ranks = self.config.data, self.config.trainer, self.engine.world_size
        size, workers = data.train_batch_size, data.dataloader_num_workers
        if size % ranks:
            raise ValueError(
                f"data.train_batch_size={size} cannot be shared evenly by {ranks} ranks. Use a multiple of {ranks}."
            )
        self.shares = RankShares(len(train_dataset), size, self.engine.rank, ranks, trainer.seed)
        self.train_stream = PromptStream(make_loader(train_dataset, self.shares, workers))
        self.val_loader = None
        if val_dataset is not None:
            val_shares = RankShares(len(val_dataset), size, self.engine.rank, ranks)
            self.val_loader = make_loader(PaddedRows(val_dataset), val_shares, workers)
        files = [data.train_files] if isinstance(data.train_files, str) else list(data.train_files)
        cut_by = {"train_batch_size": size, "seed": trainer.seed}
        self.fingerprint = {**data_fingerprint(files, len(train_dataset)), **cut_by}
        self.global_steps = 0
        self.counters = {"nonfinite_in_row": 0, "skipped": 0}
        self.best: dict[str, Any] = {}
        self.folder = Path(trainer.default_local_dir).expanduser().absolute()
        trainer.default_local_dir = str(self.folder)  # where a resume looks
        self.run_files = RunFiles(self.folder, self.total_training_steps, trainer.report)
        epoch = len(self.train_stream.loader)
        told = "{} training samples, {} batches an epoch, {} steps"
        logger.info(told, len(train_dataset), epoch, self.total_training_steps)

    def fit(self) -> None:
        """Train until the last step, or until a stop is asked for, then leave checkpoint, metrics and report."""
        with StopSignals() as self.signals, self._loggers_kept():
            self.load_checkpoint()
            for step in range(self.global_steps + 1, self.total_training_steps + 1):
                self.global_steps = step
                started = time.perf_counter()
                metrics = self.training_step(self._draw())
                metrics |= self._timing(time.perf_counter() - started, metrics)
                if self.val_loader is not None and self._due(self.config.trainer.test_freq):
                    metrics |= self._validate()
                self._log(metrics)  # before saving: a checkpoint never lies behind its step's metrics
                self._watch_skipped(metrics)
                stop = any_rank(self.signals.asked, self.engine.device)
                if stop or self._due(self.config.trainer.save_freq):
                    self.save_checkpoint(step)
                if stop:
                    logger.warning(f"stop asked for: step {step} is finished and saved, the run ends")
                    return

    def _draw(self) -> TensorDict:
        self.shares.epoch = self.train_stream.epoch
        return self.train_stream.draw().batch

    def _due(self, every: int) -> bool:
        last = self.global_steps >= self.total_training_steps
        return last or (every > 0 and self.global_steps % every == 0)

    def _timing(self, seconds: float, metrics: dict[str, float]) -> dict[str, float]:
        rate = metrics["train/global_tokens"] / seconds / self.engine.world_size
        found = {"train/time(s)": seconds, "perf/throughput": rate, "training/epoch": self.train_stream.epoch}
        if self.engine.device.type == "cuda":
            found["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 1024**3
        return found

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        """Means over the learned tokens of the whole validation set."""
        sums: dict[str, float] = defaultdict(float)
        with self.engine.eval_mode():
            for rows in self.val_loader:
                batch = TensorDict(rows, batch_size=len(rows["loss_mask"]))
                sums["tokens"] += float(batch["loss_mask"][:, 1:].sum())
                for name, value in self.validation_step(batch).items():
                    sums[name] += value
        total = summed(sums, self.engine.device)
        tokens = total.pop("tokens")
        if tokens == 0:
            raise ValueError("data.val_files: no row has a learned token within data.max_length; raise it.")
        found = self.validation_means(total, tokens)
        for name, value in found.items():
            if name not in self.best or value < self.best[name]["value"]:
                self.best[name] = {"value": value, "step": self.global_steps}
        return found

    def _watch_skipped(self, metrics: dict[str, float]) -> None:
        """Count skipped steps in a row; end the run at `trainer.nonfinite_steps_max`."""
        skipped = int(metrics["train/skipped_steps"])
        self.counters["skipped"] += skipped
        count_skipped(
            self.counters, bool(skipped), self.config.trainer.nonfinite_steps_max,
            "loss or gradient was NaN or infinite, or nothing was learned, in",
            "they were skipped, the weights are as before. Lower optim.lr or look at the data.",
        )  # fmt: skip

    def _log(self, metrics: dict[str, float]) -> None:
        if self.engine.rank == 0:
            self.run_files.log_metrics(self.global_steps, metrics)
            self.tracking.log(metrics, self.global_steps)

    @contextmanager
    def _loggers_kept(self) -> Iterator[None]:
        """The loggers' life on rank 0: whatever ends the run, they are closed and the report is made."""
        if self.engine.rank:
            yield
            return
        run = self.config.trainer
        backends = [run.logger] if isinstance(run.logger, str) else list(run.logger)
        self.tracking = Tracking(run.project_name, run.experiment_name, backends, redact(self.config))
        try:
            yield
        finally:
            self.tracking.finish()
            self.run_files.write_report()

    def save_checkpoint(self, step: int) -> None:
        """Publish global_step_<step> whole: model, optimizer, schedule, every rank's random numbers, data position."""
        run, first = self.config.trainer, self.engine.rank == 0
        writer = CheckpointWriter(self.folder, step, run.max_ckpt_to_keep)
        if first:
            writer.__enter__()
        dist.barrier()
        try:
            self.engine.save_checkpoint(str(writer.path), None, step, None)
            if first:
                state = checkpointing.TrainerState(
                    global_step=step, position=self.train_stream.position(), counters=self.counters, best=self.best,
                    data=self.fingerprint, variant=self.variant_state(),
                )  # fmt: skip
                checkpointing.write_trainer_state(writer.path, state, self.train_stream.loader.state_dict())
        except BaseException as error:
            if first:
                writer.__exit__(type(error), error, error.__traceback__)
            raise
        dist.barrier()
        if first:
            writer.__exit__(None, None, None)
            self.run_files.write_report()
        dist.barrier()

    def load_checkpoint(self) -> None:
        """Take up the run where trainer.resume_mode says; the run's files are cut to that step."""
        trainer = self.config.trainer
        path = from_first_rank(lambda: checkpointing.checkpoint_to_resume(trainer))
        if path is not None:
            logger.info(f"resuming from {path}")
            state, loader_state = checkpointing.read_trainer_state(path, with_rng=False)
            if checkpointing.check_same_data(state.data, self.fingerprint, trainer.allow_data_change):
                self.train_stream.resume(state.position, loader_state)
            else:
                self.train_stream.restart(state.position)
            self.engine.load_checkpoint(str(path))
            self.global_steps, self.counters, self.best = state.global_step, state.counters, state.best
            self.load_variant_state(state.variant)
        if self.engine.rank == 0:
            self.run_files.open(redacted_yaml(self.config), self.global_steps)
