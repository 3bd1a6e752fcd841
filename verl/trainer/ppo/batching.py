"""Functions on the rollout batch before the update: masking, dropping, grouping, balancing over ranks, rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from loguru import logger

from verl.algos import advantage, kl
from verl.algos.advantage import as_torch_index
from verl.algos.log_prob_metrics import calculate_debug_metrics
from verl.algos.names import COMPARES_SAMPLES
from verl.algos.policy_loss import LOSS_COLUMNS
from verl.algos.reweight import compute_pf_ppo_reweight_data
from verl.algos.rollout_correction import (
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_add_to_batch,
)
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.batch_sizes import prompts_a_step
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.protocol.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.reward.rows import LOST, MASKED, reward_extras
from verl.training.policy.prefix_tree import prefix_tree

NO_BASELINE = "no_baseline"  # text in LOST that counts by itself, as MASKED does


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """The response part of attention_mask [B, P+R] -> [B, R]; 1 = a token of the response."""
    return data.batch["attention_mask"][:, -data.batch["responses"].size(1) :]


def needs_old_log_probs(config: PPOConfig) -> bool:
    """Whether a step computes old log-probs by a forward of their own.

    One update on the full batch sees ratio 1: its own detached log-probs are the old ones.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    return bool(
        actor.ppo_epochs > 1
        or prompts_a_step(config)[1] > actor.ppo_mini_batch_size
        or algorithm.use_kl_in_reward
        or config.actor_rollout_ref.rollout.calculate_log_probs
        or "old_log_probs" in advantage.inputs_of(algorithm.adv_estimator)
    )


@dataclass
class DropCounts:
    """Samples that a step requested, by outcome: scored ones, and dropped ones by reason."""

    requested: int = 0
    scored: int = 0
    lost: int = 0
    small_group: int = 0
    uneven: int = 0
    no_reward: int = 0
    masked: int = 0
    no_baseline: int = 0

    def after_rewards(self, failed: int, later: DropCounts) -> DropCounts:
        """These counts plus those of samples dropped after the rewards: `failed` rewards, then `later` ones."""
        small, uneven = self.small_group + later.small_group, self.uneven + later.uneven
        return replace(self, scored=later.scored, small_group=small, uneven=uneven, no_reward=failed)

    def check_any_scored(self) -> None:
        """Raise ValueError if no sample can be trained on."""
        if not self.scored:
            raise ValueError(
                f"none of the {self.requested} samples can be trained on: {self.lost} generations failed, "
                f"{self.masked} are masked by their rollout, {self.no_reward} have no reward, "
                f"{self.no_baseline} have no greedy baseline, "
                f"{self.small_group} were alone in their group, {self.uneven} the ranks cannot share."
            )

    def metrics(self) -> dict[str, int]:
        """Counters of the step; raises RuntimeError if samples are missing in the counts."""
        reasons = {name: number for name, number in asdict(self).items() if name not in ("requested", "scored")}
        dropped = sum(reasons.values())
        if self.requested != self.scored + dropped:
            raise RuntimeError(
                f"{self.requested} samples were requested, but {self.scored} scored + {dropped} dropped ({reasons}) do "
                "not add up to it."
            )
        totals = {"requested": self.requested, "scored": self.scored, "dropped": dropped}
        metrics = {f"training/{name}_samples": number for name, number in totals.items()}
        return metrics | {f"training/dropped_samples/{name}": number for name, number in reasons.items()}


def mark_without_baseline(data: DataProto, baselines: Mapping[str, float]) -> None:
    """Mark the samples [B] of prompts (`uid`) that `baselines` lacks in the column `__lost__`, in place."""
    lost = data.non_tensor_batch.get(LOST, np.zeros(len(data), dtype=bool)).astype(object)
    without = np.array([uid not in baselines for uid in data.non_tensor_batch["uid"]], dtype=bool)
    lost[without & ~lost.astype(bool)] = NO_BASELINE
    data.non_tensor_batch[LOST] = lost


