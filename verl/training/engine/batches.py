"""Forward and backward passes of a batch through an engine's model, by a caller's loss, as verl's callers ask for them.

Columns of a batch: `input_ids`, jagged [B, j] or padded [B, T] next to `attention_mask`, and `loss_mask` or
`response_mask`, 1 = counted. With padded input_ids and a column `responses` [B, R] outputs are those of the responses,
else those of all tokens. Values of the full batch: use_dynamic_bsz with max_token_len_per_gpu, or
micro_batch_size_per_gpu (by default the engine's own), temperature (1), calculate_entropy (false).
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.models.loading import compute_position_id_with_mask
from verl.protocol.merge import assign_non_tensor_data, cat_rows, get_non_tensor_data, index_select_tensor_dict
from verl.protocol.seqlen_balancing import rearrange_micro_batches
from verl.training.policy.base import Policy

#: (model_output=, data=, dp_group=) -> (loss, metrics)
LossFunction = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


def forward_backward_batch(
    engine: Any, policy: Policy, data: TensorDict, loss_function: LossFunction | None, forward_only: bool
) -> dict[str, Any]:
    """`model_output` by name, in the order of the rows and on the CPU, and loss and metrics of each micro-batch.

    The loss function gets each micro-batch with values over all ranks, which are also set in `data`: batch_num_tokens
    (counted tokens), global_batch_size (rows) and dp_size (ranks). Gradients of micro-batches are added, those of ranks
    averaged: a mean over tokens is sum / batch_num_tokens * dp_size, one over rows sum / global_batch_size * dp_size.
    Raises ValueError without a size of micro-batches, NotImplementedError where ranks share rows.
    """
    if engine.joint_size > 1:
        raise NotImplementedError(
            "train_batch and infer_batch: ranks that share rows (ulysses_sequence_parallel_size, tensor_parallel_size) "
            "are supported in the trainers only; set both sizes to 1."
        )
    ids, attention = _padded(data)
    counted = next((data[name] for name in ("loss_mask", "response_mask") if name in data.keys()), attention)
    tokens = int((counted.values() if counted.is_nested else counted).sum())
    sums = torch.tensor([tokens, len(data)], device=engine.device)
    dist.all_reduce(sums, group=engine.get_data_parallel_group())
    totals = {"batch_num_tokens": int(sums[0]), "global_batch_size": int(sums[1])}
    for name, value in {**totals, "dp_size": engine.get_data_parallel_size()}.items():
        assign_non_tensor_data(data, name, value)
    outputs: dict[str, list[torch.Tensor]] = defaultdict(list)
    losses: list[float] = []
    metrics: dict[str, list] = defaultdict(list)
    parts = _parts(engine, data, attention)
    for i, rows in enumerate(parts):
        micro = index_select_tensor_dict(data, rows).to(engine.device)
        with torch.set_grad_enabled(not forward_only), engine.autocast():
            output = _outputs(engine, policy, micro, ids[rows], attention[rows])
        if loss_function is not None:
            loss, values = loss_function(model_output=output, data=micro, dp_group=engine.get_data_parallel_group())
            if not forward_only:
                engine.backward(loss, is_last_micro_batch=i == len(parts) - 1)
            losses.append(loss.item())
            for name, value in values.items():
                metrics[name].append(value.item() if isinstance(value, torch.Tensor) else value)
        for name, value in output.items():
            outputs[name].append(value.detach().cpu())
        output = loss = None  # its graph's nodes would keep a CPU's allocator from joining freed activations
    order = torch.tensor([row for rows in parts for row in rows]).argsort()  # the outputs are in the order of parts
    joined = TensorDict({name: cat_rows(pieces) for name, pieces in outputs.items()}, batch_size=[len(data)])
    ordered = index_select_tensor_dict(joined, order)
    return {"model_output": dict(ordered.items()), "loss": losses, "metrics": dict(metrics)}


def _padded(data: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask [B, T]; jagged ones are padded on the right by 0."""
    ids = data["input_ids"]
    if not ids.is_nested:
        return ids, data["attention_mask"]
    lengths = ids.offsets().diff()
    mask = torch.arange(int(lengths.max()), device=ids.device) < lengths.unsqueeze(-1)
    return torch.nested.to_padded_tensor(ids, 0), mask.long()


def _parts(engine: Any, data: TensorDict, mask: torch.Tensor) -> list[list[int]]:
    """The rows of each micro-batch. Ranks get equally many; of a fixed size only if they have equally many rows."""
    config = engine.engine_config
    if get_non_tensor_data(data, "use_dynamic_bsz", config.use_dynamic_bsz):
        tokens = get_non_tensor_data(data, "max_token_len_per_gpu", config.max_token_len_per_gpu)
        if tokens is None:
            rule = "use_dynamic_bsz is true, but max_token_len_per_gpu is not set"
            raise ValueError(f"{rule}; set it, or use_dynamic_bsz=false.")
        group = engine.get_data_parallel_group()
        return rearrange_micro_batches(TensorDict({"attention_mask": mask}, [len(data)]), tokens, group)[1]
    size = get_non_tensor_data(data, "micro_batch_size_per_gpu", config.micro_batch_size_per_gpu)
    if size is None:
        raise ValueError("use_dynamic_bsz is false, but micro_batch_size_per_gpu is not set; set it.")
    rows = list(range(len(data)))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _outputs(
    engine: Any, policy: Policy, micro: TensorDict, ids: torch.Tensor, attention: torch.Tensor
) -> dict[str, torch.Tensor]:
    """log_probs, and entropy if calculate_entropy: with padded `responses` [b, R] theirs.

    Else at each position those of the next token, jagged [b, j] or padded [b, T] as input_ids are: 0 in the last
    column, and at the last token of a shorter row what the policy gives at padding.
    """
    ids, attention, jagged = ids.to(engine.device), attention.to(engine.device), micro["input_ids"].is_nested
    responses = None if jagged else micro.get("responses", None)
    columns = {"input_ids": ids, "attention_mask": attention, "position_ids": compute_position_id_with_mask(attention)}
    columns["responses"] = ids[:, 1:] if responses is None else responses
    temperature = get_non_tensor_data(micro, "temperature", 1.0)
    with_entropy = get_non_tensor_data(micro, "calculate_entropy", False)
    log_probs, entropy = policy.log_probs(
        engine.module, TensorDict(columns, batch_size=[len(ids)]), temperature=temperature, with_entropy=with_entropy
    )
    outputs = {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}
    if responses is not None:
        return outputs
    outputs = {name: torch.nn.functional.pad(value, (0, 1)) for name, value in outputs.items()}
    if not jagged:
        return outputs
    real, offsets = attention.bool(), micro["input_ids"].offsets()
    return {name: torch.nested.nested_tensor_from_jagged(value[real], offsets) for name, value in outputs.items()}
