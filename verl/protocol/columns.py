"""The columns of a batch: name, shape and meaning of what travels in a DataProto between the stages of a step.

Shapes: B rows, P prompt tokens, R response tokens, T = P + R. A row is a sample: `rollout.n` of them share a prompt.
docs/concepts.md shows this table with the modules that write and read each column.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column of `DataProto.batch` (a tensor dtype), or of `DataProto.non_tensor_batch` (dtype `object`)."""

    shape: str
    dtype: str
    meaning: str


COLUMNS = {
    "input_ids": Column("[B, T]", "int64", "Prompt, padded on the left, and response, padded on the right."),
    "attention_mask": Column("[B, T]", "int64", "1 on tokens, 0 on padding."),
    "position_ids": Column("[B, T]", "int64", "Position of each token in its row, counted without padding."),
    "prompts": Column("[B, P]", "int64", "The prompt part of `input_ids`."),
    "responses": Column("[B, R]", "int64", "The response part of `input_ids`."),
    "response_mask": Column("[B, R]", "int64", "1 on tokens that the policy generated, 0 on others."),
    "rollout_log_probs": Column("[B, R]", "float32", "Log-probs that the rollout engine computed as it sampled."),
    "sampling_mask": Column("[B]", "object", "Tokens that top_k and top_p left at each position; on ranks a tensor."),
    "group_index": Column("[B]", "int64", "Number of the row's group, whose rows may share prefixes in a forward."),
    "old_log_probs": Column("[B, R]", "float32", "Log-probs of the actor before the update."),
    "sum_pi_squared": Column("[B, R]", "float32", "Sum of the squared probabilities of each token's distribution."),
    "ref_log_prob": Column("[B, R]", "float32", "Log-probs of the reference policy."),
    "values": Column("[B, R]", "float32", "Values of the critic before the update."),
    "rm_scores": Column("[B, R]", "float32", "Score of a reward model or an agent loop, at the last token."),
    "token_level_scores": Column("[B, R]", "float32", "The reward, at the last token unless a function returns more."),
    "reward_baselines": Column("[B]", "float32", "Reward of the greedy response to the same prompt (ReMax)."),
    "token_level_rewards": Column("[B, R]", "float32", "The scores, minus the KL penalty with `use_kl_in_reward`."),
    "advantages": Column("[B, R]", "float32", "What the estimator returns; 0 where `response_mask` is 0."),
    "returns": Column("[B, R]", "float32", "Targets of the critic."),
    "rollout_is_weights": Column("[B, R]", "float32", "Importance weights of the rollout correction."),
    "chosen": Column("[B, R]", "bool", "Tokens that a loss of arXiv 2505.22617 selects (during an update)."),
    "acc": Column("[B]", "float32", "Score of the row (manager `prime`); other managers return it in `__extras__`."),
    "sample_row": Column("[B]", "int64", "Number of the row while its score is computed in the background."),
    "uid": Column("[B]", "object", "Name of the row's prompt: rows with the same one form a group."),
    "data_source": Column("[B]", "object", "Data set of the row, which selects its reward rule."),
    "reward_model": Column("[B]", "object", "Dict with `ground_truth`, from the data file."),
    "extra_info": Column("[B]", "object", "Dict of further values of the data file, for rewards and tools."),
    "raw_prompt": Column("[B]", "object", "The chat messages of the prompt."),
    "raw_prompt_ids": Column("[B]", "object", "Token ids of the prompt, a list without padding."),
    "full_prompts": Column("[B]", "object", "Text of the prompt after the chat template (`data.return_full_prompt`)."),
    "index": Column("[B]", "object", "`index` of `extra_info`, or the row's number; estimators get `uid` as `index`."),
    "sample_index": Column("[B]", "object", "The row's number in the data set."),
    "agent_name": Column("[B]", "object", "Agent loop of the row, from the data file."),
    "tools_kwargs": Column("[B]", "object", "Arguments of tools for the row, from `extra_info`."),
    "interaction_kwargs": Column("[B]", "object", "Arguments of the interaction for the row, from `extra_info`."),
    "weights_version": Column("[B]", "object", "Number of the weights that generated the row."),
    "weights_versions": Column("[B]", "object", "Numbers of the weights of each turn, until the rows are collected."),
    "version_spans": Column("[B]", "object", "Asynchronous training: lists of (weights version, tokens) of the row."),
    "sample_id": Column("[B]", "object", "Asynchronous training: name of the sample in async_journal.jsonl."),
    "__num_turns__": Column("[B]", "object", "Turns of the conversation (agent loops)."),
    "__seed__": Column("[B]", "object", "Seed of the conversation (agent loops)."),
    "end_reason": Column("[B]", "object", "Why the answer ended: stop, length (cut), or a reason of docs/agents.md."),
    "turn_prompts": Column("[B]", "object", "A list of (start, end, prompt ids) of turns that are rows of their own."),
    "turn_scores": Column("[B]", "object", "Scores of an interaction, one for each turn."),
    "tool_rewards": Column("[B]", "object", "Rewards that tools returned for their calls."),
    "reward_scores": Column("[B]", "object", "Dict of what `calc_reward` of each tool returned."),
    "tool_call_counts": Column("[B]", "object", "Number of tool calls of the conversation."),
    "reward_score": Column("[B]", "object", "Score that an agent loop gave to its conversation, before `rm_scores`."),
    "__graded__": Column("[B]", "object", "Results of rows that were graded before the batch was complete."),
    "__extras__": Column("[B]", "object", "Dict of what the reward function returned besides the score."),
    "__lost__": Column("[B]", "object", "True if the generation of the row failed: it is dropped and counted."),
}
