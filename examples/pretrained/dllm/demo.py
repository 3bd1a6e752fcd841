"""Iterative refinement of a pretrained model, next to plain SFT of it on the same tokens, up to vLLM's server.

    python -m examples.pretrained.dllm.demo [--model DIR] [--gsm8k DIR] [--seeds 0 1 2] [--out DIR]
                                            [--until STAGE]

Fine-tunes SmolLM2-135M-Instruct (examples.pretrained.fetch) on answers that come with reasoning-gym's questions, then
trains on the resulting model's own answers: refinement, and a twin by plain SFT with as many steps of the same samples.
Ends with accuracy over tokens per forward for every mode of generation (three of the twin) and the area under it (AUP),
greedy decoding, n-gram drafts and the refined model in vLLM's server one request at a time, and OUT/result.json. Every
stage runs once for its settings and those of the stages before it, and resumes if it was stopped.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
from transformers import PreTrainedTokenizerBase

from dllm_reasoning.inference.commit_rules import MOST_BRANCHED
from examples.demo_runner import ROOT, begin, console, json_rows, python
from examples.dllm_arithmetic.acceptance import LOSSLESS
from examples.dllm_arithmetic.demo import command, result_table
from examples.dllm_arithmetic.demo import describe as describe_refinement
from examples.dllm_arithmetic.evaluate import MODES, accuracy_under_parallelism, paired
from examples.pretrained import fetch
from examples.pretrained.dllm import target as sft
from examples.pretrained.dllm import tasks
from examples.pretrained.stages import Stage, options, refuse_other_settings, run_and_report
from verl.utils.accelerator import default_dtype, get_device_name
from verl.utils.tokenizer import hf_tokenizer

# Few of the twin's guesses are right: in its other lossless modes it generates 0.95 to 1.05 tokens per forward.
TWIN_MODES = ("greedy", "branch 3", "refine 1")
TOKENS_PER_FORWARD, SERVED, GAP_POINTS, TRAINING_S = 2.2, 1.5, 2.0, 2700.0  # what the result is compared with


@dataclass(frozen=True)
class Sizes:
    """How much of everything; `steps` of refinement fit 45 minutes on two idle cores."""

    steps: int = 120
    batch: int = 16
    block: int = 8  # tokens of a window
    windows: int = 8  # of a sample
    single_round_steps: int = 90
    questions: int = 240  # test questions; vLLM answers the first `served` of them
    served: int = 60
    guesses: int = 3  # most guesses of a window in vLLM


def write_pairs(rows: Sequence[Mapping[str, Any]], model: Path, data: Path, held_out: int = 24) -> None:
    """DATA.{train,val}.jsonl with conversations for SFT, and DATA.{train,val}.parquet with the same tokens for
    refinement: `instruction` is the prompt as the chat template renders it."""
    sft.write_conversations(rows, data, held_out)
    tokenizer = hf_tokenizer(str(model))
    for split in ("train", "val"):
        conversations = [row["messages"] for row in json_rows(Path(f"{data}.{split}.jsonl"))]
        pairs = [{"instruction": rendered(tokenizer, turns[:-1]), "output": turns[-1]["content"]}
                 for turns in conversations]  # fmt: skip
        pd.DataFrame(pairs).to_parquet(f"{data}.{split}.parquet")


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """A conversation up to the answer, as the model reads it."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def write_test(
    model: Path, file: Path, counts: dict[str, int], further: int, seed: int, gsm8k: Path | None = None
) -> None:
    """`further` test questions after those of `counts`: `instruction` and `answer`."""
    drawn, tokenizer = tasks.draw(counts, seed, gsm8k, {"test": further}), hf_tokenizer(str(model))
    asked = drawn["test"][counts["test"] :]
    rows = [{"instruction": rendered(tokenizer, tasks.messages(a.question)), "answer": a.answer} for a in asked]
    pd.DataFrame(rows).to_parquet(file)


