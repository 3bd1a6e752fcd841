"""Metrics `health/*` of a step, and warnings where one of them stays beyond its limits."""

from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
import torch
from loguru import logger

from verl.config.asynchronous import versions_allowed
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.report.health import RULES, Rule, best_of_groups
from verl.reward.rows import judged_text, reward_extras
from verl.reward.rules import lacks_answer
from verl.trainer.ppo.batching import group_rows
from verl.trainer.ppo.metric_utils import cut_answers
from verl.trainer.run.samples import sample_rows
from verl.utils.jsonl import read_objects
from verl.utils.visible_text import visible

WINDOW = 10  # steps whose means are compared
SHORTEST_ANSWER = 8  # tokens; shorter answers of different prompts may well be equal
SHOWN = 200  # characters of an answer's start, and of its end, in a warning
AGAIN_AFTER = 50  # steps until the same warning is given again
SUCCESS = 0.5  # value of the reward's `acc` above which an answer counts as right


class Trend:
    """The first `window` values of a run's metric, and the last ones."""

    def __init__(self, window: int) -> None:
        self.window, self.first, self.last = window, [], deque(maxlen=window)

    def add(self, value: float) -> bool:
        """Enter a step's value; whether it came after the first ones, so that the last can be compared with them."""
        self.last.append(value)
        if len(self.first) == self.window:
            return True
        self.first.append(value)
        return False

    def change_beyond_noise(self) -> float:
        """mean(last) - mean(first), or 0 within its noise: two standard errors of the difference."""
        change = fmean(self.last) - fmean(self.first)
        noise = 2 * ((stdev(self.first) ** 2 + stdev(self.last) ** 2) / self.window) ** 0.5
        return change if abs(change) > noise else 0.0


