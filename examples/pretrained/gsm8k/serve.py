"""Greedy answers of a trained model in vLLM's server, over its chat endpoint: merged and, of LoRA, as an adapter.

    python -m examples.pretrained.gsm8k.serve --model DIR --merged DIR [--adapter DIR] --questions FILE --out FILE

OUT has, for each served model, the accuracies of examples.pretrained.gsm8k.reward and the share of answers that are the
merged model's.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import pandas as pd

from examples.pretrained.gsm8k.reward import compute_score
from examples.spd_arithmetic.serving import first_choice, server
from verl.utils.fs import output_file

CONCURRENT = 16  # requests at a time
ADAPTER = "adapter"  # its name in the server


def answer(url: str, model: str, messages: Sequence[dict[str, str]], limit: int) -> str:
    """The served model's greedy answer to a conversation, of at most `limit` tokens."""
    body = {"model": model, "messages": list(messages), "temperature": 0.0, "max_tokens": limit}
    return first_choice(f"{url}/v1/chat/completions", body, 1200)["message"]["content"]


def adapter_options(adapter: Path) -> list[str]:
    """What vLLM's command line needs for an adapter; vLLM knows some ranks only, and applies lower ones too."""
    from vllm.config.lora import MaxLoRARanks

    rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
    most = min(size for size in get_args(MaxLoRARanks) if size >= rank)
    return ["--enable-lora", "--max-lora-rank", str(most), "--lora-modules", f"{ADAPTER}={adapter}"]


def main(argv: list[str] | None = None) -> None:
    """Serve, ask, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "merged", "questions", "out"):
        parser.add_argument(f"--{name}", type=output_file if name == "out" else Path, required=True)
    parser.add_argument("--adapter", type=Path, help="folder of a LoRA adapter of the model, in peft's format")
    parser.add_argument("--limit", type=int, default=32, help="questions; the first ones")
    parser.add_argument("--length", type=int, default=712, help="tokens of prompt and answer")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    args = parser.parse_args(argv)
    rows = pd.read_parquet(args.questions)[: args.limit]
    ways: dict[str, tuple[Path, list[str], str]] = {"merged": (args.merged, [], str(args.merged))}
    if args.adapter:
        ways["adapter"] = (args.model, adapter_options(args.adapter), ADAPTER)
    texts: dict[str, list[str]] = {}
    models: dict[str, dict[str, Any]] = {}
    for name, (folder, options, served) in ways.items():
        sizes = {"length": args.length, "concurrent": CONCURRENT, "limit": args.max_new_tokens}
        with server(str(folder), args.out.with_suffix(f".{name}.log"), options, **sizes) as (client, _):
            with ThreadPoolExecutor(CONCURRENT) as pool:
                texts[name] = list(pool.map(
                    lambda messages, url=client.url, model=served: answer(url, model, messages, args.max_new_tokens),
                    rows["prompt"],
                ))  # fmt: skip
        scores = [compute_score("", text, truth["ground_truth"], info)
                  for text, truth, info in zip(texts[name], rows["reward_model"], rows["extra_info"], strict=True)]
        models[name] = {key: mean(score[key] for score in scores) for key in ("acc", "last_number", "answered")}
        models[name]["as_merged"] = mean(a == b for a, b in zip(texts[name], texts["merged"], strict=True))
        print(f"{name}: {models[name]}", flush=True)
    args.out.write_text(json.dumps({"questions": len(rows), "models": models}, indent=1) + "\n")


if __name__ == "__main__":
    main()
