"""Advantage estimators: from token-level rewards to advantages, one function per estimator, all in one registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.aggregation import masked_mean, masked_whiten
from verl.algos.names import AdvantageEstimator
from verl.utils.registry import Registry
from verl.utils.user_code import defined_at, kind

Estimate = tuple[Tensor, Tensor]
AdvantageFn = Callable[..., Estimate]

ADV_ESTIMATOR_REGISTRY: Registry[str, AdvantageFn] = Registry(
    "algorithm.adv_estimator",
    "Your own: register it with register_adv_est in a module named by actor_rollout_ref.model.external_lib.",
)
# Decorator: enter an estimator `fn(token_level_rewards, response_mask, ...) -> (advantages, returns)` under a name.
register_adv_est = ADV_ESTIMATOR_REGISTRY.register
get_adv_estimator_fn = ADV_ESTIMATOR_REGISTRY.find


def inputs_of(name_or_enum: str | AdvantageEstimator) -> tuple[str, ...]:
    """Names of an estimator's parameters."""
    return tuple(inspect.signature(get_adv_estimator_fn(name_or_enum)).parameters)


def estimate_advantages(
    name_or_enum: str | AdvantageEstimator, inputs: Mapping[str, Any], columns: Mapping[str, Any] | None = None
) -> Estimate:
    """Call the estimator with those of `inputs` that its signature names (all of them if it takes **kwargs).

    So a caller offers everything it has (token_level_rewards, response_mask, values, index, reward_baselines,
    gamma, lam, config, ...) without a branch by estimator. `columns` of the batch supply what `inputs` lack, but only
    to parameters without a default: data files and reward functions choose the columns' names, and none must set an
    option by chance. A required input that is missing is an error.
    """
    fn = get_adv_estimator_fn(name_or_enum)
    parameters = inspect.signature(fn).parameters.values()
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    required = [p.name for p in named if p.default is inspect.Parameter.empty]
    from_columns = {name: value for name, value in (columns or {}).items() if name in required}
    inputs = {**from_columns, **inputs}
    missing = [name for name in required if name not in inputs]
    if missing:
        raise ValueError(
            f"algorithm.adv_estimator='{name_or_enum}' needs {', '.join(missing)}, which this batch lacks; "
            f"it has {', '.join(sorted(inputs))}."
        )
    takes_all = len(named) < len(parameters)
    estimate = fn(**(inputs if takes_all else {p.name: inputs[p.name] for p in named if p.name in inputs}))
    shape = inputs["token_level_rewards"].shape
    if not isinstance(estimate, tuple) or [getattr(t, "shape", None) for t in estimate] != [shape, shape]:
        raise TypeError(
            f"advantage estimator {defined_at(fn)} returned {kind(estimate)}; expected (advantages, returns), two "
            f"tensors of shape {tuple(shape)}, as token_level_rewards."
        )
    return estimate


