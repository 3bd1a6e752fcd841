"""Supervised training of the SPD scorer: cross-entropy on labels of single mismatches.

As in AutoJudge's mining of important tokens, mismatches are accepted one by one, the target completes the answer after
each, and the first one that turns a right answer wrong is harmful. These are the completions that the GRPO rollout asks
for when it accepts so many mismatches, so both draw on one store, and a budget compares them. The labels train in
verl's supervised trainer, with the model, engine and optimizer of a GRPO config.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from loguru import logger
from omegaconf import DictConfig
from tensordict import TensorDict
from torch.utils.data import Dataset, default_collate
from tqdm import tqdm

from recipe.spd.data.blocks import mismatches
from recipe.spd.data.dataset import SPDRLHFDataset
from recipe.spd.labels import Labelling, Labels, given_labels, label_blocks
from recipe.spd.rollout.spd_rollout import SPDRollout
from recipe.spd.scorer.bernoulli_policy import MODEL_KEYS, BernoulliPolicy, fit_width
from recipe.spd.scorer.token_tree import alike
from verl.config.batch_sizes import micro_batch_size, rank_count
from verl.config.common import CheckpointConfig, RunConfig
from verl.config.compose import omega_conf_to_dataclass
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.rollout import RolloutConfig
from verl.trainer.sft.data import RankShares
from verl.trainer.sft.trainer import FSDPSFTTrainer
from verl.training.parallel.sharding import full_tensor
from verl.utils.distributed import destroy_global_process_group
from verl.utils.tokenizer import hf_tokenizer

MEMORISED = 1.1  # the last cross-entropy in validation over the lowest, from which training has memorised
FOLDER = "supervised"  # in trainer.default_local_dir: the scorer, supervised.json, checkpoints and metrics of the run
FEW_LABELS = 100  # below it, training warns


def train_supervised(config: DictConfig, budget: int | None, patience: int | None = None) -> Path:
    """Label the training blocks and fit the scorer of a training config to them, on one device; returns its folder.

    `budget` is the number of completions that labels may use, or of labels that the blocks have; None: all of them.
    Validation blocks, if they are others than the training blocks, are labelled without a budget; their cross-entropy
    after each epoch decides which weights are saved, and the training ends after `patience` epochs without a lower one
    (None: after all steps). Raises ValueError for a file without a block that can be labelled.
    """
    model = config.actor_rollout_ref.model
    tokenizer = hf_tokenizer(model.tokenizer_path or model.path)
    labelled, labelling = _labelled(config, tokenizer, budget)
    labels = labelling.labels.values()
    count, below = sum(map(len, labels)), sum(min(of_block) < 0.5 for of_block in labels)
    logger.info(
        "{} labels on {} blocks, {} of which have one below 1/2; {} of {} blocks were tried, by {} completions. Blocks "
        "get no label if the target's own answer is wrong", count, len(labels), below, labelling.tried,
        len(labelled[0].blocks), labelling.completions,
    )  # fmt: skip
    few = (f"{count} labels are too few to train a scorer (fewer than {FEW_LABELS}): it memorises them. Prepare blocks "
           "of more questions that the target answers right, or raise --label-budget if it is given.")  # fmt: skip
    if count < FEW_LABELS:
        logger.warning(few)
    trainer = SupervisedScorerTrainer(config, patience, _settings(config, len(labels)), tokenizer, *labelled)
    code = trainer.fit()
    if not trainer.validation:
        trainer.save_scorer()
    destroy_global_process_group()
    if code:
        sys.exit(code)
    folder = Path(trainer.config.trainer.default_local_dir)
    figures = {"blocks": len(labels), "blocks_below_half": below, "completions": labelling.completions}
    (folder / "supervised.json").write_text(json.dumps(figures | _results(trainer)) + "\n")
    if count < FEW_LABELS:  # also the last line of a long log
        logger.warning(few)
    return folder


def _labelled(config: DictConfig, tokenizer: Any, budget: int | None) -> tuple[list[LabelledBlocks], Labelling]:
    """The labelled blocks of training and, from a file of their own, validation; and what the former's labels cost."""
    files, budgets = [config.data.train_files], [budget]
    if config.data.val_files != config.data.train_files:
        files.append(config.data.val_files)
        budgets.append(None)
    sets = [SPDRLHFDataset(file, tokenizer, config.data) for file in files]
    orders = [list(range(len(blocks))) for blocks in sets]
    random.Random(config.data.seed).shuffle(orders[0])
    infos = [[blocks[row]["extra_info"] for row in order] for blocks, order in zip(sets, orders, strict=True)]
    given = [any(info.get("labels") for info in of_file) for of_file in infos]
    with ExitStack() as stack:
        if not all(given):  # one rollout for all files: it may start a server
            settings = omega_conf_to_dataclass(config.actor_rollout_ref.rollout, RolloutConfig)
            rollout = SPDRollout(settings, SimpleNamespace(tokenizer=tokenizer), None)
            stack.callback(rollout.close)
        labellings = []
        for file, of_file, has_labels, limit in zip(files, infos, given, budgets, strict=True):
            if has_labels:
                labelling = Labelling(given_labels(of_file, limit), tried=len(of_file), completions=0)
            else:
                max_tokens = rollout.settings.rollout.max_tokens
                labelling = label_blocks(of_file, rollout.completer, tokenizer, rollout.eos, max_tokens, limit)
            if not labelling.labels:
                within = "" if limit is None else f" within --label-budget {limit}"
                remedy = "Prepare other blocks" if limit is None else "Raise the budget, or prepare other blocks"
                raise ValueError(
                    f"{file}: no block got a label{within}, neither from the data nor by completions of a block whose "
                    f"own answer by the target is right. {remedy}."
                )
            labellings.append(labelling)
    parts = zip(sets, orders, labellings, strict=True)
    return [LabelledBlocks(blocks, order, labelling.labels) for blocks, order, labelling in parts], labellings[0]


