"""The columns of a batch: name, shape, dtype, meaning and writer of what travels in a DataProto between the stages.

Shapes: B rows, P prompt tokens, R response tokens, T = P + R. A row is a sample: `rollout.n` of them share a prompt.
docs/columns.md shows the tables.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column; `writer` has names of WRITERS, separated by commas."""

    shape: str
    dtype: str
    writer: str
    meaning: str


#: name: (method of RayPPOTrainer in which this writer adds columns to the batch, its files)
WRITERS = {
    "data file": ("_draw_prompts", "verl/data/rl_dataset.py"),  # columns that the data set copies from it
    "data set": ("_draw_prompts", "verl/data/rl_dataset.py"),
    "prompt stream": ("_draw_prompts", "verl/trainer/run/prompt_stream.py"),
    "rollout": ("_generate", "verl/rollout, verl/roles/actor_rollout_ref.py"),
    "agent loop": ("_generate", "verl/agents/agent_loop"),
    "rollout phase": ("_generate", "verl/trainer/ppo/rollout_phase.py"),
    "asynchronous rollout": ("_generate", "verl/trainer/fully_async/phase.py"),
    "reward stream": ("_generate", "verl/reward/stream.py"),
    "reward": ("_score", "verl/reward"),
    "reward model": ("_score", "verl/roles/reward_model.py"),
    "greedy baselines": ("_gather_batch", "verl/trainer/ppo/ray_trainer.py"),
    "late scores": ("_gather_batch", "verl/trainer/ppo/rollout_phase.py"),
    "balancing": ("_balance_batch", "verl/trainer/ppo/batching.py"),
    "actor": ("_compute_old_log_prob", "verl/roles/actor_rollout_ref.py"),
    "reference": ("_compute_ref_log_prob", "verl/roles/actor_rollout_ref.py"),
    "rank rows": ("_compute_old_log_prob", "verl/trainer/ppo/turn_rows.py"),  # also in later calls of the ranks
    "critic": ("_compute_values", "verl/roles/critic.py"),
    "KL penalty": ("_assign_token_rewards", "verl/trainer/ppo/batching.py"),
    "rollout correction": ("_correct_rollout", "verl/algos/rollout_correction.py"),
    "estimator": ("_assign_advantages", "verl/algos/advantage.py"),
    "update": ("_update_actor", "verl/training/actor/dp_actor.py"),
}

#: Columns of `DataProto.batch`.
TENSORS = {
    "input_ids": Column(
        "[B, T]", "int64", "data set, rollout, agent loop",
        "Prompt, padded on the left, and response, padded on the right. Before generation, the prompt alone: [B, P].",
    ),
    "attention_mask": Column("[B, T]", "int64", "data set, rollout, agent loop", "1 on tokens, 0 on padding."),
    "position_ids": Column(
        "[B, T]", "int64", "data set, rollout, agent loop", "Position of each token in its row, without padding."
    ),
    "prompts": Column("[B, P]", "int64", "rollout, agent loop", "The prompt part of `input_ids`."),
    "responses": Column("[B, R]", "int64", "rollout, agent loop", "The response part of `input_ids`."),
    "response_mask": Column(
        "[B, R]", "int64", "rollout, agent loop, rollout phase", "1 on tokens that the policy generated, 0 on others."
    ),
    "rollout_log_probs": Column(
        "[B, R]", "float32", "rollout, agent loop", "Log-probs that the rollout engine computed as it sampled."
    ),
    "rm_scores": Column(
        "[B, R]", "float32", "agent loop, reward model", "Score of a reward model or an agent loop, at the last token."
    ),
    "acc": Column("[B]", "float32", "reward", "Score of the row (manager `prime`); others return it in `__extras__`."),
    "token_level_scores": Column(
        "[B, R]", "float32", "reward",
        "The score, at the last generated token. A reward manager of your own may give rewards to other tokens, too.",
    ),
    "reward_baselines": Column(
        "[B]", "float32", "greedy baselines", "Reward of the greedy response to the same prompt (ReMax)."
    ),
    "sample_row": Column(
        "[B]", "int64", "late scores", "Number of the row while its score is computed in the background."
    ),
    "group_index": Column(
        "[B]", "int64", "balancing", "Number of the row's group, whose rows may share prefixes in a forward."
    ),
    "old_log_probs": Column("[B, R]", "float32", "actor", "Log-probs of the actor before the update."),
    "sum_pi_squared": Column(
        "[B, R]", "float32", "actor",
        "Sum of the squared probabilities of each token's distribution (`actor.calculate_sum_pi_squared`).",
    ),
    "entropys": Column(
        "[B, R]", "float32", "actor", "Entropy at each token. The trainer keeps its mean as a metric, not the column."
    ),
    "ref_log_prob": Column("[B, R]", "float32", "reference", "Log-probs of the reference policy."),
    "values": Column("[B, R]", "float32", "critic", "Values of the critic before the update."),
    "token_level_rewards": Column(
        "[B, R]", "float32", "KL penalty",
        "`token_level_scores`, minus the KL penalty if `algorithm.use_kl_in_reward=true`.",
    ),
    "rollout_is_weights": Column(
        "[B, R]", "float32", "rollout correction", "Importance weights of the rollout correction."
    ),
    "advantages": Column(
        "[B, R]", "float32", "estimator", "The estimator's advantages. They are 0 where `response_mask` is 0."
    ),
    "returns": Column("[B, R]", "float32", "estimator", "Targets of the critic."),
    "sampling_mask": Column(
        "[B, R + M]", "int32", "rank rows",
        "On the ranks, the array of this name as a tensor: R counts of kept tokens, then their ids.",
    ),
    "chosen": Column("[B, R]", "bool", "update", "On the ranks, the tokens that the loss clip_cov or kl_cov selects."),
}  # fmt: skip

