"""The rollout phase: generation by the actor's ranks and scores of the rewards, for training and validation."""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl.agents.agent_loop.manager import manager_class
from verl.config.compose import to_omegaconf
from verl.config.ppo import PPOConfig
from verl.config.roles import serves_reward_model
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.protocol.serialization import object_array
from verl.reward.rows import EXTRAS, GRADED, LOST, drop_failed, place_scores
from verl.reward.stream import RewardStream, can_stream
from verl.rollout.replica import RolloutReplicaRegistry
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.batching import DropCounts, compute_response_mask
from verl.trainer.ppo.metric_utils import reduce_metrics
from verl.trainer.ppo.rollout_skip import RolloutSkip
from verl.utils.tokenizer import stop_ids

ROW = "sample_row"  # column with a sample's number in the step [B], while its score is computed in the background


class RolloutPhase:
    """Generates samples of prompts and scores them.

    `actor_group` generates, `rm_group` is the reward model's worker group or None. With rollout.mode=async and a
    rollout that has a server, agent loops hold the conversations; otherwise the ranks answer the prompts in batches.
    """

    has_texts = False  # whether responses are tokens that the model wrote: then the column end_reason is completed
    model_path: str | None = None  # whose stop tokens end an answer; None for that of the tokenizer

    def __init__(
        self, config: PPOConfig, tokenizer: Any, actor_group: RayWorkerGroup, rm_group: RayWorkerGroup | None
    ) -> None:
        self.rollout_config = config.actor_rollout_ref.rollout
        serves = RolloutReplicaRegistry.serves(self.rollout_config)
        self.agent_loops = manager_class(config)(to_omegaconf(config), actor_group) if serves else None
        if self.rollout_config.skip_rollout:
            RolloutSkip(config, self.agent_loops or actor_group).wrap_generate_sequences()
        self.streams_rewards = config.reward_model.use_reward_loop and not self.rollout_config.skip_rollout
        self.has_texts = config.actor_rollout_ref.model.policy.name == "causal_lm"
        self.tokenizer, self.model_path = tokenizer, config.actor_rollout_ref.model.path
        self.actor_group = actor_group
        self.rm_group = None if serves_reward_model(config) else rm_group  # a served one is asked over HTTP

    def close(self) -> None:
        """End the agent loops' workers."""
        if self.agent_loops is not None:
            self.agent_loops.close()

    def generate(
        self, prompts: DataProto, step: int, validate: bool = False, reward_fn: Any = None, **overrides: Any
    ) -> tuple[DataProto, dict[str, float]]:
        """n samples of each prompt, those of one prompt adjacent, joined with the prompts' columns; rollout metrics.

        Prompts [B, P] give samples [B * n, T] with response_mask [B * n, R], 1 = token of the response. `overrides`
        replace entries of the meta_info that the rollout reads. Raises ValueError if the rollout returns other rows.

        With `reward_fn` and agent loops, samples are graded as they finish, if the manager scores each by itself;
        `score` then reads the results.
        """
        gen_batch = self._request(prompts, step, validate, **overrides)
        n = gen_batch.meta_info["n"]
        stream = self._reward_stream(reward_fn)
        if stream is not None:
            output = self._generate_graded(gen_batch, prompts.non_tensor_batch, stream)
        elif self.agent_loops is not None:
            output = self.agent_loops.generate_sequences(gen_batch)
        else:
            padded, pad = pad_dataproto_to_divisor(gen_batch, self.actor_group.world_size)
            output = unpad_dataproto(self.actor_group.generate_sequences(padded), pad_size=pad * n)
        if len(output) != len(prompts) * n:
            raise ValueError(
                f"rollout '{self.rollout_config.name}' returned {len(output)} rows for {len(prompts)} prompts x n={n}; "
                f"expected {len(prompts) * n}, samples of one prompt adjacent."
            )
        metrics = reduce_metrics(dict(output.meta_info["metrics"])) if "metrics" in output.meta_info else {}
        samples = self._samples(prompts, output, n, step)
        if stream is not None:
            metrics |= stream.finish(samples)
        return samples, metrics

    def _generate_graded(
        self, gen_batch: DataProto, columns: Mapping[str, np.ndarray], stream: RewardStream
    ) -> DataProto:
        """The agent loops' samples, put into the stream as they finish, with the prompts' columns [B].

        Where every loop scored its own conversation, none is put in.
        """
        n = gen_batch.meta_info["n"]
        scored_by_loop: list[tuple[int, DataProto]] = []  # (number of the sample, its row)

        def grade(index: int, row: DataProto) -> None:
            prompt = {name: column[index // n : index // n + 1] for name, column in columns.items()}
            stream.put(index, DataProto(row.batch, {**prompt, **row.non_tensor_batch}, {}))

        def on_finished(index: int, row: DataProto) -> None:
            if "reward_score" in row.non_tensor_batch:
                scored_by_loop.append((index, row))
            else:
                grade(index, row)

        try:
            output = self.agent_loops.generate_sequences(gen_batch, on_finished=on_finished)
            if "rm_scores" not in output.batch:  # some rows have no score: grade all
                for index, row in scored_by_loop:
                    grade(index, row)
        except BaseException:
            stream.close()
            raise
        return output

    def probe(self, prompts: DataProto, n: int, tokens: int) -> DataProto:
        """n samples [B * n, T] of at most `tokens` tokens, drawn by the engines at temperature 1 without filters.

        With rollout_log_probs [B * n, tokens], unless a rollout of the user's own does not return them.
        """
        sampling = {"n": n, "temperature": 1.0, "do_sample": True, "probe_tokens": tokens}
        output = self.actor_group.generate_sequences(self._request(prompts, 0, True, **sampling))
        samples = self._samples(prompts, output, n, 0)
        samples.non_tensor_batch, samples.meta_info = {"uid": samples.non_tensor_batch["uid"]}, {"temperature": 1.0}
        return samples

    def _request(self, prompts: DataProto, step: int, validate: bool = False, **overrides: Any) -> DataProto:
        """The prompts [B, P] with all of their columns, and the meta_info that a rollout reads."""
        sampling = self.rollout_config.val_kwargs if validate else self.rollout_config
        meta = {name: sampling[name] for name in ("n", "temperature", "do_sample")}
        meta |= {"validate": validate, "global_steps": step, "recompute_log_prob": False}
        meta |= {"eos_token_id": list(self._stop_ids), "pad_token_id": self.tokenizer.pad_token_id}
        return DataProto(prompts.batch, dict(prompts.non_tensor_batch), meta | overrides)

    def _samples(self, prompts: DataProto, output: DataProto, n: int, step: int) -> DataProto:
        """The rows [B * n, T] that a rollout returned, with response_mask [B * n, R] and the columns of their prompts.

        The rollout may have changed a column (extra_info): its own columns replace those of the prompts.
        """
        columns = {name: np.repeat(column, n, axis=0) for name, column in prompts.non_tensor_batch.items()}
        meta = {"global_steps": step, "temperature": self.rollout_config.temperature}
        samples = DataProto(output.batch, columns | output.non_tensor_batch, meta)
        if "response_mask" not in samples.batch:
            samples.batch["response_mask"] = compute_response_mask(samples)
        if self.has_texts:
            stops = () if self.rollout_config.ignore_eos else self._stop_ids
            samples.non_tensor_batch["end_reason"] = end_reasons(samples, stops)
        return samples

    @cached_property
    def _stop_ids(self) -> list[int]:
        return stop_ids(self.tokenizer, self.model_path, self.rollout_config.stop_token_ids)

    def generate_for_validation(
        self, prompts: DataProto, step: int, reward_fn: Any = None
    ) -> tuple[DataProto, dict[str, float]]:
        """`generate` with rollout.val_kwargs; samples whose generation failed are left out."""
        samples, metrics = self.generate(prompts, step, validate=True, reward_fn=reward_fn)
        return without_lost(samples)[0], metrics

    def _reward_stream(self, reward_fn: Any) -> RewardStream | None:
        """None unless agent loops report finished samples without rewards and the manager grades each by itself."""
        if reward_fn is None or self.agent_loops is None or self.rm_group is not None or not self.streams_rewards:
            return None
        if self.rollout_config.agent.reports_rewards or not self.agent_loops.reports_finished:
            return None
        return RewardStream(reward_fn) if can_stream(reward_fn) else None

    def score(self, samples: DataProto, reward_fn: Any) -> tuple[DataProto, torch.Tensor, dict[str, Any], Any]:
        """Samples that have a score, token-level scores [B, R], extras by name, and how many failed in which way.

        Scores that the agent loops gave to all samples (rm_scores [B, R]) take the place of `reward_fn`. With
        rollout.multi_turn.add_turn_rewards, scores contain what tools and interactions gave.
        With a reward model, its rm_scores [B, R] are a column that the reward manager takes or mixes in.
        """
        scores, extras = samples.batch.pop("rm_scores", None), {}  # of the agent loops
        if scores is None:
            if self.rm_group is not None:
                samples.union(self._reward_model_scores(samples))
            result = reward_fn(samples, return_dict=True)
            scores, extras = result["reward_tensor"], result["reward_extra_info"]
        samples.non_tensor_batch.pop(GRADED, None)
        samples, scores, extras, failed = drop_failed(samples, scores, extras)
        if self.rollout_config.multi_turn.add_turn_rewards:
            sums = np.zeros(len(samples))
            for name in ("turn_scores", "tool_rewards"):  # loops without turns have neither
                if name in samples.non_tensor_batch:
                    sums += [sum(rewards or ()) for rewards in samples.non_tensor_batch[name]]
            scores = scores + place_scores(samples, sums.tolist())
        return samples, scores, extras, failed

    def _reward_model_scores(self, samples: DataProto) -> DataProto:
        """rm_scores [B, R] of the reward model's ranks."""
        inputs = samples.select(
            batch_keys=["input_ids", "attention_mask", "position_ids", "responses", "response_mask"],
            non_tensor_batch_keys=["raw_prompt"] if "raw_prompt" in samples.non_tensor_batch else [],
        )
        padded, pad = pad_dataproto_to_divisor(inputs, self.rm_group.world_size)
        return unpad_dataproto(self.rm_group.compute_rm_score(padded), pad_size=pad)


def end_reasons(samples: DataProto, stop_ids: Collection[int]) -> np.ndarray:
    """The column end_reason [B]: what agent loops say, elsewhere "stop" after a last token of `stop_ids`, or "length".

    Engines end an answer at a stop token, or at whatever limit comes first. Nothing is known, None, of an empty answer,
    and of one whose last token was given by a tool or user.
    """
    responses, generated = samples.batch["responses"], samples.batch["response_mask"]
    lengths = samples.batch["attention_mask"][:, -responses.shape[1] :].sum(-1).tolist()
    reasons = list(samples.non_tensor_batch.get("end_reason", [None] * len(samples)))
    for i, length in enumerate(lengths):
        if reasons[i] is None and length and generated[i, length - 1]:
            reasons[i] = "stop" if int(responses[i, length - 1]) in stop_ids else "length"
    return object_array(reasons)


def without_lost(samples: DataProto) -> tuple[DataProto, int]:
    """The samples whose generation succeeded, and how many failed (column `__lost__`)."""
    if LOST not in samples.non_tensor_batch:
        return samples, 0
    lost = samples.non_tensor_batch.pop(LOST).astype(bool)
    return samples.select_idxs(np.flatnonzero(~lost)), int(lost.sum())


Scored = tuple[DataProto, DropCounts, dict[str, Any]]


class LateScores:
    """Runs `score(samples, counts)` while the ranks compute log-probs (reward_model.launch_reward_fn_async)."""

    def __init__(self, score: Callable[[DataProto, DropCounts], Scored]) -> None:
        self.score, self.thread = score, ThreadPoolExecutor(1)
        self.pending: Future[Scored] | None = None

    def begin(self, samples: DataProto, counts: DropCounts) -> None:
        """Begin to score the samples [B], which get the column ROW; they may be reordered meanwhile."""
        samples.batch[ROW] = torch.arange(len(samples))
        own = DataProto(samples.batch.clone(recurse=False), dict(samples.non_tensor_batch), {})
        self.pending = self.thread.submit(self.score, own, counts)

    def take(self, batch: DataProto) -> tuple[DataProto, dict[str, Any]]:
        """The rows of `batch` that got a score, in their order, and the metrics of scoring; ValueError without a row.

        The rows have token_level_scores [B', R] and the reward's extras.
        """
        scored, counts, metrics = self.pending.result()
        self.pending = None
        counts.check_any_scored()
        place_in_scored = {row: i for i, row in enumerate(scored.batch[ROW].tolist())}
        rows = batch.batch.pop(ROW).tolist()
        kept = batch.select_idxs([i for i, row in enumerate(rows) if row in place_in_scored])
        order = [place_in_scored[row] for row in rows if row in place_in_scored]
        kept.batch["token_level_scores"] = scored.batch["token_level_scores"][order]
        kept.non_tensor_batch[EXTRAS] = scored.non_tensor_batch[EXTRAS][order]
        return kept, metrics | counts.metrics()
