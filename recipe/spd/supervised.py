"""The supervised baseline of the SPD scorer: cross-entropy on counterfactual labels of single mismatches.

Every block is labelled as AutoJudge mines important tokens: mismatches are accepted one by one, the target completes
the answer after each, and the first one that turns a right answer wrong is harmful. These are the completions that the
GRPO rollout asks for when it accepts so many mismatches, so both draw on one store, and a budget compares them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger
from omegaconf import DictConfig, OmegaConf

from recipe.spd.data.blocks import SPDInputData, resolve_sep_token_id
from recipe.spd.data.dataset import SPDRLHFDataset
from recipe.spd.rollout.labels import label_blocks
from recipe.spd.rollout.spd_rollout import SPDRollout
from verl.models.loading import get_model_loader, torch_dtype_of

MEMORISED = 1.1  # the last cross-entropy in validation over the lowest, from which training has memorised
FOLDER = "supervised"  # in trainer.default_local_dir: the scorer and supervised.json


def train_supervised(config: DictConfig, budget: int | None) -> Path:
    """Label the training blocks and fit the scorer of a training config to them, on one device; returns its folder.

    Optimizer, schedule, batch size, micro-batch size, steps and seed are those of the config. `budget` is the number of
    completions that labels may use; None labels every block. Validation blocks, if they are others than the training
    blocks, are labelled without a budget; their cross-entropy after each epoch decides which weights are saved.
    """
    from verl.config.compose import omega_conf_to_dataclass
    from verl.config.optimizer import build_optimizer
    from verl.utils.tokenizer import hf_tokenizer
    from verl.workers.config import RolloutConfig
    from verl.workers.engine.build import build_lr_scheduler

    model, actor, steps = config.actor_rollout_ref.model, config.actor_rollout_ref.actor, config.trainer
    tokenizer = hf_tokenizer(model.tokenizer_path or model.path)
    files = [config.data.train_files]
    if config.data.val_files != config.data.train_files:
        files.append(config.data.val_files)
    infos, *held_out = (
        [rows[i]["extra_info"] for i in range(len(rows))]
        for rows in (SPDRLHFDataset(file, tokenizer, config.data) for file in files)
    )
    random.Random(config.data.seed).shuffle(infos)
    settings = omega_conf_to_dataclass(config.actor_rollout_ref.rollout, RolloutConfig)
    rollout = SPDRollout(settings, SimpleNamespace(tokenizer=tokenizer), None)
    try:
        labels, used = label_blocks(
            infos, rollout.completer, tokenizer, rollout.eos, rollout.settings.rollout.max_tokens, budget
        )
        unseen = [(val, label_blocks(val, rollout.completer, tokenizer, rollout.eos,
                                     rollout.settings.rollout.max_tokens)[0]) for val in held_out]  # fmt: skip
    finally:
        rollout.close()
    harmful = sum(not all(values) for values in labels.values())
    logger.info("{} blocks labelled by {} completions, {} with a harmful mismatch", len(labels), used, harmful)
    if not labels:
        raise ValueError("no block of the training data has a right baseline to label; prepare others.")
    if not all(known for _, known in unseen):
        raise ValueError("no block of the validation data has a right baseline to label; prepare others.")

    device = torch.device(config.trainer.device)
    source = SimpleNamespace(local_path=None, path=model.path, trust_remote_code=model.trust_remote_code,
                            override_config={})  # fmt: skip
    loader = OmegaConf.to_container(model.loader.kwargs, resolve=True)
    kept, compute = (torch_dtype_of(actor.fsdp_config[name], name) for name in ("model_dtype", "dtype"))
    scorer = get_model_loader("spd_scorer")(source, kept, **loader).to(device).train()
    optim = omega_conf_to_dataclass(actor.optim)
    optim.total_training_steps = count = (
        steps.total_training_steps or steps.total_epochs * -(-len(labels) // config.data.train_batch_size)
    )
    optimizer = build_optimizer(scorer.named_parameters(), optim)
    schedule = build_lr_scheduler(optimizer, optim)
    sep = resolve_sep_token_id(tokenizer, read=scorer.reads_separator)
    order, losses = random.Random(config.spd.seed), []
    max_norm = optim.max_grad_norm(actor.grad_clip)
    if actor.use_dynamic_bsz:
        micro = max(1, actor.ppo_max_token_len_per_gpu // config.data.max_prompt_length)
    else:
        micro = max(1, actor.ppo_micro_batch_size_per_gpu // settings.n)  # blocks; GRPO has n samples of each
    folder = Path(config.trainer.default_local_dir) / FOLDER
    epoch, validation = -(-len(labels) // config.data.train_batch_size), {}  # steps; cross-entropy after a step

    def shares(batch: list[int], blocks: Sequence[dict[str, Any]], known: dict[int, list[bool]]) -> Iterator:
        """The parts of the batch's mean cross-entropy that come from one micro-batch after another."""
        for part in (batch[first : first + micro] for first in range(0, len(batch), micro)):
            with torch.autocast(device.type, compute, enabled=compute != torch.float32):
                loss = _summed_loss(scorer, [blocks[i] for i in part], [known[i] for i in part], sep,
                                    tokenizer.pad_token_id, device)  # fmt: skip
            yield loss / sum(len(known[i]) for i in batch)

    for step in range(count):
        batch = order.sample(sorted(labels), min(config.data.train_batch_size, len(labels)))
        optimizer.zero_grad()
        losses.append(0.0)
        for loss in shares(batch, infos, labels):
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        if (step + 1) % 10 == 0:
            logger.info("step {} of {}: cross-entropy {:.4f}", step + 1, count, sum(losses[-10:]) / 10)
        if unseen and ((step + 1) % epoch == 0 or step + 1 == count):
            scorer.eval()
            with torch.no_grad():
                losses_of = (loss.item() for val, known in unseen for loss in shares([*known], val, known))
                validation[step + 1] = sum(losses_of)
            scorer.train()
            logger.info(
                "epoch {:.1f}, step {}: cross-entropy {:.4f} in training, {:.4f} in validation", (step + 1) / epoch,
                step + 1, sum(losses[-epoch:]) / len(losses[-epoch:]), validation[step + 1],
            )  # fmt: skip
            if validation[step + 1] == min(validation.values()):
                scorer.save_pretrained(folder)
    if not unseen:
        scorer.save_pretrained(folder)
    best = min(validation, key=validation.get, default=count)
    if validation and validation[count] > MEMORISED * validation[best]:
        logger.warning(
            "cross-entropy in validation was lowest at step {} ({:.4f}) and rose to {:.4f} at step {}, while that in "
            "training fell to {:.4f}: the scorer memorises its {} blocks. The weights of step {} are saved. Use more "
            "blocks, or fewer steps.", best, validation[best], validation[count], count,
            sum(losses[-epoch:]) / len(losses[-epoch:]), len(labels), best,
        )  # fmt: skip
    figures = {"blocks": len(labels), "harmful": harmful, "completions": used, "steps": count, "loss": losses,
               "validation": validation, "saved_step": best}  # fmt: skip
    (folder / "supervised.json").write_text(json.dumps(figures) + "\n")
    return folder


def _summed_loss(
    scorer: Any, infos: Sequence[dict[str, Any]], labels: Sequence[Sequence[bool]], sep: int, pad: int,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Cross-entropy of sigmoid(z), summed over the labelled mismatches; a label is True where one is harmless."""
    columns = ([info[name] for info in infos] for name in ("context_ids", "draft_ids", "target_ids"))
    blocks = SPDInputData.from_blocks(*columns, sep_token_id=sep, pad_token_id=pad, device=device)
    z = scorer(**blocks.as_kwargs())
    rows, places, wanted = [], [], []
    for row, (info, known) in enumerate(zip(infos, labels, strict=True)):
        pairs = enumerate(zip(info["draft_ids"], info["target_ids"], strict=False))
        mismatches = [at for at, (drafted, chosen) in pairs if drafted != chosen]
        rows += [row] * len(known)
        places += mismatches[: len(known)]
        wanted += known
    truth = torch.tensor(wanted, dtype=z.dtype, device=device)
    return F.binary_cross_entropy_with_logits(z[rows, places], truth, reduction="sum")