def _results(trainer: SupervisedScorerTrainer) -> dict[str, Any]:
    """Steps, losses and the saved step for supervised.json, after a warning if the scorer memorised its blocks."""
    validation, steps = trainer.validation, trainer.global_steps
    best = min(validation, key=validation.get, default=steps)
    if validation and validation[steps] > MEMORISED * validation[best]:
        last_epoch = trainer.losses[-trainer.config.trainer.test_freq :]
        logger.warning(
            "cross-entropy in validation was lowest at step {} ({:.4f}) and rose to {:.4f} at step {}, while that in "
            "training fell to {:.4f}: the scorer memorises its {} blocks. The weights of step {} are saved. Use more "
            "blocks, or fewer steps.", best, validation[best], validation[steps], steps,
            sum(last_epoch) / len(last_epoch), len(trainer.blocks[0]), best,
        )  # fmt: skip
    return {"steps": steps, "loss": trainer.losses, "validation": validation, "saved_step": best}


def _settings(config: DictConfig, blocks: int) -> DictConfig:
    """The settings of the supervised trainer for a GRPO config and a number of labelled blocks."""
    data, actor, run = config.data, config.actor_rollout_ref.actor, config.trainer
    size = min(data.train_batch_size, blocks)
    epoch = -(-blocks // data.train_batch_size)
    if actor.use_dynamic_bsz:
        micro = actor.ppo_max_token_len_per_gpu // data.max_prompt_length
    else:  # GRPO has n samples of each block
        micro = micro_batch_size(actor, config, rank_count(config)) // config.actor_rollout_ref.rollout.n
    with initialize_config_module("verl.trainer.config", version_base=None):
        settings = compose("sft_trainer")
    settings.data.update({
        "train_files": data.train_files, "val_files": data.val_files, "train_batch_size": size,
        "micro_batch_size_per_gpu": max(1, micro), "dataloader_num_workers": 0,
    })  # fmt: skip
    settings.model.partial_pretrain = config.actor_rollout_ref.model.path
    settings.trainer.update({f.name: run[f.name] for f in fields(RunConfig) if f.name in run})
    settings.trainer.update({
        "seed": config.spd.seed, "test_freq": epoch, "val_before_train": False,
        "total_training_steps": run.total_training_steps or run.total_epochs * epoch,
        "default_local_dir": str(Path(run.default_local_dir) / FOLDER),
    })  # fmt: skip
    return settings


class LabelledBlocks(Dataset):
    """The labelled blocks of a data set: its tensors, labels [gamma] float32 (1 = harmless) at the mismatches, and
    loss_mask [1 + gamma], which is 1 after the position of each label. Block k of `labels` is row order[k].
    """

    def __init__(self, blocks: SPDRLHFDataset, order: Sequence[int], labels: Labels) -> None:
        self.blocks, self.labels = blocks, labels
        self.rows = [(order[number], number) for number in sorted(labels)]
        self.unlabelled = 1 - len(labels) / len(order)  # share of the blocks

    def __len__(self) -> int:
        return len(self.rows)

    def context(self, item: int) -> list[int]:
        """Token ids before the draft of a block."""
        return self.blocks.rows[self.rows[item][0]]["extra_info"]["context_ids"]

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        row, number = self.rows[item]
        block = self.blocks[row]
        info = block["extra_info"]
        places = mismatches(info["draft_ids"], info["target_ids"])[: len(self.labels[number])]
        labels, loss_mask = torch.zeros(self.blocks.gamma), torch.zeros(1 + self.blocks.gamma, dtype=torch.long)
        labels[places] = torch.tensor(self.labels[number], dtype=torch.float32)
        loss_mask[[1 + at for at in places]] = 1
        return {**{name: block[name] for name in MODEL_KEYS}, "labels": labels, "loss_mask": loss_mask}


class SampledShares(RankShares):
    """Each batch is sampled without replacement from all rows, whatever batches came before it."""

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order, count = random.Random(self.seed), len(self)
        batches = [order.sample(range(self.rows), self.batch_size) for _ in range((self.epoch + 1) * count)]
        return iter([batch[self.rank :: self.ranks] for batch in batches[-count:]])


class SupervisedScorerTrainer(FSDPSFTTrainer):
    """Cross-entropy of sigmoid(z) at the labelled mismatches, their mean over the global batch.

    The scorer of the lowest cross-entropy in validation is saved in the run's folder; without validation, the last one.
    The run ends after `patience` validations without a lower one (None: at its last step). `training` is the GRPO
    config that describes model, engine and optimizer.
    """

    policy_type = BernoulliPolicy
    shares_type = SampledShares

    def __init__(
        self, training: DictConfig, patience: int | None, settings: DictConfig, tokenizer: Any, train: LabelledBlocks,
        val: LabelledBlocks | None = None,
    ) -> None:  # fmt: skip
        self.training, self.patience = training, patience
        self.losses: list[float] = []  # of each step
        self.validation: dict[int, float] = {}  # after a step
        self.blocks = [train] if val is None else [train, val]
        super().__init__(settings, None, None, tokenizer, train, val)

    def engine_parts(self, config: Any) -> tuple[Any, ...]:
        actor = self.training.actor_rollout_ref.actor
        model = omega_conf_to_dataclass(self.training.actor_rollout_ref.model, HFModelConfig).load()
        engine = omega_conf_to_dataclass(actor.fsdp_config, FSDPEngineConfig)
        checkpoint = omega_conf_to_dataclass(actor.checkpoint, CheckpointConfig)
        optim = omega_conf_to_dataclass(actor.optim, FSDPOptimizerConfig)
        norm = optim.max_grad_norm(actor.grad_clip)
        optim = replace(optim, clip_grad=norm, total_training_steps=self.total_training_steps)
        return model, engine, optim, checkpoint

    def cut(self, batch: TensorDict) -> list[TensorDict]:
        return list(batch.split(self.config.data.micro_batch_size_per_gpu))

    def fit(self) -> int:
        """As usual; the target's states are computed before, blocks of like contexts together."""
        if getattr(self.engine.module, "features", None) is not None:
            with self.engine.eval_mode(), torch.no_grad(), self.engine.autocast():
                for blocks in self.blocks:
                    chunks = list(alike([blocks.context(k) for k in range(len(blocks))]))
                    for chunk in tqdm(chunks, "Target's states", unit="batch"):
                        rows = default_collate([blocks[k] for k in chunk])
                        self.policy.scores(self.engine.module, TensorDict(rows, len(rows["labels"])))
        return super().fit()

    def summed_loss(self, micro: TensorDict) -> torch.Tensor:
        """Sum over a micro-batch's labelled mismatches: labels [b, gamma] float32, loss_mask [b, 1 + gamma] -> []."""
        labels = micro["labels"]
        with self.engine.autocast():
            z = fit_width(self.policy.scores(self.engine.module, micro), labels.shape[1])
        losses = F.binary_cross_entropy_with_logits(z, labels, reduction="none")
        return (losses * micro["loss_mask"][:, 1:]).sum()

    def training_step(self, batch: TensorDict) -> dict[str, float]:
        metrics = super().training_step(batch)
        self.losses.append(metrics.get("train/loss", float("nan")))
        return metrics | {"spd/unlabelled_blocks": self.blocks[0].unlabelled}

    def _validate(self) -> dict[str, float]:
        means = super()._validate()
        self.validation[self.global_steps] = means["val/loss"]
        means["spd/unlabelled_val_blocks"] = self.blocks[1].unlabelled
        if self.best["val/loss"]["step"] == self.global_steps:
            self.save_scorer()
        return means

    def ends_early(self) -> bool:
        best = min(self.validation, key=self.validation.get, default=0)
        return bool(self.patience) and sum(step > best for step in self.validation) >= self.patience

    def save_scorer(self) -> None:
        """Write the trained weights with spd_config.json into the run's folder."""
        trained = {name: p for name, p in self.engine.module.named_parameters() if p.requires_grad}
        state = {name: full_tensor(p.detach()).cpu() for name, p in trained.items()}
        self.engine.module.save_pretrained(self.config.trainer.default_local_dir, state_dict=state)

    def variant_state(self) -> dict[str, Any]:
        return {"losses": self.losses, "validation": self.validation}

    def load_variant_state(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]
        self.validation = {int(step): loss for step, loss in state["validation"].items()}
