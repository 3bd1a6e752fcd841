"""The metrics that a run logs, by name (a pattern, * for a variable part), with their meaning.

METRICS has those of verl; a recipe adds RecipeMetrics.
"""

import functools
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from verl.utils.problems import SHARE_NAMED
from verl.utils.registry import installed_plugins

# (title, explanation, metrics) of each panel of the report; metrics are names, or beginnings that end in "/", "_", "@"
Headlines = tuple[tuple[str, str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class LeftOut:
    """A share of the data or the steps that a run leaves out, computed from a metric.

    Attributes:
        metric: without `of` a share of each step, or a count per step: then the share is that of steps with one.
        text: follows the share in a sentence: "of the answers were cut".
        of: metric of the totals that `metric` counts a part of; the share is sum over sum.
        running: both count from the start of the run, so that the last step has all, and `of` does not include
            `metric`.
    """

    metric: str
    text: str
    of: str | None = None
    running: bool = False


LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut("training/overlong_prompts", "of the prompts are longer than data.max_prompt_length and were left out"),
    LeftOut("training/dropped_samples", "of the requested samples were dropped", "training/requested_samples"),
    LeftOut("fully_async/count/dropped_stale_samples", "of the samples became too old and were dropped",
            "fully_async/count/total_generated_samples", running=True),
    LeftOut("response/aborted_ratio", "of the answers are empty"),
    LeftOut("health/truncated", "of the answers were cut at a limit of tokens"),
    LeftOut("health/without_tool_call", "of the conversations called no tool, although tools are given"),
    LeftOut("health/failed_tool_calls", "of the tool calls failed; the log has the first failure of each kind"),
    LeftOut("health/groups_without_variance", "of the prompts have samples of equal reward, which give no gradient"),
    LeftOut("rollout_corr/rollout_rs_masked_fraction", "of the tokens were rejected by the rollout correction"),
    LeftOut("actor/nonfinite_steps", "of the steps skipped updates of the policy, not finite"),
    LeftOut("critic/nonfinite_steps", "of the steps skipped updates of the critic, not finite"),
    LeftOut("actor/empty_steps", "of the steps skipped updates of the policy, without a counted token"),
    LeftOut("critic/empty_steps", "of the steps skipped updates of the critic, without a counted token"),
    LeftOut("train/rows_without_target", "of the rows have no learned token within data.max_length"),
    LeftOut("train/skipped_steps", "of the steps changed no weight"),
    LeftOut("val/rows_without_target", "of the validation rows have no learned token within data.max_length"),
    LeftOut("val-aux/dropped_samples", "of the validation's samples were dropped", "val-aux/requested_samples"),
    LeftOut("val-aux/overlong_prompts",
            "of the validation prompts are longer than data.max_prompt_length and were left out"),
)  # fmt: skip

METRICS: dict[str, str] = {
    "actor/pg_loss": "Policy loss of the step's mini-batches, mean over them.",
    "actor/pg_clipfrac": "Share of counted tokens whose ratio was clipped.",
    "actor/pg_clipfrac_lower": "Share of counted tokens with a negative advantage that the dual clip bounded.",
    "actor/ppo_kl": "Mean of log(old / new) over counted tokens in the update.",
    "actor/entropy": "Entropy of the policy at counted tokens, nats, aggregated as the loss.",
    "actor/kl_loss": "KL to the reference policy as part of the loss.",
    "actor/kl_coef": "Coefficient of that KL.",
    "actor/grad_norm": "Norm of the gradient before clipping.",
    "actor/lr": "Learning rate of this step's update.",
    "actor/nonfinite_steps": "Mini-batches whose update was skipped for a loss or gradient that is not finite.",
    "actor/empty_steps": "Mini-batches that were skipped since they have no counted token.",
    "actor/logprob_drift*": "|log-prob in the update - log-prob before it| over counted tokens: mean, and _max.",
    "actor/reward_kl_penalty": "KL of old and reference policy that lowered the reward, before its coefficient.",
    "actor/reward_kl_penalty_coeff": "Coefficient of that penalty.",
    "critic/score/*": "Score of the samples as the reward gave it (mean, max, min).",
    "critic/rewards/*": "Sum of token rewards of a sample, minus the KL penalty.",
    "critic/advantages/*": "Advantages of counted tokens.",
    "critic/returns/*": "Returns of counted tokens.",
    "critic/values/*": "Values of counted tokens.",
    "critic/vf_explained_var": "1 - variance of (return - value) over variance of the return.",
    "critic/vf_loss": "Clipped value loss.",
    "critic/vf_clipfrac": "Share of counted tokens whose value was clipped.",
    "critic/vpred_mean": "Mean value in the update.",
    "critic/grad_norm": "Norm of the critic's gradient before clipping.",
    "critic/lr": "Learning rate of the critic's update.",
    "critic/nonfinite_steps": "Mini-batches whose value update was skipped.",
    "critic/empty_steps": "Mini-batches that the critic skipped since they have no counted token.",
    "response_length/*": "Tokens of an answer: mean, max, min, and the share cut at any limit (clip_ratio).",
    "response_length_non_aborted/*": "The same without empty answers.",
    "response/aborted_ratio": "Share of answers without a token.",
    "prompt_length/*": "Tokens of a prompt: mean, max, min, and the share as long as the limit (clip_ratio).",
    "num_turns/*": "Turns of a conversation: those of the model, of tools and users, and the prompt.",
    "tool_call_counts/*": "Tool calls of a conversation.",
    "agent_loop/prefix_hit_rate": "Share of the requests' prompt tokens that the servers' prefix caches held.",
    "agent_loop/restarted_workers": "Agent loop workers that died and were replaced.",
    "agent_loop/end/*": "Share of conversations that ended so; docs/agents.md lists the reasons.",
    "timing_s/agent_loop/reward/busy": "Seconds in which samples were graded, mostly while others were generated.",
    "timing_s/agent_loop/reward/exposed": "Seconds that grading took after the last conversation had ended.",
    "timing_s/agent_loop/*": "Seconds that a conversation spent in generation and in tool calls.",
    "global_seqlen/*": "Tokens of the ranks' shares before balancing, and after it (balanced_*).",
    "rollout/weight_syncs": "How often the step sent weights to the rollout, for its samples and its validation.",
    "rollout/tokens_per_forward": "Rollouts that draft tokens: tokens per forward; ordinary decoding has 1.",
    "rollout/draft_acceptance": "Share of the draft tokens that were accepted (rollout.speculative).",
    "trainer/idle_ratio": "Asynchronous training: share of the step in which the trainer waited for samples.",
    "rollouter/idle_ratio": "Asynchronous training: share of the step in which servers had no request, mean of them.",
    "fully_async/count/stale_samples_processed": "Prompts trained so far whose oldest token is of weights before the "
    "last sync.",
    "fully_async/count/stale_trajectory_processed": "The same of samples.",
    "fully_async/count/current_param_version": "Updates in the weights that the servers hold.",
    "fully_async/count/dropped_stale_samples": "Samples dropped so far since they became too old "
    "(async_training.stale_samples=drop).",
    "fully_async/count/total_generated_samples": "Samples that were generated and graded so far, without dropped ones.",
    "fully_async/count/versions_behind_max": "Updates between the oldest token of the batch and the trained weights.",
    "fully_async/partial/total_partial_num": "Samples finished since the last step that several weights generated.",
    "fully_async/partial/partial_ratio": "Their share of the samples that finished.",
    "fully_async/partial/max_partial_span": "Most weight syncs within one of them.",
    "fully_async/processing_time/*": "Seconds from start to grade of the samples that finished since the last step: "
    "avg, max, min, tp50, tp95, tp99.",
    "training/global_step": "Number of the step.",
    "training/epoch": "Completed passes over the data.",
    "training/weights_version": "Number of the last update in the weights that made the samples.",
    "training/requested_samples": "Samples requested: scored + dropped.",
    "training/scored_samples": "Samples that are trained on.",
    "training/dropped_samples": "Samples left out; below it why: lost, masked, no_reward, small_group, uneven, ...",
    "training/dropped_samples/*": "Samples left out for this reason.",
    "training/overlong_prompts": "Share of the data's prompts that data.filter_overlong_prompts left out.",
    "training/rollout_probs_diff_*": "|probability in the rollout - in the trained model| of sampled tokens.",
    "training/rollout_actor_probs_pearson_corr": "Correlation of the two probabilities.",
    "rollout_corr/rollout_is_*": "Weights pi_old / pi_rollout before truncation, of tokens and sequences (seq_).",
    "rollout_corr/rollout_rs_*": "Ratios that rejection looks at, and the shares of tokens and sequences it masked.",
    "mismatch/*": "The values of rollout_corr/* under their other name.",
    "rollout_corr/*": "Distance of rollout and trained model: perplexities, kl, k3_kl, chi2.",
    "health/groups_without_variance": "Share of prompts whose samples have equal scores.",
    "health/best@*": "Expected largest score of k samples of a prompt, over all subsets of k of the step's samples; "
    "k is 1, 2, 4, ... and rollout.n.",
    "health/pass@*": "The same of whether the reward's `acc` is above 0.5: the probability that one of k is right.",
    "health/pass_change": "health/pass@k of the largest k, mean of the last 10 steps, minus that of the first 10; 0 if "
    "the difference is not more than its noise.",
    "health/first_ratio": "Mean of pi_trainer / pi_rollout over counted tokens before the first optimizer step. "
    "Not with use_rollout_log_probs or bypass_mode, where it is part of actor/ppo_kl.",
    "health/outside_clip_range": "Share of counted tokens whose ratio is outside of the clip range before that step.",
    "health/effective_sample_size": "(mean ratio)^2 / (mean squared ratio) of those ratios: 1 if all are equal.",
    "health/kept_mass": "Rollout hf with top_p or top_k: mean probability of the tokens that they leave.",
    "health/staleness": "Updates of the weights between those that made the samples and the last one, in asynchronous "
    "training those beyond async_training.max_staleness.",
    "health/entropy_ratio": "actor/entropy, mean of the last 5 steps, over that of the first 5 of the run.",
    "health/length_without_reward": "Mean length of the last 10 steps' answers over that of the first 10 of the "
    "run; 1 if the score rose by more than its noise.",
    "health/truncated": "Share of answers that a limit of tokens ended, whichever, and no stop token.",
    "health/failed_tool_calls": "Share of tool calls that failed: unknown tool, wrong arguments, time, exception.",
    "health/without_tool_call": "Share of conversations without a tool call, although tools are given.",
    "health/repeated_answers_reward": "Share of samples with a score above the mean whose answer, of at least 8 "
    "tokens, another prompt has too.",
    "health/grad_norm_ratio": "actor/grad_norm over its median in the last 20 steps.",
    "health/kl_ref_k1": "Mean of log(policy / reference) over counted tokens: unbiased, and noisy.",
    "health/kl_ref_k3": "Mean of reference / policy - 1 - log(reference / policy): unbiased, never negative.",
    "reward/*/mean": "Mean of a number that the reward function returned in addition to its score.",
    "reward/errors": "Samples left out because their reward raised (reward_model.error=drop).",
    "reward/timeouts": "Samples left out because their reward took longer than reward_model.item_timeout.",
    "train/loss": "SFT: minus the log-prob of a learned token, mean over the step's batch.",
    "train/lr": "Learning rate of this step.",
    "train/lr(1e-3)": "The same in thousandths.",
    "train/grad_norm": "Norm of the gradient before clipping.",
    "train/global_tokens": "Tokens of the step's batch on all ranks, without padding.",
    "train/skipped_steps": "1 where loss or gradient was not finite, or nothing was learned, and no weight changed.",
    "train/rows_without_target": "Share of the step's rows that have no learned token within data.max_length.",
    "train/time(s)": "Seconds of the training step.",
    "val/loss": "SFT: the loss over the learned tokens of the full validation set.",
    "val/rows_without_target": "Share of the validation rows that have no learned token within data.max_length, if "
    "there are any.",
    "train/num_gen_batches": "Generations that one DAPO batch took.",
    "timing_s/*": "Seconds of a phase of the step.",
    "timing_per_token_ms/*": "Milliseconds of a phase over the tokens it worked on.",
    "perf/mfu/*": "Model FLOPs of an update on all rows of the step, those included that it leaves out, over what the "
    "GPUs could do at most in that time (trainer.peak_tflops).",
    "perf/throughput": "Tokens per second and rank.",
    "perf/time_per_step": "Seconds of the step.",
    "perf/total_num_tokens": "Tokens of the step's batch.",
    "perf/max_memory_allocated_gb": "Most memory of tensors on a GPU so far, GiB; of the rank with the most.",
    "perf/max_memory_reserved_gb": "The same with what PyTorch's allocator holds beyond that.",
    "perf/max_memory_resident_gb": "On CPUs, most memory of a rank's process so far, an engine in it included, GiB; of "
    "the rank with the most.",
    "perf/cpu_memory_used_gb": "Memory in use on the driver's machine, GiB.",
    "val-core/*": "Validation: <data source>/<variable>/<mean@N, best@N/mean ...> at the largest N; the variable is "
    "`acc` if the reward returns it, else `reward`.",
    "val-aux/*": "Validation: all other statistics, and counts of requested and dropped samples. `score`, as the "
    "reward function returned it, differs from `reward` only if a manager changes it.",
}


@dataclass(frozen=True)
class RecipeMetrics:
    """The metrics of a recipe, which its package names by an entry point of the group `verl.metrics`.

    Attributes:
        meanings: as METRICS.
        headlines: panels that the report shows first if the run has their metrics.
        trends: name -> label of a card with its first and last values.
        counters: name -> label of a card with its sum.
        flags: beginnings of names of the reward's extras that the report shows only where they are not 0.
        left_out: shares that the end of a run and the report name if they are above a tenth.
    """

    meanings: Mapping[str, str]
    headlines: Headlines = ()
    trends: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


@functools.cache
def metrics_of_recipes() -> tuple[RecipeMetrics, ...]:
    """The metrics of all installed recipes."""
    return tuple(pkgutil.resolve_name(path) for _, path in sorted(installed_plugins("metrics").items()))


def all_metrics() -> dict[str, str]:
    """METRICS and those of all installed recipes."""
    return METRICS | {name: meaning for recipe in metrics_of_recipes() for name, meaning in recipe.meanings.items()}


def left_out(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, float, str]]:
    """(metric, share, text) of each share above SHARE_NAMED that a run left out, by its rows of metrics.jsonl."""
    logged = list({row["step"]: row["data"] for row in rows}.values())  # the last row of a step that ran twice
    entries = (*LEFT_OUT, *(entry for recipe in metrics_of_recipes() for entry in recipe.left_out))
    shares = [(entry.metric, _share(entry, logged), entry.text) for entry in entries]
    return [found for found in shares if found[1] > SHARE_NAMED]


def _share(entry: LeftOut, logged: list[Mapping[str, Any]]) -> float:
    """The share that `entry` describes; 0 if no step has its metrics."""
    steps = [data for data in logged if entry.metric in data and (entry.of is None or entry.of in data)]
    if not steps:
        return 0.0
    counts = [float(data[entry.metric]) for data in steps]
    if entry.of is None:
        return sum(min(1.0, count) for count in counts) / len(counts)  # a step that skipped several updates is one
    totals = [float(data[entry.of]) for data in steps]
    if entry.running:
        return counts[-1] / max(1.0, counts[-1] + totals[-1])
    return sum(counts) / max(1.0, sum(totals))


def unknown_metrics(names: list[str]) -> list[str]:
    """Those of the names that no pattern covers."""
    patterns = all_metrics()
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]