def drop_lost(data: DataProto, n: int, ranks: int, whole_groups: bool) -> tuple[DataProto, DropCounts]:
    """Leave out what cannot be trained on, in three counted stages.

    1. rows marked `__lost__` (true or a text; "masked" and "no_baseline" count by themselves); 2. groups (equal `uid`)
    with fewer than min(2, n) samples left, since a group of one has no baseline; 3. the last prompts, until the ranks
    share the rest evenly: prompts where a group must stay on one rank (`whole_groups`, or some group is no longer
    full), else samples.
    The column `__lost__` is taken away.
    """
    uid = data.non_tensor_batch["uid"]
    lost = data.non_tensor_batch.get(LOST, np.zeros(len(data), dtype=bool)).astype(object)
    keep = ~lost.astype(bool)
    named = {reason: int((lost == reason).sum()) for reason in (MASKED, NO_BASELINE)}
    counts = DropCounts(requested=len(data), lost=int((~keep).sum()) - sum(named.values()), **named)

    group = as_torch_index(uid).numpy()  # [B]
    sizes = np.bincount(group[keep], minlength=group.max(initial=-1) + 1)
    in_small = keep & (sizes[group] < min(2, n))
    counts.small_group = int(in_small.sum())
    keep &= ~in_small

    survivors, left = np.unique(group[keep], return_counts=True)  # in order of the data: numbers follow appearance
    in_cut = keep & np.isin(group, survivors[shareable(left, n, ranks, whole_groups) :])
    counts.uneven = int(in_cut.sum())
    keep &= ~in_cut

    counts.scored = int(keep.sum())
    if not keep.all():
        data = data.select_idxs(np.flatnonzero(keep))
    data.non_tensor_batch.pop(LOST, None)
    return data, counts