def refine_command(model: Path, data: Path, folder: Path, sizes: Sizes, seed: int) -> list[str]:
    """Refinement with packed windows; the twin's optimizer, batches and learning rate."""
    device = get_device_name()
    settings = {
        "data.train_files": f"{data}.train.parquet", "data.val_files": f"{data}.val.parquet", "data.max_length": 512,
        "data.train_batch_size": sizes.batch, "data.micro_batch_size_per_gpu": sizes.batch // 4,
        "data.dataloader_num_workers": 0, "model.partial_pretrain": model,
        "model.enable_gradient_checkpointing": "false", "model.fsdp_config.dtype": default_dtype(device),
        "optim.lr": sft.LR, "optim.weight_decay": 0.0, "trainer.device": device, "trainer.n_gpus_per_node": 1,
        "trainer.total_epochs": 1000, "trainer.total_training_steps": sizes.steps,
        "trainer.test_freq": max(1, sizes.steps // 4), "trainer.save_checkpoint_steps": max(1, sizes.steps // 6),
        "trainer.max_ckpt_to_keep": 1, "trainer.seed": seed + 1, "trainer.default_local_dir": folder,
        "trainer.logger": "[tensorboard]", "trainer.project_name": "pretrained", "trainer.experiment_name": folder.name,
        "trainer.checkpoint.save_contents": "[model,optimizer,extra,hf_model]", "iterative.noise_pattern": "packed",
        "iterative.block_length": sizes.block, "iterative.windows_per_sample": sizes.windows,
        "iterative.aligned_windows": 0.25, "iterative.num_iterations": 2,
        "iterative.single_round_steps": min(sizes.single_round_steps, 3 * sizes.steps // 4),
        "iterative.ar_loss_weight": 2.0, "iterative.noise_seed": seed,
    }  # fmt: skip
    return command("dllm_reasoning.train_iterative_refine", settings)


def trained_stages(
    answers: Stage, target: Path, out: Path, sizes: Sizes, seed: int, write: Any, limit: int = tasks.LIMIT
) -> list[Stage]:
    """Training, evaluation and server of one seed, in order; they write to OUT/seedN.

    `answers` is the stage that wrote the target's answers to the training questions, `write` writes the test file;
    `limit`: tokens of an answer.
    """
    folder, data = out / f"seed{seed}", out / "pairs"
    runs = {name: folder / name for name in ("refinement", "twin")}

    def prepare() -> None:
        ended = [row for row in json_rows(answers.result) if row["ended"]]
        write_pairs(ended, target, data)

    def prepare_test() -> None:
        write(out / "test.parquet")

    trained = [
        Stage(f"seed{seed}/{name}", made, runs[name], (answers,), prepare, training=(runs[name], sizes.steps))
        for name, made in (
            ("refinement", refine_command(target, data, runs["refinement"], sizes, seed)),
            ("twin", sft.sft_command(target, data, runs["twin"], sizes.steps, sizes.batch, sft.LR, seed)),
        )
    ]  # fmt: skip
    models = {name: runs[name] / f"global_step_{sizes.steps}" / "huggingface" for name in runs}
    evaluated = [
        Stage(f"seed{seed}/{name}_modes", python(
            "examples.dllm_arithmetic.evaluate", "--model", f"{name}={models[run]}", "--questions",
            out / "test.parquet", "--limit", sizes.questions, "--block", sizes.block, "--max-new-tokens", limit,
            "--text-answers", "--timed", 0, "--batch", 40, "--out", folder / f"{name}.json",
            "--modes", *(MODES if name == "refined" else TWIN_MODES),
        ), folder / f"{name}.json", (stage,), prepare_test)
        for name, run, stage in (("refined", "refinement", trained[0]), ("twin", "twin", trained[1]))
    ]  # fmt: skip
    served = Stage(f"seed{seed}/served", python(
        "examples.pretrained.dllm.serve", "--model", models["refinement"], "--twin", models["twin"], "--questions",
        out / "test.parquet", "--limit", sizes.served, "--max-new-tokens", limit, "--mode", "redraft",
        "--guesses", sizes.guesses, "--out", folder / "served.json",
    ), folder / "served.json", tuple(trained), prepare_test)  # fmt: skip
    return [*trained, *evaluated, served]


def figures(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of one seed, from the evaluations of `refined` and `twin`: the best lossless mode, whose answers are all greedy
    decoding's, the lossless modes with other answers (rounding decided a tie) and their shares of equal ones, greedy
    accuracy of refined less twin in points with its 95 % interval, and the AUP of both."""
    rows = {name: {row["mode"]: row for row in part["rows"]} for name, part in parts.items()}
    candidates = {mode: row for mode, row in rows["refined"].items() if mode in LOSSLESS}
    lossless = {mode: row for mode, row in candidates.items() if row["same_as_greedy"] == 1}
    mode = max(lossless, key=lambda name: lossless[name]["tokens_per_forward"])
    best = max(row["accuracy"] for of_model in rows.values() for row in of_model.values())
    return {
        "dllm_tokens_per_forward": lossless[mode]["tokens_per_forward"], "mode": mode,
        "differing": {mode: row["same_as_greedy"] for mode, row in candidates.items() if mode not in lossless},
        "gap": paired(parts["refined"]["correct"], parts["twin"]["correct"]),
        "aup": {name: accuracy_under_parallelism(list(of_model.values()), best) for name, of_model in rows.items()},
        "questions": parts["refined"]["questions"],
    }  # fmt: skip


def report(out: Path, seeds: Sequence[int]) -> None:
    """Print what exists of each seed and the means; write result.json."""
    results = {}
    for seed in seeds:
        folder = out / f"seed{seed}"
        parts = {name: folder / f"{name}.json" for name in ("refined", "twin")}
        if not all(file.exists() for file in parts.values()):
            continue
        read = {name: json.loads(file.read_text()) for name, file in parts.items()}
        results[seed] = figures(read)
        everything = {"questions": read["refined"]["questions"], "rows": [r for p in read.values() for r in p["rows"]]}
        console.print(result_table(everything))
        result = results[seed]
        gap, aup = result["gap"], result["aup"]
        console.print(
            f"seed {seed}: {result['dllm_tokens_per_forward']:.2f} tokens per forward by {result['mode']}, lossless; "
            f"greedy accuracy, refined less twin: {gap['difference']:+.1f} points (95 %: {gap['low']:+.1f} to "
            f"{gap['high']:+.1f}); AUP: refined {aup['refined']:.1f}, twin {aup['twin']:.1f}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
        if result["differing"]:
            named = ", ".join(f"{mode} ({100 * share:.1f} % equal)" for mode, share in result["differing"].items())
            console.print(f"not counted, since some answers differ from greedy decoding's: {named}", soft_wrap=True)
        if (file := folder / "served.json").exists():
            result["served"] = json.loads(file.read_text())
            result["dllm_served_over_greedy"] = result["served"]["refined_over_greedy"]
        record = json.loads((out / "stages" / f"seed{seed}" / "refinement.json").read_text())
        result["training_seconds"] = record["seconds"]
    if not results:
        return
    wanted = {"dllm_tokens_per_forward": TOKENS_PER_FORWARD, "dllm_served_over_greedy": SERVED}
    means = {name: mean(result[name] for result in results.values()) for name in wanted
             if all(name in result for result in results.values())}  # fmt: skip
    means["gap"] = mean(result["gap"]["difference"] for result in results.values())
    longest = max(result["training_seconds"] for result in results.values())
    (out / "result.json").write_text(json.dumps({"seeds": results, "means": means}, indent=1) + "\n")
    named = ", ".join(f"{name} {means[name]:.2f} (wanted: {value:g})" for name, value in wanted.items()
                      if name in means)  # fmt: skip
    console.print(f"means over {len(results)} seeds: {named}, greedy accuracy of refined less twin {means['gap']:+.1f} "
                  f"points (wanted: at least -{GAP_POINTS:g}); longest refinement {longest:.0f} s (wanted: at most "
                  f"{TRAINING_S:.0f})", soft_wrap=True, highlight=False)  # fmt: skip


def describe(data: Mapping[str, float]) -> str:
    """The part of a step's metrics that is shown next to the bar."""
    return describe_refinement({name: value for name, value in data.items() if name.startswith("train/")})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; returns the exit code."""
    parser = options(__doc__, Sizes(), ROOT / "outputs" / "pretrained_dllm", "trainings")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with a chat template")
    parser.add_argument("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl: a further task")
    args = parser.parse_args(argv)
    out = args.out
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    if not 2 <= sizes.block <= math.isqrt(MOST_BRANCHED):
        parser.error(f"--block {sizes.block}: give 2 to {math.isqrt(MOST_BRANCHED)} tokens; generation by branches "
                     "feeds the square of it")  # fmt: skip
    begin("Iterative refinement of a pretrained model")
    model, gsm8k = fetch.model_folder(args.model), args.gsm8k and args.gsm8k.resolve()
    stages = sft.target_stages(model, out, gsm8k)
    refuse_other_settings(stages[0], out)
    answers = stages[-1]

    def write(file: Path) -> None:
        write_test(sft.tuned(out), file, sft.COUNTS, sizes.questions, sft.SEED, gsm8k)

    for seed in args.seeds:
        stages += trained_stages(answers, sft.tuned(out), out, sizes, seed, write, sft.limit_of(gsm8k))
    show = partial(report, out, args.seeds)
    return run_and_report(stages, args.until, out, describe, show, fetched=not args.model)


if __name__ == "__main__":
    sys.exit(main())
