"""Answers prompts with a model trained by iterative refinement, and reports the speed.

    python -m dllm_reasoning.inference.demo --model_path DIR (--prompt TEXT | --prompts_file FILE) [options]
"""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from dllm_reasoning.inference.generator import iterative_generate
from dllm_reasoning.inference.settings import ADD_EOS_LENGTH, GenerationSettings
from verl.data.chat_template import render_chat
from verl.data.rl_dataset import DatasetError, read_rows
from verl.models.loading import create_huggingface_actor, torch_dtype_of
from verl.utils.accelerator import default_dtype
from verl.utils.fs import output_file
from verl.utils.tokenizer import hf_tokenizer, stop_ids
from verl.utils.visible_text import visible


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; those of GenerationSettings under their names there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default, add = GenerationSettings(), parser.add_argument
    add("--model_path", required=True, help="Hugging Face model directory")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", help="one prompt")
    prompts.add_argument("--prompts_file", type=Path, help="prompts: one per line (.txt), or the column --prompt_key "
                         "of a .jsonl, .json or .parquet file")  # fmt: skip
    add("--prompt_key", default="instruction", help="column of the prompts in a .jsonl, .json or .parquet file")
    add("--use_chat_template", action="store_true", help="make each prompt a user's turn of the chat template")
    add("--add_eos_length", type=int, help="noise tokens of a block (default: the trained window less one, else "
        f"{ADD_EOS_LENGTH})")  # fmt: skip
    add("--refine_iter", default=str(default.refine_iter), help="rounds after a block's first forward: a number, "
        "converge, slide, verify or branch; the last four give the tokens of greedy decoding")  # fmt: skip
    add("--max_new_tokens", type=int, default=default.max_new_tokens)
    add("--max_length", type=int, default=default.max_length, help="most tokens of prompt and answer")
    add("--batch_size", type=int, default=1, help="prompts answered at once")
    add("--confidence_threshold", type=float, help="with --refine_iter slide: commit tokens predicted with at least "
        "this probability, unverified")  # fmt: skip
    add("--temperature", type=float, default=default.temperature, help="0 takes the likeliest token")
    add("--top_k", type=int, default=default.top_k, help="draw among this many likeliest tokens; -1 among all")
    add("--top_p", type=float, default=default.top_p, help="draw among the likeliest tokens of this probability mass")
    add("--seed", type=int, default=default.seed)
    add("--noise_token_id", type=int, help="token of the noise (default: the trained one, else EOS)")
    add("--no_cache", dest="use_cache", action="store_false", help="read the full text in each forward")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", help="type of the weights: float32, bfloat16, ... (default: bfloat16 on cuda and on CPUs with "
        "instructions for it, else float32)")  # fmt: skip
    add("--output_file", type=output_file, default="inference_results.jsonl")
    add("--max_display", type=int, default=5, help="answers to print")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or default_dtype(torch.device(args.device).type)
    if args.batch_size < 1:
        parser.error(f"--batch_size {args.batch_size} is below 1")
    return args


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Texts of --prompt or --prompts_file. Raises ValueError that names the file, and the row."""
    if args.prompt is not None:
        return [args.prompt]
    file = args.prompts_file
    if file.suffix in (".parquet", ".json", ".jsonl"):
        rows = read_rows(file)
        for number, row in enumerate(rows):
            if not isinstance(row.get(args.prompt_key), str):
                raise ValueError(f"{file}, row {number}: no text in column '{args.prompt_key}' (columns: "
                                 f"{', '.join(row)}). Set --prompt_key.")  # fmt: skip
        return [row[args.prompt_key] for row in rows]
    if not file.is_file():
        raise ValueError(f"--prompts_file {file} does not exist.")
    prompts = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts_file {file} holds no prompt.")
    return prompts


def answer(args: argparse.Namespace, prompts: list[str]) -> list[dict[str, Any]]:
    """One row per prompt: prompt, response, tokens, forwards, tokens_per_forward, seconds of its batch."""
    settings = GenerationSettings(**{field.name: getattr(args, field.name) for field in fields(GenerationSettings)})
    folder = Path(args.model_path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        export = f"python -m verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir DIR"
        raise ValueError(f"{folder} holds no config.json: it is no Hugging Face model. Export a checkpoint: {export}")
    tokenizer = hf_tokenizer(args.model_path)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{args.model_path} has no eos token to end answers with. Add one to tokenizer_config.json.")
    texts = prompts
    if args.use_chat_template:
        turns = ([{"role": "user", "content": prompt}] for prompt in prompts)
        texts = [render_chat(tokenizer, turn, add_generation_prompt=True) for turn in turns]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]  # as in training
    settings.check_prompts(ids)  # before the first batch: an error in a later one would lose its answers
    dtype = torch_dtype_of(args.dtype, "--dtype")
    model = create_huggingface_actor(args.model_path, automodel_kwargs={"dtype": dtype}).to(args.device)
    rows, ends = [], stop_ids(tokenizer)
    for start in range(0, len(prompts), args.batch_size):
        part = slice(start, start + args.batch_size)
        result = iterative_generate(
            model, ids[part], ends, tokenizer.pad_token_id, first_row=start, return_details=True, **vars(settings)
        )
        for prompt, tokens, forwards in zip(prompts[part], result.tokens, result.stats.forwards, strict=True):
            rows.append({
                "prompt": prompt, "response": tokenizer.decode(tokens, skip_special_tokens=True),
                "tokens": len(tokens), "forwards": forwards, "tokens_per_forward": len(tokens) / forwards,
                "batch_seconds": result.stats.seconds,
            })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    """Answer, write --output_file, print the first answers and the speed; returns the exit code."""
    args = parse(argv)
    try:
        rows = answer(args, read_prompts(args))
    except (ValueError, OSError, DatasetError) as error:
        sys.stderr.write(f"{visible(str(error))}\n")
        return 1
    args.output_file.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    args.output_file.write_text("".join(lines), encoding="utf-8")
    console = Console()
    for row in rows[: args.max_display]:
        prompt, response = (escape(visible(row[key])) for key in ("prompt", "response"))
        console.print(f"[bold]{prompt}[/bold]\n{response}\n", highlight=False)
    tokens, forwards = (sum(row[key] for row in rows) for key in ("tokens", "forwards"))
    seconds = sum(row["batch_seconds"] for row in rows[:: args.batch_size])
    console.print(f"{len(rows)} answers, {tokens} tokens in {forwards} forwards: {tokens / forwards:.2f} tokens per "
                  f"forward, {tokens / seconds:.0f} tokens/s; written to {args.output_file}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