def shareable(sizes: Sequence[int], n: int, ranks: int, whole_groups: bool) -> int:
    """How many of the first groups the ranks share evenly; `sizes`: samples of each, n where none was lost.

    Whole groups, where one must stay on one rank (`whole_groups`) or some group is no longer full, else samples.
    """
    indivisible = whole_groups or any(size < n for size in sizes)
    return len(sizes) - len(sizes) % (ranks if indivisible else ranks // math.gcd(n, ranks))


def prompt_groups(data: DataProto) -> torch.Tensor:
    """Numbers int64 [B] of runs of adjacent rows of equal `uid`, whose forwards may share prefixes."""
    uid = data.non_tensor_batch["uid"]
    other = torch.from_numpy((uid[1:] != uid[:-1]).astype(bool))
    return torch.cat([torch.zeros(min(1, len(data)), dtype=torch.int64), other.cumsum(0)])


def group_rows(data: DataProto) -> list[np.ndarray]:
    """Row numbers of each group (equal `uid`), groups in order of first appearance."""
    group = as_torch_index(data.non_tensor_batch["uid"]).numpy()
    order = np.argsort(group, kind="stable")
    return np.split(order, np.cumsum(np.bincount(group))[:-1]) if len(group) else []


def fill_groups(data: DataProto, n: int) -> tuple[DataProto, np.ndarray]:
    """Give every group n adjacent rows again, so that ranks get equal numbers of rows after single samples were lost.

    A filler is a copy of its group's first row with `response_mask` 0: no token of it is counted anywhere. Returns the
    filled batch and which of its rows are the data's own, bool [rows]; those come in the data's order, group by group.
    """
    groups = group_rows(data)
    if all(len(rows) == n for rows in groups):
        return data, np.ones(len(data), dtype=bool)
    own = np.concatenate([np.arange(n) < len(rows) for rows in groups])
    index = np.concatenate([np.pad(rows, (0, n - len(rows)), constant_values=rows[0]) for rows in groups])
    filled = data.select_idxs(index)  # a copy, also of response_mask
    filled.batch["response_mask"][~torch.from_numpy(own)] = 0
    return filled, own


def balance(
    data: DataProto, n: int, ranks: int, mini_batch_prompts: int, whole_groups: bool, by_length: bool
) -> dict[str, float]:
    """Reorder the rows [B], in place, so that the ranks get about the same tokens of each mini-batch; metrics.

    Adds the column group_index [B] and meta_info["global_token_num"]. Groups of fewer than n samples, and all groups
    with `whole_groups`, stay on one rank; those count tokens that their rows share once. Without `by_length` the ranks
    get rows in the data's order.
    """
    data.batch["group_index"] = prompt_groups(data)
    tokens = data.batch["attention_mask"].sum(-1)  # [B]
    weights, partition = tokens, None
    if by_length and ranks > 1:
        partition = partial(get_seqlen_balanced_partitions, equal_size=True)
        # A registered policy may read other columns, whose shapes differ: its rows count in full.
        are_texts = len({data.batch[name].shape for name in ("input_ids", "attention_mask", "position_ids")}) == 1
        if are_texts and whole_groups:
            weights = tokens - prefix_tree(data.batch, data.batch["responses"].shape[1]).shared
    group_weights = [weights[rows].tolist() for rows in group_rows(data)]
    uneven = any(len(rows) < n for rows in group_weights)
    order = balanced_order(group_weights, ranks, mini_batch_prompts, partition, whole_groups=uneven or whole_groups)
    data.reorder(torch.from_numpy(order))
    data.meta_info["global_token_num"] = data.batch["attention_mask"].sum(-1).tolist()
    if uneven:
        return {}
    shares = [share.tolist() for share in np.split(order, ranks)]
    return log_seqlen_unbalance(tokens.tolist(), shares, prefix="global_seqlen")


def balanced_order(
    group_sizes: list[list[int]], ranks: int, mini_batch_prompts: int,
    partition: Callable[[list[int], int], list[list[int]]] | None, whole_groups: bool,
) -> np.ndarray:
    """Order of rows [N] in which rank r's contiguous share of every mini-batch weighs about the same.

    group_sizes: tokens of each row, group by group (rows of one group adjacent in the data).
    A mini-batch holds the same prompts whatever the number of ranks: its rows are shared among the ranks, and
    rank r's shares of all mini-batches follow each other. `partition(weights, k)` gives k index lists of equal
    length (None: in order). `whole_groups` keeps the rows of a group together on one rank.
    """
    if whole_groups and mini_batch_prompts % ranks:
        mini_batch_prompts = len(group_sizes)  # mini-batches cannot be shared by groups: share the batch as one
    row_weights = [weight for sizes in group_sizes for weight in sizes]
    row_groups = np.split(np.arange(len(row_weights)), np.cumsum([len(sizes) for sizes in group_sizes])[:-1])
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for first in range(0, len(group_sizes), mini_batch_prompts):
        items = [rows.tolist() for rows in row_groups[first : first + mini_batch_prompts]]
        if not whole_groups:
            items = [[row] for rows in items for row in rows]
        weights = [sum(row_weights[row] for row in rows) for rows in items]
        if len(items) % ranks:
            what = "prompts" if whole_groups else "samples"
            raise ValueError(
                f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch_prompts} gives a mini-batch of {len(items)} "
                f"{what}, which {ranks} ranks cannot share evenly. Use a multiple of {ranks}, also for "
                "data.train_batch_size."
            )
        parts = partition(weights, ranks) if partition else np.split(np.arange(len(items)), ranks)
        for rank, part in enumerate(parts):
            # Sorted, so that the order does not depend on how the balancer works and groups stay adjacent.
            shares[rank] += [row for item in sorted(part) for row in items[item]]
    return np.asarray([row for share in shares for row in share], dtype=np.int64)


def resample_by_score(data: DataProto, settings: Mapping[str, Any]) -> None:
    """Resample the rows by their scores, in place (PF-PPO); their number stays the same.

    The columns uid and group_index are not resampled, so that the ranks can still share the groups evenly; a group may
    then hold rows of several prompts.
    """
    uid, index = data.non_tensor_batch["uid"], data.batch["group_index"]
    drawn = compute_pf_ppo_reweight_data(data, **settings)
    data.batch, data.non_tensor_batch = drawn.batch, {**drawn.non_tensor_batch, "uid": uid}
    data.batch["group_index"] = index
    data.meta_info["global_token_num"] = data.batch["attention_mask"].sum(-1).tolist()


def correct_rollout(data: DataProto, correction: RolloutCorrectionConfig | None) -> dict[str, float]:
    """Weight or reject tokens by the ratio of old_log_probs to rollout_log_probs [B, R], in place; metrics."""
    metrics, columns = calculate_debug_metrics(data), data.batch
    if correction is None:
        metrics |= compute_rollout_corr_metrics_from_logprobs(
            columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
        )
    elif not correction.bypass_mode:  # in bypass mode the update does it, with the log-probs of each step
        metrics |= compute_rollout_correction_and_add_to_batch(data, correction)[1]
    return metrics


