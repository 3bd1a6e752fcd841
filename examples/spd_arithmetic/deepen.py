"""A copy of a small Llama that computes the same function at the cost of a large one.

    python -m examples.spd_arithmetic.deepen --model DIR --out DIR [--layers 40] [--ff 4096]

Layers are added whose output projections are zero, and MLPs are widened by units whose output weights are zero: logits
and hidden states stay the same (to rounding), a forward costs what its matrices cost. So a model that trains in minutes
gets the ratio of costs between target and drafter of real pairs. Figures from such a model must say so.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from verl.utils.fs import output_folder

LAYERS, FF = 40, 4096  # with hidden size 128: 66 million parameters


def deepen(model: LlamaForCausalLM, layers: int, ff: int, seed: int = 0) -> LlamaForCausalLM:
    """`model` with `layers` layers and MLPs of width `ff`; added weights are drawn from `seed`, or zero.

    Raises ValueError for sizes below the model's own.
    """
    config = model.config
    if layers < config.num_hidden_layers or ff < config.intermediate_size:
        raise ValueError(
            f"the model has {config.num_hidden_layers} layers of width {config.intermediate_size}, more than --layers "
            f"{layers} or --ff {ff}; give larger sizes."
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


def main(argv: list[str] | None = None) -> None:
    """Write the deepened model and its tokenizer to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder (Llama's architecture)")
    parser.add_argument("--out", type=output_folder, required=True)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--ff", type=int, default=FF, help="width of the MLPs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    deep = deepen(model, args.layers, args.ff, args.seed)
    deep.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)
    sizes = [f"{sum(p.numel() for p in m.parameters()) / 1e6:.1f}" for m in (model, deep)]
    print(f"{args.out}: {sizes[0]} -> {sizes[1]} million parameters, same function")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(str(error))
