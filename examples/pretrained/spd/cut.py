"""A draft model from some layers of the target, which still has to be trained.

    python -m examples.pretrained.spd.cut --model DIR --out DIR --layers 6

Keeps the first layers and the last one, with the embeddings and the final norm.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def check(model: Path, layers: int) -> None:
    """Raise SystemExit if `cut` cannot make a draft of so many layers from the model; reads its configuration only."""
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        stack = getattr(AutoModelForCausalLM.from_config(config).base_model, "layers", None)
    if stack is None or any(not hasattr(getattr(layer, "self_attn", None), "layer_idx") for layer in stack):
        raise SystemExit(f"{model}: a draft cannot be cut from {config.model_type} models, whose layers are not "
                         "model.layers[i] with self_attn, as in Llama or Qwen; give another --model")  # fmt: skip
    if not 2 <= layers <= len(stack):
        raise SystemExit(f"--draft-layers {layers}: the model has {len(stack)} layers; give 2 to {len(stack)}")


def cut(model: Path, out: Path, layers: int) -> list[int]:
    """Write the smaller model; returns the numbers of its layers."""
    check(model, layers)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    kept = [*range(layers - 1), target.config.num_hidden_layers - 1]
    target.model.layers = torch.nn.ModuleList(target.model.layers[i] for i in kept)
    for place, layer in enumerate(target.model.layers):
        layer.self_attn.layer_idx = place
    target.config.num_hidden_layers = layers
    if getattr(target.config, "layer_types", None):
        target.config.layer_types = [target.config.layer_types[i] for i in kept]
    target.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return kept


def main(argv: list[str] | None = None) -> None:
    """Cut as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True)
    args = parser.parse_args(argv)
    print(f"layers {cut(args.model, args.out, args.layers)} of {args.model} written to {args.out}")


if __name__ == "__main__":
    main()
