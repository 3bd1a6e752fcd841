"""FSDPSFTTrainer: supervised fine-tuning of a causal language model on torchrun ranks."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset
from tqdm import tqdm

from verl.config.compose import to_settings, with_values
from verl.config.sft import SFTConfig
from verl.config.sft_engine import engine_parts, samples_per_forward, steps_of_epochs
from verl.data.fingerprint import data_fingerprint
from verl.planning.checks import Findings
from verl.profiling.performance import peak_memory
from verl.protocol import DataProto
from verl.trainer.run.checkpoints import Checkpoints
from verl.trainer.run.failure import count_skipped
from verl.trainer.run.prompt_stream import PromptStream
from verl.trainer.run.ranks import all_reduce_max, all_reduce_values, any_rank
from verl.trainer.run.run_log import RunLog, update_best
from verl.trainer.run.stop_signals import StopSignals
from verl.trainer.sft.data import PaddedRows, RankShares, create_sft_dataset, cut, make_loader
from verl.training.engine import FSDPEngine
from verl.training.flops_counter import FlopsCounter
from verl.training.policy import CausalLMPolicy
from verl.training.policy.base import Policy
from verl.training.policy.packing import ON_HOST, OnHost, on_host, to_device
from verl.utils.fs import copy_to_local
from verl.utils.problems import Problem
from verl.utils.tokenizer import hf_tokenizer, use_chat_template


class FSDPSFTTrainer:
    """Next-token loss on learned tokens (loss_mask 1), divided by their number in the global batch.

    So neither the cut into micro-batches, nor packing, nor the number of ranks changes it. A variant overrides
    `step_inputs` and `backward` (what a micro-batch adds to the gradient), `summed_loss`, `validation_step` and
    `validation_means`, `build_dataset`, `engine_parts`, `cut`, `problems`, or the types below. All methods are called
    on all ranks.
    `config` is a tree of `config_type`, or a composed one, of which `self.config` is the typed tree.
    `device_mesh` (last dimension "fsdp") shards the weights; None makes one by model.fsdp_config.fsdp_size.
    `ulysses_device_mesh` is taken for verl's callers: ulysses_sequence_parallel_size makes the groups.
    """

    config_type: type[SFTConfig] = SFTConfig  # dataclass of the whole config tree, which checks keys and values
    policy_type: type[Policy] = CausalLMPolicy  # how a batch becomes log-probs
    shares_type: type[RankShares] = RankShares  # which rows are in a batch

    def __init__(
        self, config: SFTConfig, device_mesh: DeviceMesh | None, ulysses_device_mesh: DeviceMesh | None,
        tokenizer: Any, train_dataset: Dataset, val_dataset: Dataset | None = None,
    ) -> None:
        config = to_settings(config, self.config_type)
        self.tokenizer = tokenizer
        batch_size = config.data.train_batch_size
        if len(train_dataset) < batch_size:
            raise ValueError(
                f"data.train_files gives {len(train_dataset)} samples, fewer than one batch of {batch_size} "
                "(data.train_batch_size); lower the batch size or add samples."
            )
        steps_per_epoch = len(train_dataset) // batch_size
        folder = Path(config.trainer.default_local_dir).expanduser().absolute()  # also where a resume looks
        frequencies = steps_of_epochs(config.trainer, steps_per_epoch)
        changes = {f"trainer.{key}": steps for key, steps in frequencies.items()}
        config = with_values(config, {"trainer.default_local_dir": str(folder), **changes})
        run = config.trainer
        self.total_training_steps = run.total_training_steps or steps_per_epoch * run.total_epochs
        self._build_model(config, device_mesh)
        samples = samples_per_forward(config.data, self.engine.get_data_parallel_size())
        self.config = config = with_values(config, {"data.micro_batch_size_per_gpu": samples})
        self._build_loaders(train_dataset, val_dataset)
        self.global_steps = 0
        self.counters = {"nonfinite_in_row": 0, "skipped": 0}
        self.best: dict[str, Any] = {}
        fingerprint = data_fingerprint(config.data.train_files, len(train_dataset))
        fingerprint |= {"train_batch_size": batch_size, "seed": run.seed}
        self.checkpoints = Checkpoints(
            run, {"": self.engine}, self.train_stream, fingerprint, run.max_ckpt_to_keep, restores_rng=False
        )
        self.run_log = RunLog(config, self.total_training_steps, writes=self.engine.rank == 0)
        logger.info(
            f"{len(train_dataset)} training samples, {len(self.train_stream.loader)} batches an epoch, "
            f"{self.total_training_steps} steps"
        )

    def _build_model(self, config: SFTConfig, mesh: DeviceMesh | None) -> None:
        model, *parts = self.engine_parts(config)
        self.engine = FSDPEngine.of_section("model", model, *parts, device=config.trainer.device, mesh=mesh)
        self.policy = self.policy_type()
        self.policy.set_forward(remove_padding=model.use_remove_padding, share_prompt=False)
        with self.engine.eval_mode():  # there it is known whether ranks share sequences
            self.policy.bind(self.engine.module)
            self.policy.compare_layouts(self.engine.module, self.engine.device)
        if config.data.packing and not self.policy.remove_padding:
            raise ValueError(
                "data.packing=true: this model cannot compute batches without padding (see above). Set it to false."
            )

    def _build_loaders(self, train_dataset: Dataset, val_dataset: Dataset | None) -> None:
        """This rank's share of both data sets; raises ValueError if the ranks cannot share a batch evenly."""
        data, rank, ranks = self.config.data, self.engine.rank, self.engine.world_size
        size, workers = data.train_batch_size, data.dataloader_num_workers
        if size % ranks:
            raise ValueError(
                f"data.train_batch_size={size} cannot be shared evenly by {ranks} ranks. Use a multiple of {ranks}."
            )
        self.shares = self.shares_type(len(train_dataset), size, rank, ranks, self.config.trainer.seed)
        self.train_stream = PromptStream(make_loader(train_dataset, self.shares, workers))
        self.val_loader = None
        if val_dataset is not None:
            val_shares = RankShares(len(val_dataset), size, rank, ranks)
            self.val_loader = make_loader(PaddedRows(val_dataset), val_shares, workers)

    @classmethod
    def problems(cls, config: SFTConfig, findings: Findings) -> Iterable[Problem]:
        """Further problems of a run, at a start and in a dry run. `findings` has its model's tokenizer and hf_config,
        None if they could not be loaded."""
        return ()

    @classmethod
    def has_plain_loss(cls) -> bool:
        """Whether a micro-batch is computed as here, which the memory estimate of a dry run can trace."""
        return cls.backward is FSDPSFTTrainer.backward

    @classmethod
    def build_tokenizer(cls, config: SFTConfig) -> Any:
        """The tokenizer of model.partial_pretrain, with data.chat_template where that is set."""
        path = copy_to_local(config.model.partial_pretrain)
        tokenizer = hf_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
        use_chat_template(tokenizer, config.data.chat_template)
        return tokenizer

    @classmethod
    def build_dataset(cls, files: Any, config: SFTConfig, tokenizer: Any, max_samples: int = -1) -> Dataset:
        """The data set of these files; rows are dicts of tensors, input_ids, attention_mask, loss_mask among them."""
        return create_sft_dataset(files, config.data, tokenizer, max_samples)

    @classmethod
    def build_val_dataset(cls, files: Any, config: SFTConfig, tokenizer: Any, max_samples: int = -1) -> Dataset:
        """The same for validation."""
        return cls.build_dataset(files, config, tokenizer, max_samples)

    def engine_parts(self, config: SFTConfig) -> tuple[Any, ...]:
        """Settings of model, engine, optimizer and checkpoints."""
        return engine_parts(config, self.tokenizer, self.total_training_steps)

    def cut(self, batch: TensorDict) -> list[TensorDict]:
        """Micro-batches [b, T] of a rank's share [B, L] of a batch, equally many on every rank."""
        return cut(batch, self.config.data)

    def fit(self) -> int:
        """Train until the last step, or until a stop is requested, then leave checkpoint, metrics and report.

        Returns the exit code: 0, or that of the signal that requested the stop.
        """
        with self.run_log:
            self.load_checkpoint()
            resumed = self.global_steps
            code = self._train()
            self.checkpoints.complete()
        self.run_log.print_end(resumed, self.checkpoints.saved_step)
        return code

    def _train(self) -> int:
        """The remaining steps; the exit code of a stop that was requested, else 0."""
        with StopSignals() as signals:
            done, total = self.global_steps, self.total_training_steps
            if self.ends_early():  # a run that has ended, started again
                return 0
            if self.val_loader is not None and self.config.trainer.val_before_train and done == 0:
                self.run_log.write(0, self._validate())
            hidden = None if self.engine.rank == 0 else True  # None: shown on a terminal only
            steps = tqdm(range(done + 1, total + 1), "Training", total, initial=done, unit="step", disable=hidden)
            for self.global_steps in steps:
                metrics = self._timed_step()
                if self.val_loader is not None and self._due(self.config.trainer.test_freq):
                    metrics |= self._validate()
                self.run_log.write(self.global_steps, metrics)  # before saving: a checkpoint is never newer than this
                stop, ended = any_rank(signals.stop_requested, self.engine.device), self.ends_early()
                last = ended or self.global_steps >= total
                skipped = metrics["train/skipped_steps"] > 0
                self.counters["skipped"] += skipped
                count_skipped(
                    self.counters, skipped, self.config.trainer.nonfinite_steps_max,
                    "loss or gradient was NaN or infinite, or no token was learned, in",
                    "they were skipped, the weights are unchanged. Lower optim.lr or check the data.",
                    self.global_steps if last else None,
                )  # fmt: skip
                self.checkpoints.advance()
                if stop or self.checkpoints.is_due(self.global_steps, last):
                    self.save_checkpoint(self.global_steps)
                if ended:
                    return 0
                if stop and not last:
                    logger.warning(f"stop requested: step {self.global_steps} is finished and saved, the run ends")
                    return signals.exit_code
        return 0

    def _timed_step(self) -> dict[str, float]:
        """Train on the next batch; the step's metrics with its time, throughput and memory."""
        started = time.perf_counter()
        batch = self._draw()
        metrics = self.training_step(batch)
        seconds = time.perf_counter() - started
        metrics["train/time(s)"] = seconds
        metrics["perf/throughput"] = metrics["train/global_tokens"] / seconds / self.engine.world_size
        metrics["training/epoch"] = self.train_stream.epoch
        metrics |= self._utilisation(batch, seconds)
        return metrics | all_reduce_max(peak_memory(self.engine.device.type), self.engine.device)

    def _utilisation(self, batch: TensorDict, seconds: float) -> dict[str, float]:
        """perf/mfu/train of a step: FLOPs of one pass over all ranks' rows over what the devices could do in that time.

        Empty where the device's peak (trainer.peak_tflops) or the kind of model is unknown. The rounds of iterative
        refinement are not counted: they are further passes.
        """
        if self.engine.device.type == "cpu" and self.config.trainer.peak_tflops is None:
            return {}
        counter = FlopsCounter(getattr(self.engine.module, "config", None), self.config.trainer.peak_tflops)
        lengths = batch["attention_mask"].sum(-1).tolist()  # of this rank; every rank adds its share
        share = counter.utilisation(lengths, seconds, self.engine.world_size) or 0.0
        total = all_reduce_values({"mfu": share}, self.engine.device)["mfu"]
        return {"perf/mfu/train": total} if total else {}

    def _draw(self) -> TensorDict:
        """This rank's share of the next global batch: columns [B, L]."""
        self.shares.epoch = self.train_stream.epoch
        return self.train_stream.draw().batch

    def _joined(self, batch: TensorDict) -> TensorDict:
        """The rows of all ranks that share sequences with this one, itself included."""
        return self.engine.gather_over_sequence_group(DataProto.from_tensordict(batch))[0].batch

    def _due(self, every: int) -> bool:
        last = self.global_steps >= self.total_training_steps
        return last or (every > 0 and self.global_steps % every == 0)

    def save_checkpoint(self, step: int) -> None:
        """Publish global_step_<step>: model, optimizer, schedule, every rank's random numbers, data position."""
        state = {"counters": self.counters, "best": self.best, "variant": self.variant_state()}
        self.checkpoints.save(step, **state, start=self.run_log.starts.number)
        self.run_log.write_report()

    def load_checkpoint(self) -> None:
        """Resume the run as trainer.resume_mode says; later rows of the run's files are removed."""
        resumed = self.checkpoints.resume()
        if resumed is not None:
            state, _ = resumed
            self.global_steps, self.counters, self.best = state.global_step, state.counters, state.best
            self.load_variant_state(state.variant)
        self.run_log.open(self.global_steps, self.checkpoints.origin)

    def ends_early(self) -> bool:
        """Whether a subclass ends the run before its last step; equal on all ranks."""
        return False

    def variant_state(self) -> dict[str, Any]:
        """What a subclass adds to trainer_state.json (plain JSON values)."""
        return {}

    def load_variant_state(self, state: dict[str, Any]) -> None:
        """Restore what `variant_state` returned."""

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        """Means over the learned tokens of the validation set."""
        sums: dict[str, float] = defaultdict(float)
        with self.engine.eval_mode():
            for rows in self.val_loader:
                sums["rows"] += float(rows["loss_mask"][:, 1:].any(-1).sum())
                batch = self._joined(TensorDict(rows, batch_size=len(rows["loss_mask"])))
                sums["tokens"] += float(batch["loss_mask"][:, 1:].sum())
                for name, value in self.validation_step(batch).items():
                    sums[name] += value
        total = all_reduce_values(sums, self.engine.device)
        tokens, learned = total.pop("tokens"), total.pop("rows")
        if tokens == 0:
            raise ValueError("data.val_files: no row has a learned token within data.max_length; raise it.")
        means = self.validation_means(total, tokens)
        update_best(self.best, means, self.global_steps, min)
        if without := 1 - learned / len(self.val_loader.dataset.dataset):
            means["val/rows_without_target"] = without
        return means

    def validation_step(self, batch: TensorDict) -> dict[str, float]:
        """Sums over this rank's learned tokens of a batch [B, L], by name of the metric that is their mean."""
        micros = self.cut(batch)
        losses = [self.summed_loss(to_device(micro, self.engine.device)).double() for micro in micros]
        return {"val/loss": float(sum(losses))}

    def validation_means(self, sums: dict[str, float], tokens: float) -> dict[str, float]:
        """The metrics of the validation set from its sums over all ranks and the number of its learned tokens."""
        return {name: value / tokens for name, value in sums.items()}

    def step_inputs(self, batch: TensorDict) -> Any:
        """What a variant computes once for a rank's share [B, L] of a batch; each `backward` of the step gets it."""
        return None

    def training_step(self, batch: TensorDict) -> dict[str, float]:
        """One optimizer step on this rank's share [B, L] of a batch; global metrics, the same on every rank."""
        inputs = self.step_inputs(batch)
        rate = float(self.engine.lr_scheduler.get_last_lr()[0])
        learned = batch["loss_mask"][:, 1:].sum(-1)  # tokens of each row, [B]
        counts = {"learned": learned.sum(), "empty": (learned == 0).sum(), "rows": len(learned)}
        counts["all"] = batch["attention_mask"].sum()
        counts = all_reduce_values({name: float(count) for name, count in counts.items()}, self.engine.device)
        sums: dict[str, float] = defaultdict(float)
        skipped, norm = True, math.nan
        if counts["learned"] == 0:
            logger.warning(f"step {self.global_steps}: no sample has a learned token within data.max_length; skipped")
        else:
            with self.engine.train_mode():
                self.engine.optimizer_zero_grad()
                micros = self.cut(self._joined(batch))
                for number, micro in enumerate(micros, 1):
                    micro = to_device(micro, self.engine.device)
                    tokens, is_last = int(counts["learned"]), number == len(micros)
                    for name, value in self.backward(micro, tokens, is_last, inputs).items():
                        sums[name] += value.double() if isinstance(value, torch.Tensor) else value
                step = self.engine.optimizer_step()
                sums = {name: float(value) for name, value in sums.items()}
            skipped, norm = step.skipped, step.grad_norm
            if skipped:
                logger.warning(f"step {self.global_steps}: loss or gradient is not finite; the weights are unchanged")
        self.engine.lr_scheduler_step()
        ranks = self.engine.world_size
        metrics = {name: value / ranks for name, value in all_reduce_values(sums, self.engine.device).items()}
        metrics |= {"train/grad_norm": norm, "train/lr": rate, "train/lr(1e-3)": rate * 1e3}
        metrics |= {"train/global_tokens": counts["all"], "train/skipped_steps": float(skipped)}
        metrics["train/rows_without_target"] = counts["empty"] / counts["rows"]
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def backward(self, micro: TensorDict, tokens: int, is_last: bool, inputs: Any) -> dict[str, float | torch.Tensor]:
        """Add a micro-batch [b, T] to the gradient. `tokens`: learned tokens of the global batch, on all ranks.

        `inputs` is what `step_inputs` returned for the step. Metrics are numbers or scalar tensors; tensors stay on the
        device until the step ends, so that the host does not wait. Each is this rank's share times the number of ranks:
        they are summed over micro-batches, and their mean over ranks is the global value. An override calls
        `engine.backward(loss, is_last_micro_batch)` once or more, with True in the very last call only.
        """
        loss = self.summed_loss(micro) * (self.engine.get_data_parallel_size() / tokens)
        self.engine.backward(loss, is_last_micro_batch=is_last)
        return {"train/loss": loss.detach()}

    def summed_loss(self, micro: TensorDict) -> torch.Tensor:
        """Sum of the negative log-probs of a micro-batch's learned tokens, [b, T] -> []; position t predicts t + 1."""
        batch = next_token_batch(micro)
        with self.engine.autocast(self.policy.forward_tokens(batch) if torch.is_grad_enabled() else 0):
            log_probs, _ = self.policy.log_probs(self.engine.module, batch, temperature=1.0, with_entropy=False)
        return -log_probs.sum()


def next_token_batch(micro: TensorDict) -> TensorDict:
    """Rows [b, T] as prompts of one token with T - 1 response tokens, of which the learned ones are `counted`."""

    def next_token_columns(columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {key: columns[key] for key in ("input_ids", "attention_mask", "position_ids")}
        return kept | {"responses": columns["input_ids"][:, 1:], "counted": columns["loss_mask"][:, 1:]}

    batch = TensorDict(next_token_columns(micro), batch_size=len(micro))
    if ON_HOST in micro.keys():
        batch.set_non_tensor(ON_HOST, OnHost(next_token_columns(on_host(micro))))
    return batch