#: Columns of `DataProto.non_tensor_batch`, numpy arrays. Numbers become objects where a row has none (None).
ARRAYS = {
    "uid": Column("[B]", "object", "prompt stream", "Identifies the prompt: rows with the same `uid` form a group."),
    "data_source": Column("[B]", "object", "data file", "Data set of the row, which selects its reward rule."),
    "reward_model": Column("[B]", "object", "data file", "Dict with `ground_truth`."),
    "extra_info": Column("[B]", "object", "data file", "Dict of further values, for rewards and tools."),
    "agent_name": Column("[B]", "object", "data file", "Agent loop of the row."),
    "raw_prompt": Column("[B]", "object", "data set", "The chat messages of the prompt."),
    "raw_prompt_ids": Column("[B]", "object", "data set", "Token ids of the prompt, a list without padding."),
    "full_prompts": Column(
        "[B]", "object", "data set", "Text of the prompt after the chat template (`data.return_full_prompt`)."
    ),
    "index": Column("[B]", "object", "data set", "`index` of `extra_info`, or the row's number in the data set."),
    "sample_index": Column("[B]", "int64", "data set", "The row's number in the data set."),
    "tools_kwargs": Column("[B]", "object", "data set", "Arguments of tools for the row, from `extra_info`."),
    "interaction_kwargs": Column(
        "[B]", "object", "data set", "Arguments of the interaction for the row, from `extra_info`."
    ),
    "weights_version": Column(
        "[B]", "int64", "rollout, agent loop, asynchronous rollout",
        "Number of the weights that generated the row; in asynchronous training, of its oldest token.",
    ),
    "end_reason": Column(
        "[B]", "object", "agent loop, rollout phase",
        "Why the answer ended: `stop`, `length` (cut), or a reason of docs/agents.md.",
    ),
    "sampling_mask": Column(
        "[B]", "object", "rollout, agent loop", "Tokens that top_k and top_p left at each position, packed in int32."
    ),
    "__lost__": Column(
        "[B]", "bool", "rollout, agent loop", "True if the generation of the row failed: it is dropped and counted."
    ),
    "__seed__": Column("[B]", "int64", "agent loop", "Seed of the conversation."),
    "__num_turns__": Column("[B]", "int32", "agent loop", "Turns of the conversation."),
    "turn_prompts": Column(
        "[B]", "object", "agent loop", "A list of (start, end, prompt ids) of turns that are rows of their own."
    ),
    "turn_scores": Column("[B]", "object", "agent loop", "Scores of an interaction, one for each turn."),
    "tool_rewards": Column("[B]", "object", "agent loop", "Rewards that tools returned for their calls."),
    "tool_call_counts": Column("[B]", "int64", "agent loop", "Number of tool calls of the conversation."),
    "failed_tool_calls": Column("[B]", "int64", "agent loop", "Number of those calls that failed."),
    "reward_scores": Column("[B]", "object", "agent loop", "Dict of what `calc_reward` of each tool returned."),
    "reward_score": Column(
        "[B]", "float64", "agent loop", "Score that an agent loop gave to its conversation; becomes `rm_scores`."
    ),
    "weights_versions": Column(
        "[B]", "object", "agent loop", "Numbers of the weights of each turn, until the rows are collected."
    ),
    "version_spans": Column(
        "[B]", "object", "asynchronous rollout", "Lists of (weights version, tokens) of the row."
    ),
    "sample_id": Column(
        "[B]", "object", "asynchronous rollout", "Name of the sample in async_journal.jsonl."
    ),
    "__graded__": Column(
        "[B]", "object", "reward stream, asynchronous rollout",
        "Results of rows that were graded before the batch was complete.",
    ),
    "__extras__": Column("[B]", "object", "reward", "Dict of what the reward function returned besides the score."),
}  # fmt: skip