def apply_kl_penalty(
    data: DataProto, kl_ctrl: kl.FixedKLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """token_level_rewards = token_level_scores - coefficient * KL(old || ref) on counted tokens; all [B, R].

    Then the controller sees the batch's KL: mean over samples of the mean over their counted tokens.
    """
    mask, coefficient = data.batch["response_mask"], kl_ctrl.value
    gap = kl.kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty) * mask
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - coefficient * gap
    current = (gap.sum(-1) / mask.sum(-1).clamp(min=1)).mean().item()
    kl_ctrl.update(current_kl=current, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": coefficient}


def values_of_rows(data: DataProto) -> dict[str, list[Any]]:
    """B values by name: of columns that are no tensors, and of what the reward function returned besides the score."""
    return reward_extras(data) | {name: column.tolist() for name, column in data.non_tensor_batch.items()}


def compute_advantage(
    data: DataProto, adv_estimator: advantage.AdvantageEstimator | str, gamma: float = 1.0, lam: float = 1.0,
    num_repeat: int = 1, norm_adv_by_std_in_grpo: bool = True, config: Any = None,
) -> DataProto:
    """Add advantages and returns [B, R] by the registered estimator, which takes what its signature names.

    That is a tensor column, a setting or `index` (the column `uid`); a parameter without a default can also name
    another column of the batch, or a value that the reward function returned besides the score: a list of B values.
    """
    columns = values_of_rows(data)
    inputs = {
        "gamma": gamma, "lam": lam, "num_repeat": num_repeat, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
        "config": config, "index": data.non_tensor_batch["uid"], "non_tensor_batch": columns,
        **dict(data.batch.items()),
    }
    advantages, returns = advantage.estimate_advantages(adv_estimator, inputs, columns)
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    if float(advantages.abs().max()) < 1e-6:  # less than rounding leaves of equal rewards
        reward = data.batch["token_level_rewards"].sum(-1).mean().item()
        cause = "student and teacher agree" if adv_estimator == "opd" else (
            "the samples of each prompt have equal rewards: check the reward function, and whether the prompts are too "
            "easy or too hard for the model"
        )  # fmt: skip
        why = f" Probably {cause}." if adv_estimator in (*COMPARES_SAMPLES, "opd") else ""
        logger.warning(
            f"All advantages of this step are 0 (mean reward {reward:.4g}), so its policy loss is 0.{why}"
        )
    return data


def add_loss_columns(data: DataProto, loss: str) -> None:
    """Make a tensor of each column that the policy loss of this name reads (`register_policy_loss`), in place.

    A number for each row becomes a column [B], a list of at most R numbers for each row a column [B, R] with 0 after
    the list's end, both float32. Raises ValueError for a column that is missing or has other values.
    """
    length, values = data.batch["responses"].shape[1], values_of_rows(data)
    for name in LOSS_COLUMNS.get(loss, ()):
        if name in data.batch:
            continue
        if name not in values:
            raise ValueError(
                f"policy loss '{loss}' reads the column '{name}', which the batch lacks. Provide a number for each "
                "row, or a list with one for each token of its response: as a column of the data file, as a value "
                f"that the reward function returns besides the score ({{'score': 1.0, '{name}': 0.5}}), in an agent "
                "loop's extra_fields, or as a tensor that a rollout adds to the batch. The batch has "
                f"{', '.join(sorted({*data.batch.keys(), *values}))}."
            )
        rows = [np.asarray(value) for value in values[name]]
        for value, row in zip(values[name], rows, strict=True):
            is_numeric = row.dtype.kind in "biuf"  # bool, integer, unsigned, float
            if not is_numeric or row.ndim != rows[0].ndim or row.ndim > 1 or row.size > length:
                raise ValueError(
                    f"policy loss '{loss}' reads the column '{name}', where a row has {value!r:.80}. Expected a number "
                    f"for each row, or for each row a list of at most {length} numbers, one for each response token."
                )
        if rows[0].ndim == 1:
            rows = [np.pad(row, (0, length - row.size)) for row in rows]
        data.batch[name] = torch.from_numpy(np.stack(rows)).float()
