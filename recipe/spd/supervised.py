"""The supervised baseline of the SPD scorer: cross-entropy on counterfactual labels of single mismatches.

Every block is labelled as AutoJudge mines important tokens: mismatches are accepted one by one, the target completes
the answer after each, and the first one that turns a right answer wrong is harmful. These are the completions that the
GRPO rollout asks for when it accepts so many mismatches, so both draw on one store, and a budget compares them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger
from omegaconf import DictConfig, OmegaConf

from recipe.spd.client import Completer
from recipe.spd.dataset import SPDInputData, SPDRLHFDataset, resolve_sep_token_id
from recipe.spd.rollout import SPDRollout
from recipe.spd.samples import grade_blocks, judged_block

BLOCKS_AT_A_TIME = 512  # labelled together
FOLDER = "supervised"  # in trainer.default_local_dir: the scorer and supervised.json


def label_blocks(
    infos: Sequence[dict[str, Any]], completer: Completer, tokenizer: Any, eos: Collection[int], max_tokens: int,
    budget: int | None = None,
) -> tuple[dict[int, list[bool]], int]:  # fmt: skip
    """Index in `infos` -> harmless or not of its mismatches, up to and including the first harmful one; and the number
    of distinct completions used.

    Blocks whose baseline is wrong or cut at the limit have no labels, and those with a lost completion lose the rest.
    Blocks are labelled in order until the `budget` of completions is spent.
    """
    labels: dict[int, list[bool]] = {}
    used: set = set()
    for first in range(0, len(infos), BLOCKS_AT_A_TIME):
        open_blocks = range(first, min(first + BLOCKS_AT_A_TIME, len(infos)))
        while open_blocks:
            judged = {}
            for i in open_blocks:
                pairs = list(zip(infos[i]["draft_ids"], infos[i]["target_ids"], strict=False))
                places = [at for at, (drafted, chosen) in enumerate(pairs) if drafted != chosen]
                known = len(labels.get(i, ()))
                if known < len(places):  # accept all that is known to be harmless and one more
                    actions = tuple(int(at <= places[known]) for at in range(len(pairs)))
                    judged[i] = judged_block(infos[i], actions, eos, 1)
            requests = [request for block in judged.values() for request in block.requests(max_tokens)]
            if budget is not None and len(used.union(requests)) > budget:
                return labels, len(used)
            used.update(requests)
            grade_blocks(list(judged.values()), completer.complete(requests)[0], tokenizer, max_tokens)
            for i, block in judged.items():
                if block.baseline_correct and block.correct is not None:
                    labels.setdefault(i, []).append(block.correct)
            open_blocks = [i for i, b in judged.items() if b.baseline_correct and b.correct]
    return labels, len(used)


def train_supervised(config: DictConfig, budget: int | None) -> Path:
    """Label the training blocks and fit the scorer of a training config to them, on one device; returns its folder.

    Optimizer, rate, batch size, steps and seed are those of the config. `budget` is the number of completions that
    labels may use; None labels every block.
    """
    from spd_scorer import load_spd_scorer
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.tokenizer import hf_tokenizer
    from verl.workers.config import RolloutConfig

    model, actor, steps = config.actor_rollout_ref.model, config.actor_rollout_ref.actor, config.trainer
    tokenizer = hf_tokenizer(model.tokenizer_path or model.path)
    rows = SPDRLHFDataset(config.data.train_files, tokenizer, config.data)
    infos = [rows[i]["extra_info"] for i in range(len(rows))]
    random.Random(config.data.seed).shuffle(infos)
    settings = omega_conf_to_dataclass(config.actor_rollout_ref.rollout, RolloutConfig)
    rollout = SPDRollout(settings, SimpleNamespace(tokenizer=tokenizer), None)
    try:
        labels, used = label_blocks(
            infos, rollout.completer, tokenizer, rollout.eos, rollout.settings.rollout.max_tokens, budget
        )
    finally:
        rollout.close()
    harmful = sum(not all(values) for values in labels.values())
    logger.info("{} blocks labelled by {} completions, {} with a harmful mismatch", len(labels), used, harmful)
    if not labels:
        raise ValueError("no block of the training data has a right baseline to label; prepare others.")

    device = torch.device(config.trainer.device)
    files = SimpleNamespace(local_path=None, path=model.path, trust_remote_code=model.trust_remote_code,
                            override_config={})  # fmt: skip
    loader = OmegaConf.to_container(model.loader.kwargs, resolve=True)
    dtype = getattr(torch, actor.fsdp_config.dtype)
    scorer = load_spd_scorer(files, dtype, **loader).to(device).train()
    optimizer = torch.optim.AdamW(
        [p for p in scorer.parameters() if p.requires_grad], lr=actor.optim.lr, betas=tuple(actor.optim.betas),
        weight_decay=actor.optim.weight_decay,
    )  # fmt: skip
    count = steps.total_training_steps or steps.total_epochs * -(-len(labels) // config.data.train_batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / count)
    sep = resolve_sep_token_id(tokenizer, read=scorer.config.backbone == "own")
    order, losses = random.Random(config.spd.seed), []
    max_norm = omega_conf_to_dataclass(actor.optim).max_grad_norm(actor.grad_clip)
    for step in range(count):
        batch = order.sample(sorted(labels), min(config.data.train_batch_size, len(labels)))
        loss = _loss(scorer, [infos[i] for i in batch], [labels[i] for i in batch], sep, tokenizer.pad_token_id, device)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % 10 == 0:
            logger.info("step {} of {}: cross-entropy {:.4f}", step + 1, count, sum(losses[-10:]) / 10)
    folder = Path(config.trainer.default_local_dir) / FOLDER
    scorer.save_pretrained(folder)
    figures = {"blocks": len(labels), "harmful": harmful, "completions": used, "steps": count, "loss": losses}
    (folder / "supervised.json").write_text(json.dumps(figures) + "\n")
    return folder


def _loss(
    scorer: Any, infos: Sequence[dict[str, Any]], labels: Sequence[Sequence[bool]], sep: int, pad: int,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Mean cross-entropy of sigmoid(z) over the labelled mismatches; a label is True where the mismatch is harmless."""
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
    return F.binary_cross_entropy_with_logits(z[rows, places], torch.tensor(wanted, dtype=z.dtype, device=device))