class RunHealth:
    """Measures each step of a run against the steps before; `replay` gives it those before a resume."""

    def __init__(self, config: PPOConfig) -> None:
        actor = config.actor_rollout_ref.actor
        below = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
        above = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
        self.clip_range = (1 - below, 1 + above)
        correction = config.algorithm.rollout_correction
        # There old_log_probs are the rollout's, whose ratio to themselves says nothing.
        self.bypasses = actor.use_rollout_log_probs or (correction is not None and correction.bypass_mode)
        self.has_texts = config.actor_rollout_ref.model.policy.name == "causal_lm"
        multi_turn = config.actor_rollout_ref.rollout.multi_turn
        self.has_tools = bool(multi_turn.tool_config_path or multi_turn.function_tool_path)
        self.data_source = config.data.reward_fn_key
        self.rewards, self.scores_by_rule = config.reward_model, config.custom_reward_function.path is None
        self.explained = False  # whether it was said what answers without a reward look like
        self.allowed_staleness = versions_allowed(config.async_training) if "async_training" in config else 0
        self.updated: int | None = None  # the last step that changed the weights
        self.entropies, self.passes = Trend(WINDOW // 2), Trend(WINDOW)  # passes: pass@k of the largest k
        self.lengths, self.scores = Trend(WINDOW), Trend(WINDOW)
        self.norms: deque[float] = deque(maxlen=2 * WINDOW)
        self.beyond = dict.fromkeys((rule.metric for rule in RULES), 0)  # steps in a row
        self.warned: dict[str, int] = {}

    def measure(self, batch: DataProto, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """health/* of a step from its batch [B] and its other metrics; logs a line for each rule that is broken."""
        values = {**self._signal(batch), **distances(batch, self.clip_range, self.bypasses)}
        values |= self._trends(step, {**metrics, **{f"health/{name}": value for name, value in values.items()}})
        if self.has_texts:
            values["truncated"] = metrics["response_length/clip_ratio"]
            values["repeated_answers_reward"] = repeated_answers_reward(batch)
            values |= self._of_tools(batch)
        named = {f"health/{name}": float(value) for name, value in values.items()}
        self._warn(step, {**metrics, **named})  # the rollout has measured some, such as health/kept_mass
        return named

    def _of_tools(self, batch: DataProto) -> dict[str, float]:
        """Shares of the conversations without a call and of the calls that failed, where tools are given."""
        calls = batch.non_tensor_batch.get("tool_call_counts") if self.has_tools else None
        if calls is None:
            return {}
        values = {"without_tool_call": float(np.mean([not count for count in calls]))}
        made = sum(count or 0 for count in calls)  # None: a row of a loop without tools
        if made and (failed := batch.non_tensor_batch.get("failed_tool_calls")) is not None:
            values["failed_tool_calls"] = sum(count or 0 for count in failed) / made
        return values

    def explain_no_reward(self, batch: DataProto, tokenizer: Any, step: int) -> None:
        """Warn, at the first step whose samples all have the same reward of at most 0, of what their answers look like.

        Reads token_level_scores [B, R] and what `measure` and `sample_rows` read.
        """
        scores = batch.batch["token_level_scores"].sum(-1)
        if self.explained or not self.has_texts or scores.max() > 0 or scores.max() - scores.min() > 1e-9:
            return
        self.explained = True
        texts = [row["output"] for row in sample_rows(batch, tokenizer, scores.tolist(), {}, step)]
        facts = [f"{cut_answers(batch).float().mean().item():.0%} of the answers were cut at a limit of tokens"]
        if lacking := self._without_answer(batch, tokenizer):
            facts.append(f"the scorer found no answer to compare in {np.mean(lacking):.0%}")
        if (share := self._of_tools(batch).get("without_tool_call")) is not None:
            facts.append(f"{share:.0%} called no tool, although tools are given")
        text = texts[0] if len(texts[0]) <= 2 * SHOWN else f"{texts[0][:SHOWN]} ... {texts[0][-SHOWN:]}"
        logger.warning(
            f"step {step}: all {len(texts)} samples have the reward {scores[0].item():g}, from which nothing can be "
            f"learned. {'; '.join(facts)}. One answer: {visible(text)!r}"
        )

    def _without_answer(self, batch: DataProto, tokenizer: Any) -> list[bool]:
        """Whether the scorer found no answer, of each sample for which its `pred` or its rule can say."""
        if (predicted := reward_extras(batch).get("pred")) is not None:
            return [value in (None, "", "[INVALID]") for value in predicted]
        sources = batch.non_tensor_batch.get(self.data_source)
        if sources is None or not self.scores_by_rule:
            return []
        responses, generated = batch.batch["responses"], batch.batch["response_mask"]
        valid = batch.batch["attention_mask"][:, -responses.shape[1] :].bool()
        lacking = []
        for source, ids, own, kept in zip(sources, responses, generated, valid, strict=True):
            lacks = lacks_answer(source, judged_text(self.rewards, tokenizer, ids[kept].tolist(), own[kept].tolist()))
            if lacks is not None:
                lacking.append(lacks)
        return lacking

    def replay(self, metrics_file: Path) -> None:
        """Continue after the steps in a run's metrics.jsonl: a resumed run measures what an uninterrupted one does."""
        for _, row in read_objects(metrics_file, growing=True):
            step, metrics = row["step"], row["data"]
            if "critic/score/mean" in metrics:  # a validation before the first step has no samples to train on
                self._trends(step, metrics)
                self._rules_to_report(step, metrics)

    def _signal(self, batch: DataProto) -> dict[str, float]:
        """Share of groups without variance, best@k of the scores, pass@k of the reward's `acc`."""
        scores = batch.batch["token_level_scores"].sum(-1).double().numpy()
        groups = [rows for rows in group_rows(batch) if len(rows) > 1]
        if not groups:
            return {}
        values = {"groups_without_variance": float(np.mean([np.ptp(scores[rows]) < 1e-9 for rows in groups]))}
        values |= {f"best@{k}": value for k, value in best_of_groups(scores[rows] for rows in groups).items()}
        right = reward_extras(batch).get("acc")
        if right is not None and all(isinstance(value, int | float | np.bool_) for value in right):
            passed = np.array(right, dtype=float) > SUCCESS
            values |= {f"pass@{k}": value for k, value in best_of_groups(passed[rows] for rows in groups).items()}
        return values

    def _trends(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Weights, pass@k, entropy, length and gradient norm against those of earlier steps."""
        values = {}
        if self.updated is not None and "training/weights_version" in metrics:
            values["staleness"] = max(0, self.updated - metrics["training/weights_version"] - self.allowed_staleness)
        if "actor/pg_loss" in metrics:
            self.updated = step
        if ks := [int(name.partition("@")[2]) for name in metrics if name.startswith("health/pass@")]:
            if self.passes.add(metrics[f"health/pass@{max(ks)}"]):
                values["pass_change"] = self.passes.change_beyond_noise()
        if (entropy := metrics.get("actor/entropy")) is not None:
            if self.entropies.add(entropy) and fmean(self.entropies.first) > 0:
                values["entropy_ratio"] = fmean(self.entropies.last) / fmean(self.entropies.first)
        if (norm := metrics.get("actor/grad_norm")) is not None and np.isfinite(norm):
            if len(self.norms) >= WINDOW // 2 and median(self.norms) > 0:
                values["grad_norm_ratio"] = norm / median(self.norms)
            self.norms.append(norm)
        if self.has_texts:
            self.scores.add(metrics["critic/score/mean"])
            if self.lengths.add(metrics["response_length/mean"]):
                growth = fmean(self.lengths.last) / max(1e-9, fmean(self.lengths.first))
                gained = self.scores.change_beyond_noise() > 0  # then longer answers are no problem
                values["length_without_reward"] = 1.0 if gained else growth
        return values

    def _warn(self, step: int, values: Mapping[str, float]) -> None:
        for rule in self._rules_to_report(step, values):
            logger.warning("step {}: {}", step, rule.warning(values[rule.metric]))

    def _rules_to_report(self, step: int, values: Mapping[str, float]) -> list[Rule]:
        """Rules that are broken for long enough, each at most once in AGAIN_AFTER steps."""
        rules = []
        for rule in RULES:
            if rule.metric not in values:
                continue
            broken = rule.is_broken_by(values[rule.metric])
            self.beyond[rule.metric] = self.beyond[rule.metric] + 1 if broken else 0
            is_new = step >= self.warned.get(rule.metric, -AGAIN_AFTER) + AGAIN_AFTER
            if self.beyond[rule.metric] >= rule.patience and is_new:
                self.warned[rule.metric] = step
                rules.append(rule)
        return rules


def distances(batch: DataProto, clip_range: tuple[float, float], bypasses: bool = False) -> dict[str, float]:
    """The trained model against the rollout's, and against the reference policy, before the step's first update.

    Reads response_mask, old_log_probs, rollout_log_probs and ref_log_prob [B, R], as far as they are there. `bypasses`:
    old_log_probs are rollout_log_probs, and the trained model's are not known.
    """
    columns: Any = batch.batch
    counted = columns["response_mask"].bool()
    old = columns.get("old_log_probs")
    if old is None or not counted.any():
        return {}
    values, old = {}, old[counted].double()
    if not bypasses and (rollout := columns.get("rollout_log_probs")) is not None:
        ratio = (old - rollout[counted].double()).clamp(-20, 20).exp()
        low, high = clip_range
        values["first_ratio"] = ratio.mean().item()
        values["outside_clip_range"] = ((ratio < low) | (ratio > high)).double().mean().item()
        values["effective_sample_size"] = (ratio.mean() ** 2 / ratio.square().mean()).item()
    if (reference := columns.get("ref_log_prob")) is not None:
        gap = reference[counted].double() - old
        values["kl_ref_k1"] = -gap.mean().item()
        values["kl_ref_k3"] = (gap.clamp(-20, 20).exp() - 1 - gap).mean().item()
    return values


def repeated_answers_reward(batch: DataProto) -> float:
    """Share of the samples with a score above the mean whose answer another prompt's sample has too.

    Answers of fewer than SHORTEST_ANSWER tokens do not count as repeated.
    """
    scores = batch.batch["token_level_scores"].sum(-1)
    high = (scores > scores.mean()).tolist()
    if not any(high):
        return 0.0
    responses = batch.batch["responses"]
    lengths = batch.batch["attention_mask"][:, -responses.shape[1] :].sum(-1).tolist()
    answers = [tuple(row[:length]) for row, length in zip(responses.tolist(), lengths, strict=True)]
    pairs = set(zip(answers, batch.non_tensor_batch["uid"].tolist(), strict=True))
    prompts_with = Counter(answer for answer, _ in pairs)
    repeated = [len(answer) >= SHORTEST_ANSWER and prompts_with[answer] > 1 for answer in answers]
    return torch.tensor(repeated)[high].double().mean().item()