def as_torch_index(index: Any, device: torch.device | str | None = None) -> torch.Tensor:
    """Group labels [N] of any type -> int64 [N]: numbers 0..G-1 in order of first appearance."""
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    labels = np.asarray(index)
    if labels.ndim != 1:
        raise ValueError(f"group labels have shape {labels.shape}; expected one label per sample, shape [N]")
    seen: dict[Any, int] = {}
    numbers = [seen.setdefault(label, len(seen)) for label in labels.tolist()]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Groups:
    """Samples of one prompt: ids [B] int64 (0.. per distinct prompt), sizes [B] (members of the sample's group)."""

    ids: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, index: np.ndarray | Tensor | list, device: torch.device) -> Groups:
        """Group by equal entries of `index` [B] (uid texts, or numbers)."""
        ids = as_torch_index(index, device)
        return cls(ids, ids.bincount().double()[ids])

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each sample's group. [B] or [B, T] -> the same shape."""
        return torch.zeros_like(values).index_add_(0, self.ids, values)[self.ids]

    def baseline(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """(Weighted) mean over each sample's group; 0 for a group of one, which has no baseline. [B] -> [B]."""
        weights = torch.ones_like(values) if weights is None else weights
        mean = self.sum(weights * values) / self.sum(weights).clamp(min=1)
        return torch.where(self.sizes == 1, 0.0, mean)

    def std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation of each sample's group; 0 for a group of one. [B] -> [B]."""
        squares = self.sum((values - self.sum(values) / self.sizes).square())
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt()


def _scores(token_level_rewards: Tensor, index: Any) -> tuple[Tensor, Groups]:
    """Reward of each sample [B], in double (equal float32 rewards then centre to 0), with the groups of the samples."""
    scores = token_level_rewards.double().sum(-1)
    return scores, Groups.of(index, scores.device)


def _on_tokens(per_sample: Tensor, like: Tensor, response_mask: Tensor) -> Estimate:
    """Each sample's value on its counted tokens, as advantages and as returns: [B] -> two of [B, T]."""
    advantages = per_sample.to(like.dtype).unsqueeze(-1) * response_mask.to(like.dtype)
    return advantages, advantages


def _whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and std 1 over the positions where `mask` is 1, and 0 elsewhere. [B, T] -> [B, T].

    Fewer than two counted positions have no std: they are only centred.
    """
    whitened = masked_whiten(values, mask) if mask.sum() > 1 else values - masked_mean(values, mask)
    return torch.where(mask != 0, whitened, torch.zeros_like(whitened))


@register_adv_est(AdvantageEstimator.GAE)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float | Tensor, lam: float | Tensor
) -> Estimate:
    """Generalised advantage estimation (arXiv 1506.02438), whitened. All [B, T] -> two of [B, T].

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1};  return_t = A_t + V_t.
    A token that is not counted (a tool's answer within the response) is stepped over: the next counted token's
    value and advantage pass through it.
    """
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    reversed_advantages = []
    for t in reversed(range(values.shape[1])):
        counted = response_mask[:, t] != 0
        advantage = token_level_rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_value = torch.where(counted, values[:, t], next_value)
        next_advantage = torch.where(counted, advantage, next_advantage)
        reversed_advantages.append(next_advantage)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return _whiten(advantages, response_mask), advantages + values


@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)  # no other function: grpo is vectorised here
@register_adv_est(AdvantageEstimator.GRPO)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True, config=None,
) -> Estimate:
    """Score minus its group's mean, over the group's std + epsilon (GRPO, arXiv 2402.03300). [B, T] -> two of [B, T].

    `norm_adv_by_std_in_grpo=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). `index` [B] groups the
    samples; a sample alone in its group has no baseline: its advantage is its score.
    """
    scores, groups = _scores(token_level_rewards, index)
    advantages = scores - groups.baseline(scores)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / torch.where(groups.sizes == 1, 1.0, groups.std(scores) + epsilon)
    return _on_tokens(advantages, token_level_rewards, response_mask)


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True, config=None, **kwargs,
) -> Estimate:
    """Only a group's best sample counts, by its lead over the second (pass@k, arXiv 2503.19595). [B, T] -> [B, T] x2.

    The first of equals is the best, with lead 0. A group of one has no second: that is an error.
    """
    scores, groups = _scores(token_level_rewards, index)
    if bool((groups.sizes < 2).any()):
        row = int((groups.sizes < 2).nonzero()[0])
        raise ValueError(
            f"algorithm.adv_estimator='grpo_passk' needs at least 2 samples of each prompt; the group "
            f"{np.asarray(index)[row]!r} (row {row}) has 1. Set actor_rollout_ref.rollout.n >= 2."
        )
    # Rows sorted by group, best score first; a stable sort keeps the earlier of equals ahead.
    order = scores.argsort(descending=True, stable=True)
    order = order[groups.ids[order].argsort(stable=True)]
    begins = torch.ones(len(order), dtype=torch.bool, device=scores.device)  # where a group begins in `order`
    begins[1:] = groups.ids[order].diff() != 0
    best, second = order[begins], order[1:][begins[:-1]]
    advantages = torch.zeros_like(scores)
    advantages[best] = scores[best] - scores[second]
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores) + epsilon)
    return _on_tokens(advantages, token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED)
@register_adv_est(AdvantageEstimator.RLOO)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, epsilon: float = 1e-6, config=None, **kwargs
) -> Estimate:
    """Score minus the mean of the *other* samples of its group (RLOO, arXiv 2402.14740). [B, T] -> two of [B, T]."""
    scores, groups = _scores(token_level_rewards, index)
    others = (groups.sum(scores) - scores) / (groups.sizes - 1).clamp(min=1)
    return _on_tokens(scores - others, token_level_rewards, response_mask)


compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


@register_adv_est(AdvantageEstimator.OPO)
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, epsilon: float = 1e-6, config=None, **kwargs
) -> Estimate:
    """Score minus the length-weighted mean of its group (OPO, arXiv 2505.23585). [B, T] -> two of [B, T].

    baseline = sum(length * score) / sum(length).
    """
    scores, groups = _scores(token_level_rewards, index)
    lengths = response_mask.double().sum(-1)
    return _on_tokens(scores - groups.baseline(scores, lengths), token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.GPG)
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, epsilon: float = 1e-6, f_norm: float = 1.0,
    alpha: float = 1.0, config=None, **kwargs,
) -> Estimate:
    """alpha * B / (B - M) * (score - group mean) / f_norm (GPG, arXiv 2504.02546). [B, T] -> two of [B, T].

    M counts the samples that give no gradient (score = group mean: all right or all wrong): batches with many of
    them are scaled up, so that the gradient's size does not depend on their share.
    """
    scores, groups = _scores(token_level_rewards, index)
    centred = scores - groups.baseline(scores)
    scale = alpha * len(scores) / max(int(centred.count_nonzero()), 1)
    return _on_tokens(scale * centred / f_norm, token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config=None, **kwargs
) -> Estimate:
    """Discounted return of each token, whitened over the batch (REINFORCE++, arXiv 2501.03262). [B, T] -> [B, T] x2.

    G_t = r_t + gamma * G_{t+1}, with gamma = algorithm.gamma; a token that is not counted (a tool's answer within
    the response) is stepped over.
    """
    if config is None:
        raise ValueError("algorithm.adv_estimator='reinforce_plus_plus' needs `config` (it reads algorithm.gamma).")
    running = torch.zeros_like(token_level_rewards[:, 0])
    returns = torch.zeros_like(token_level_rewards)
    for t in reversed(range(token_level_rewards.shape[1])):
        running = torch.where(response_mask[:, t] != 0, token_level_rewards[:, t] + config.gamma * running, running)
        returns[:, t] = running
    return _whiten(returns, response_mask), returns


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray | Tensor, epsilon: float = 1e-6, config=None,
    **kwargs,
) -> Estimate:
    """Score minus its group's mean, whitened over all tokens of the batch (arXiv 2501.03262). [B, T] -> [B, T] x2."""
    scores, groups = _scores(token_level_rewards, index)
    on_tokens, _ = _on_tokens(scores - groups.baseline(scores), token_level_rewards, response_mask)
    advantages = _whiten(on_tokens, response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.REMAX)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config=None, **kwargs
) -> Estimate:
    """Return of each token minus the greedy answer's score (ReMax, arXiv 2310.10505). [B, T], [B] -> two of [B, T].

    return_t = sum of the rewards of counted tokens from t on.
    """
    mask = response_mask.to(token_level_rewards.dtype)
    returns = (token_level_rewards * mask).flip(-1).cumsum(-1).flip(-1)
    return (returns - reward_baselines.unsqueeze(-1)) * mask, returns


@register_adv_est(AdvantageEstimator.OPD)
@torch.no_grad()
def compute_on_policy_distillation_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, old_log_probs: Tensor, ref_log_prob: Tensor, config=None,
    **kwargs,
) -> Estimate:
    """log teacher - log student of each sampled token, on that token alone; rewards are ignored. [B, T] -> [B, T] x2.

    Its policy gradient is that of the reverse KL(student || teacher) of the next-token distributions at the student's
    own prefixes, estimated from the sampled token (on-policy distillation, GKD with student samples, arXiv 2306.13649).
    The reference policy is the teacher (`actor_rollout_ref.ref.model_path`).
    """
    advantages = torch.where(response_mask != 0, ref_log_prob - old_log_probs, 0.0)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.GDPO)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True, config=None, non_tensor_batch: Mapping[str, Any] | None = None, **kwargs,
) -> Estimate:
    """GRPO's advantage of each reward of a sample by itself, then their weighted sum, whitened over the batch's tokens
    (GDPO, arXiv 2601.05242). [B, T] -> two of [B, T].

    The rewards are the values `config.gdpo_reward_keys` in `non_tensor_batch`, B numbers each, with the weights
    `config.gdpo_reward_weights` (1 without them); the score is ignored.
    """
    keys = config.gdpo_reward_keys
    weights = config.gdpo_reward_weights or [1.0] * len(keys)
    known = non_tensor_batch or {}
    total = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    for key, weight in zip(keys, weights, strict=True):
        if key not in known:
            rule = f"the reward function returned {', '.join(sorted(map(str, known))) or 'nothing besides the score'}"
            raise ValueError(f"algorithm.gdpo_reward_keys names {key!r}; {rule}.")
        rewards = torch.as_tensor(np.asarray(known[key], dtype=np.float64), device=response_mask.device)
        if not torch.isfinite(rewards).all():
            row = int((~torch.isfinite(rewards)).nonzero()[0])
            value = f"{key!r} of row {row} is {rewards[row]:g}, not a finite number"
            raise ValueError(f"algorithm.gdpo_reward_keys: {value}.")
        per_key, _ = compute_grpo_outcome_advantage(
            rewards.unsqueeze(-1), torch.ones_like(rewards).unsqueeze(-1), index, epsilon, norm_adv_by_std_in_grpo
        )
        total += weight * per_key.squeeze(-1)
    advantages = _whiten(_on_tokens(total, token_level_rewards, response_mask)[0], response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)  # no other function: tools' answers are stepped over
@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, old_log_probs: Tensor,
    sum_pi_squared: Tensor, rollout_is_weights: Tensor | None = None, handle_zero_tail: bool = True,
    epsilon: float = 1e-8, **kwargs,
) -> Estimate:
    """Return of each token minus a baseline of its position in the group (arXiv 2602.07078). [B, T] -> two of [B, T].

    baseline_t = sum of W_t * G_t / (sum of W_t + epsilon) over the prompt's samples that go on at t. G_t: the rewards
    from t on. W_t: the gradient's squared norm, estimated as the sum over j <= t of 1 - 2 * pi_j + `sum_pi_squared`_j,
    times `rollout_is_weights`_t squared. With `handle_zero_tail` the baseline is 0 where one sample of several goes on,
    since it would be that sample's return. Tokens that are not counted (a tool's answer) are stepped over.
    """
    mask = response_mask.to(torch.float64)
    returns = (token_level_rewards * mask).flip(-1).cumsum(-1).flip(-1)
    continues = mask.flip(-1).cumsum(-1).flip(-1) > 0  # a counted token follows, or is here
    energy = ((1 - 2 * old_log_probs.double().exp() + sum_pi_squared) * mask).cumsum(-1)
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.double().square()
    weights = energy * continues
    groups = Groups.of(index, response_mask.device)
    baseline = groups.sum(weights * returns) / (groups.sum(weights) + epsilon)
    if handle_zero_tail:
        alone = (groups.sum(continues.double()) == 1) & (groups.sizes > 1).unsqueeze(-1)
        baseline = torch.where(alone, 0.0, baseline)
    advantages = ((returns - baseline) * mask).to(token_level_rewards.dtype)
    return advantages, returns.to(token_level_rewards.dtype)


compute_multi_turn_optimal_token_baseline_advantage = compute_optimal_token_baseline_advantage
