"""FSDPSFTTrainer: supervised fine-tuning of a causal language model on torchrun ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from loguru import logger
from omegaconf import DictConfig
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from verl.config.sft import SFTConfig
from verl.planning.problems import Problem
from verl.trainer.sft.data import create_sft_dataset, cut
from verl.trainer.sft.ranks import summed
from verl.trainer.sft.run_keeping import RunKeeping
from verl.trainer.sft.settings import engine_parts
from verl.utils.fs import copy_to_local
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.engine import FSDPEngine
from verl.workers.policy import CausalLMPolicy

if TYPE_CHECKING:
    from verl.trainer.dry_run_checks import Findings


class FSDPSFTTrainer(RunKeeping):
    """Next-token loss on learned tokens (loss_mask 1), divided by their number in the whole batch.

    So neither the cut into micro-batches, nor packing, nor the number of ranks changes it. A variant overrides
    `backward` (what a micro-batch adds to the gradient), `validation_step`, `build_dataset`, `problems`, or
    `config_type`.
    `device_mesh` (last dimension "fsdp") shards the weights; None makes one by model.fsdp_config.fsdp_size.
    `ulysses_device_mesh` is taken for verl's callers: every rank keeps whole sequences.
    """

    #: dataclass of the whole config tree, which checks keys and values
    config_type: type[SFTConfig] = SFTConfig
    #: settings that this trainer alone does not read: pattern of a key -> what is done instead
    not_read: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        config: DictConfig,
        device_mesh: DeviceMesh | None,
        ulysses_device_mesh: DeviceMesh | None,
        tokenizer: Any,
        train_dataset: Dataset,
        val_dataset: Dataset | None = None,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        run, size = config.trainer, config.data.train_batch_size
        if len(train_dataset) < size:
            raise ValueError(
                f"data.train_files gives {len(train_dataset)} samples, fewer than one batch of {size} "
                "(data.train_batch_size); lower the batch size or add samples."
            )
        self.total_training_steps = run.total_training_steps or len(train_dataset) // size * run.total_epochs
        model, *parts = engine_parts(config, tokenizer, self.total_training_steps)
        self.engine = FSDPEngine(model, *parts, device=run.device, mesh=device_mesh)
        self.engine.initialize()
        self.policy = CausalLMPolicy()
        self.policy.set_forward(remove_padding=model.use_remove_padding, share_prompt=False)
        self.policy.bind(self.engine.module)
        if config.data.packing and not self.policy.remove_padding:
            raise ValueError("data.packing=true: the attention of this model cannot be exchanged. Set it to false.")
        self._init_run(train_dataset, val_dataset)

    @classmethod
    def problems(cls, config: DictConfig, found: Findings) -> Iterable[Problem]:
        """What else stands in the way of this run, at a start and in a dry run; `found` is what is known of its model
        (tokenizer and hf_config are None where they could not be loaded)."""
        return ()

    @classmethod
    def build_tokenizer(cls, config: DictConfig) -> Any:
        """The tokenizer of model.partial_pretrain, with data.chat_template where that is set."""
        path = copy_to_local(config.model.partial_pretrain)
        tokenizer = hf_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
        if config.data.chat_template is not None:
            tokenizer.chat_template = config.data.chat_template
        return tokenizer

    @classmethod
    def build_dataset(cls, files: Any, config: DictConfig, tokenizer: Any, max_samples: int = -1) -> Dataset:
        """The data set of these files; rows are dicts of tensors, input_ids, attention_mask, loss_mask among them."""
        return create_sft_dataset(files, config.data, tokenizer, max_samples)

    @classmethod
    def build_val_dataset(cls, files: Any, config: DictConfig, tokenizer: Any, max_samples: int = -1) -> Dataset:
        """The same for validation."""
        return cls.build_dataset(files, config, tokenizer, max_samples)

    def training_step(self, batch: TensorDict) -> dict[str, float]:
        rate = float(self.engine.lr_scheduler.get_last_lr()[0])
        counts = {"learned": batch["loss_mask"][:, 1:].sum(), "all": batch["attention_mask"].sum()}
        counts = summed({name: float(count) for name, count in counts.items()}, self.engine.device)
        sums: dict[str, float] = defaultdict(float)
        skipped, norm = True, math.nan
        if counts["learned"] == 0:
            logger.warning(f"step {self.global_steps}: no sample has a learned token within data.max_length; skipped")
        else:
            with self.engine.train_mode():
                self.engine.optimizer_zero_grad()
                micros = cut(batch, self.config.data)
                for number, micro in enumerate(micros, 1):
                    found = self.backward(micro.to(self.engine.device), int(counts["learned"]), number == len(micros))
                    for name, value in found.items():
                        sums[name] += value
                step = self.engine.optimizer_step()
            skipped, norm = step.skipped, step.grad_norm
            if skipped:
                logger.warning(f"step {self.global_steps}: loss or gradient is not finite; no weight is changed")
        self.engine.lr_scheduler_step()
        ranks = self.engine.get_data_parallel_size()
        metrics = {name: value / ranks for name, value in summed(sums, self.engine.device).items()}
        metrics |= {"train/grad_norm": norm, "train/lr": rate, "train/lr(1e-3)": rate * 1e3}
        metrics |= {"train/global_tokens": counts["all"], "train/skipped_steps": float(skipped)}
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def backward(self, micro: TensorDict, tokens: int, is_last: bool) -> dict[str, float]:
        """Add a micro-batch [b, T] to the gradient. `tokens`: learned tokens of the whole batch, on all ranks.

        Metrics are this rank's share times the number of ranks; those of all micro-batches are added up, and their
        mean over ranks is the value of the whole. An override calls `engine.backward(loss, is_last_micro_batch)` once
        or more, with True in the very last call only.
        """
        loss = self.summed_loss(micro) * (self.engine.get_data_parallel_size() / tokens)
        self.engine.backward(loss, is_last_micro_batch=is_last)
        return {"train/loss": loss.item()}

    def validation_step(self, batch: TensorDict) -> dict[str, float]:
        pieces = cut(batch, self.config.data)
        return {"val/loss": sum(self.summed_loss(micro.to(self.engine.device)).item() for micro in pieces)}

    def summed_loss(self, micro: TensorDict) -> torch.Tensor:
        """Minus the log-probs of the learned tokens of a micro-batch [b, T], added up; position t predicts t + 1."""
        inputs = {key: micro[key] for key in ("input_ids", "attention_mask", "position_ids")}
        inputs |= {"responses": micro["input_ids"][:, 1:], "counted": micro["loss_mask"][:, 1:]}
        with self.engine.autocast():
            log_probs, _ = self.policy.log_probs(
                self.engine.module, TensorDict(inputs, batch_size=len(micro)), temperature=1.0, with_entropy=False
            )
        return -log_probs.sum()
