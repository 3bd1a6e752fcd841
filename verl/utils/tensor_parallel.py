"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): transformers' plan of a model, carried out by torch's styles."""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from transformers import PretrainedConfig, PreTrainedModel

from verl.utils.peft_weights import adapted_layers

#: transformers' names of styles that torch has; a norm of heads [B, T, H, D] sees this rank's heads
STYLES = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": None,  # whole on every rank
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}


def refusal(config: PretrainedConfig, size: int) -> str | None:
    """Why `size` ranks cannot split the layers of a model with this config; None if they can."""
    text = config.get_text_config()
    plan, values = text.base_model_tp_plan or {}, text.to_dict()
    if unknown := set(plan.values()) - STYLES.keys():
        return f"{text.model_type} splits layers by {', '.join(sorted(unknown))}, which is not supported. Set it to 1."
    if not plan:
        return f"transformers has no tensor parallel plan for {text.model_type}. Set it to 1."
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := values.get(name)) and count % size:
            return f"the model has {name}={count}, which {size} ranks cannot split. Use a common divisor."
    return None


def styles_of(model: nn.Module, size: int) -> dict[nn.Module, ParallelStyle]:
    """The modules that `size` ranks split, with how they do it. Others are computed by every rank.

    An output matrix is split if the ranks can share the vocabulary and it is not the embedding's. An adapter of a split
    layer is split along with it. Raises ValueError as `refusal` says, and for what is no transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"fsdp_config.tensor_parallel_size={size} needs a transformers model, got "
                         f"{type(model).__name__}. Set it to 1.")  # fmt: skip
    if reason := refusal(model.config, size):
        raise ValueError(f"fsdp_config.tensor_parallel_size={size}: {reason}")
    adapted, head = set(adapted_layers(model).values()), model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    styles: dict[nn.Module, ParallelStyle] = {}
    for name, module in model.named_modules():
        kind = model.tp_plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if STYLES.get(kind) is None or (module is head and (tied or head.weight.shape[0] % size)):
            continue
        if module not in adapted:
            styles[module] = STYLES[kind]()
            continue
        styles[module.get_base_layer()] = STYLES[kind]()
        for part in (module.lora_A if kind == "rowwise" else module.lora_B).values():
            styles[part] = STYLES[kind]()
    return styles
