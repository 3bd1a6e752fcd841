"""Metrics of a step, under verl's names."""

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.trainer.run.validation_metrics import bootstrap_metric, calc_maj_val, process_validation_metrics  # noqa: F401
from verl.utils.metric import reduce_metrics  # noqa: F401


def _stats(name: str, values: torch.Tensor) -> dict[str, float]:
    """name/mean, name/max, name/min of a tensor of any shape; zeros when it is empty."""
    values = values.float() if values.numel() else torch.zeros(1)
    statistics = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{how}": value.item() for how, value in statistics.items()}


def _lengths(name: str, lengths: torch.Tensor, cut: torch.Tensor) -> dict[str, float]:
    """Statistics of lengths [B]; clip_ratio is the share that was cut, bool [B]."""
    clipped = cut.float().mean().item() if len(cut) else 0.0
    return {**_stats(name, lengths), f"{name}/clip_ratio": clipped}


def _compute_response_info(batch: DataProto) -> dict[str, torch.Tensor]:
    """response_mask [B, R] of the attention, response_length and prompt_length [B] float."""
    limit, mask = batch.batch["responses"].shape[-1], batch.batch["attention_mask"]
    prompt, response = mask[:, :-limit], mask[:, -limit:]
    lengths = {"prompt_length": prompt.sum(-1).float(), "response_length": response.sum(-1).float()}
    return {"response_mask": response, **lengths}


def cut_answers(batch: DataProto) -> torch.Tensor:
    """Which answers ended at a limit, bool [B]: by the column end_reason, else those that fill the R tokens."""
    if (reasons := batch.non_tensor_batch.get("end_reason")) is not None:
        return torch.tensor([reason == "length" for reason in reasons], dtype=torch.bool)
    return _compute_response_info(batch)["response_length"] == batch.batch["responses"].shape[-1]


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, Any]:
    """Scores, rewards, advantages, returns, values and lengths of a scored batch.

    Reads token_level_scores, token_level_rewards, advantages, returns, response_mask (and values) [B, R],
    responses [B, R], attention_mask [B, P+R], and the column end_reason [B], if it is there. Samples with an empty
    response (aborted) are left out of the score statistics, unless all are empty.
    """
    tensors, info = batch.batch, _compute_response_info(batch)
    limit = tensors["responses"].shape[-1]
    response_lengths, prompt_limit = info["response_length"], tensors["attention_mask"].shape[-1] - limit
    answered, cut = response_lengths > 0, cut_answers(batch)
    scored = answered if bool(answered.any()) else torch.ones_like(answered)
    counted = tensors["response_mask"].bool()
    returns = tensors["returns"][counted]

    metrics = {
        **_stats("critic/score", tensors["token_level_scores"].sum(-1)[scored]),
        **_stats("critic/rewards", tensors["token_level_rewards"].sum(-1)[scored]),
        **_stats("critic/advantages", tensors["advantages"][counted]),
        **_stats("critic/returns", returns),
        **_lengths("response_length", response_lengths, cut),
        **_lengths("response_length_non_aborted", response_lengths[answered], cut[answered]),
        "response/aborted_ratio": (~answered).float().mean().item(),
        **_lengths("prompt_length", info["prompt_length"], info["prompt_length"] == prompt_limit),
    }
    if use_critic:
        values = tensors["values"][counted]
        unexplained = _variance(returns - values) / (_variance(returns) + 1e-5)
        metrics |= {**_stats("critic/values", values), "critic/vf_explained_var": 1.0 - unexplained.item()}
    for column, name in (("__num_turns__", "num_turns"), ("tool_call_counts", "tool_call_counts")):
        if column in batch.non_tensor_batch:
            metrics |= _stats(name, torch.from_numpy(batch.non_tensor_batch[column].astype(float)))
    return metrics


def mean_extras(extras: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """reward/<name>/mean of the reward's extras over the rows that have a number; <name> itself where it has a slash.

    The score, and what is no number in any row (texts, lists), are no metrics, as in validation.
    """
    metrics = {}
    for name, values in extras.items():
        numbers = [float(value) for value in values if isinstance(value, Number | np.bool_)]
        if numbers and name != "score":
            metrics[name if "/" in name else f"reward/{name}/mean"] = float(np.mean(numbers))
    return metrics


def _variance(values: torch.Tensor) -> torch.Tensor:
    return values.float().var() if values.numel() > 1 else values.new_zeros((), dtype=torch.float32)


def compute_timing_metrics(batch: DataProto, timing_raw: dict[str, float]) -> dict[str, Any]:
    """timing_s/<phase> in seconds, timing_per_token_ms/<phase> in ms per token that the phase worked on.

    `gen` works on response tokens, ref, values, adv and the updates on prompt and response tokens.
    """
    response_tokens = int(_compute_response_info(batch)["response_mask"].sum())
    all_tokens = int(batch.batch["attention_mask"].sum())
    tokens = {"gen": response_tokens}
    tokens |= dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), all_tokens)
    metrics = {f"timing_s/{phase}": seconds for phase, seconds in timing_raw.items()}
    for phase, number in tokens.items():
        if phase in timing_raw and number > 0:
            metrics[f"timing_per_token_ms/{phase}"] = timing_raw[phase] * 1000 / number
    return metrics


def compute_throughout_metrics(batch: DataProto, timing_raw: dict[str, float], n_gpus: int) -> dict[str, Any]:
    """perf/total_num_tokens, perf/time_per_step (s), perf/throughput (tokens / s / rank).

    Reads `timing_raw["step"]` and `meta_info["global_token_num"]`, the tokens of each sample.
    """
    total = sum(batch.meta_info["global_token_num"])
    seconds = timing_raw["step"]
    throughput = total / (seconds * n_gpus)
    return {"perf/total_num_tokens": total, "perf/time_per_step": seconds, "perf/throughput": throughput}
