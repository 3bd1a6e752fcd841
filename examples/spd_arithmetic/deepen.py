"""A copy of a small Llama that computes the same function at the cost of a large one.

Layers are added whose output projections are zero, and MLPs are widened by units whose output weights are zero: logits
and hidden states stay the same (to rounding), a forward costs what its matrices cost. So a model that trains in minutes
gets the ratio of costs between target and drafter of real pairs. Figures from such a model must say so.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

LAYERS, FF = 40, 4096  # with hidden size 128: 66 million parameters


def deepen(model: LlamaForCausalLM, layers: int, ff: int, seed: int = 0) -> LlamaForCausalLM:
    """`model` with `layers` layers and MLPs of width `ff`; added weights are drawn from `seed`, or zero.

    Raises ValueError for sizes below the model's own.
    """
    config = model.config
    if layers < config.num_hidden_layers or ff < config.intermediate_size:
        raise ValueError(
            f"the model has {config.num_hidden_layers} layers of width {config.intermediate_size}, more than "
            f"{layers} and {ff}; give larger sizes."
        )
    torch.manual_seed(seed)
    changed = {**config.to_dict(), "num_hidden_layers": layers, "intermediate_size": ff}
    changed.pop("layer_types", None)
    deep = type(model)(type(config)(**changed))
    deep.generation_config = model.generation_config
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in deep.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            if name in own:
                weight[tuple(slice(size) for size in own[name].shape)] = own[name]
    return deep.eval()


def write_deepened(model: Path, out: Path, layers: int = LAYERS, ff: int = FF) -> None:
    """Write the deepened model of a folder, with its tokenizer, to `out`. Raises ValueError as `deepen` does."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    deepen(loaded, layers, ff).save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
