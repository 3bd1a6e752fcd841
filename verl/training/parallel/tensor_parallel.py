"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): transformers' plan of a model, carried out by torch's styles.

With sequence parallelism (arXiv 2205.05198) ranks keep parts of the tokens between the layers that they split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from transformers import PretrainedConfig, PreTrainedModel

from verl.training.peft_weights import adapted_layers

#: transformers' names of styles -> torch's; None: whole on every rank
STYLES = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": None,
    # A norm of heads [B, T, heads, D], of which it sees this rank's.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}


def refusal(config: PretrainedConfig, size: int) -> str | None:
    """Why `size` ranks cannot split a model's layers; None if they can. Its "it" is the key that callers put before."""
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


class GatherTokens(ParallelStyle):
    """A module that is given DTensors [B, T, H] split by tokens, and computes on whole tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(value: Any) -> Any:
            return value.full_tensor() if isinstance(value, DTensor) else value

        def gather_inputs(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}

        module.register_forward_pre_hook(gather_inputs, with_kwargs=True)
        return module


def styles_of(model: nn.Module, size: int, by_tokens: bool = False) -> dict[nn.Module, ParallelStyle]:
    """The modules that `size` ranks split, with how they do it. Others are computed by every rank.

    An output matrix is split if `size` divides the vocabulary and its weight is not the embedding's. An adapter of a
    split layer is split along with it. `by_tokens`: between the split layers of the decoder each rank keeps a part of
    the tokens, and computes the norms of that part. Raises ValueError for a model that is not transformers', or that
    `refusal` refuses.
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
        kind = model.tp_plan.get(_plan_name(name))  # None: not in the plan; a style of the head may be unknown
        if STYLES.get(kind) is None or (module is head and (tied or head.weight.shape[0] % size)):
            continue
        if module not in adapted:
            styles[module] = STYLES[kind]()
            continue
        # A rowwise layer splits its inputs, so does lora_A; a colwise layer its outputs, so does lora_B.
        styles[module.get_base_layer()] = STYLES[kind]()
        for part in (module.lora_A if kind == "rowwise" else module.lora_B).values():
            styles[part] = STYLES[kind]()
    return styles | (_token_styles(model, styles) if by_tokens else {})


def _plan_name(name: str) -> str:
    """A module's name as plans have it: `*` in place of a layer's number."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _token_styles(model: PreTrainedModel, styles: Mapping[nn.Module, Any]) -> dict[nn.Module, ParallelStyle]:
    """What else is needed for hidden states that are split by tokens from the first decoder layer to the last.

    They are DTensors, since ranks may hold different numbers of tokens. `styles`: the split layers.
    """
    whole, part, decoder = Replicate(), Shard(1), model.get_decoder()
    as_dtensors = {"use_local_output": False}
    plan = decoder.config.base_model_tp_plan or {}
    # Embeddings and final norm see all tokens. The first layer cuts them, and they stay cut between layers.
    added: dict[nn.Module, ParallelStyle] = {c: GatherTokens() for c in decoder.children() if c is not decoder.layers}
    added[decoder.layers[0]] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=part, **as_dtensors)
    for child in (child for layer in decoder.layers for child in layer.children()):
        holds_split = any(module in styles for module in child.modules())  # attention or MLP; others are norms
        added[child] = GatherTokens() if holds_split else SequenceParallel()
    for module in (m for name, m in decoder.named_modules() if plan.get(_plan_name(name)) == "rowwise"):
        if module in styles:  # replaces that style
            added[module] = RowwiseParallel(output_layouts=part, **as_dtensors)
        else:  # the sum of a split layer and its adapter, which is cut after it is whole
            added[module] = PrepareModuleOutput(output_layouts=whole, desired_output_layouts=part, **as_dtensors)
    return added
