"""A scorer for speculative decoding of a pretrained model, from the fetched weights to a server.

    python -m examples.pretrained.spd.demo [--model DIR] [--gsm8k DIR] [--seeds 0 1 2] [--out DIR]
                                           [--until STAGE]

The target is SmolLM2-135M-Instruct (examples.pretrained.fetch), or any Hugging Face folder with a chat template, after
supervised fine-tuning on answers that come with the questions, and GRPO if there are --rl-steps. The draft has fewer of
the target's layers and is trained on the target's own answers. Then the steps of docs/spd.md: blocks, three scorers,
evaluation, vLLM's server.

Every stage runs once for its settings and for those of the stages before it, and resumes if it was stopped; OUT/stages
has their commands, logs and times. Each of --seeds is a seed of the scorers, all on one pair. Ends with the accuracies
of the pair, the gains of the scorers and, for each seed, the evaluation's picture and served.json.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
from transformers import AutoConfig

from examples.demo_runner import ROOT, PhaseFailed, console
from examples.pretrained import fetch
from examples.pretrained.demo import from_files, training_command
from examples.pretrained.spd import cut, tasks
from examples.pretrained.spd.gains import DROP, gains
from examples.pretrained.stages import Stage, refuse_other_settings, run_stages
from examples.spd_arithmetic.demo import saved_scorer
from examples.spd_arithmetic.questions import PromptStyle, Question, write_questions
from recipe.spd.scorer.auto import SCORERS
from recipe.spd.scorer.config import ScoringModelConfig
from verl.utils.accelerator import default_dtype, get_device_name
from verl.utils.tokenizer import hf_tokenizer

SEED = 0  # of questions, target and draft
GAINS = ("spd_gain_over_best_rule", "spd_gain_over_exact")
BATCH = 50  # questions that a process decodes together
ROLES = ("supervised", "grpo", "refined")  # the scorers; refined: GRPO from the supervised one
TARGET_ACCURACY, DRAFT_ACCEPTED = 0.85, 3.0  # what a pair should reach; printed next to its figures


@dataclass(frozen=True)
class Sizes:
    """How much of everything; with the defaults, one seed takes about an hour on two cores."""

    train: int = 1600  # questions
    val: int = 150
    test: int = 240
    further_val: int = 0  # questions that only the evaluation asks, after those of `val`
    further_test: int = 760
    target_steps: int = 147
    rl_questions: int = 1600  # of GRPO, those of `train` among them
    rl_steps: int = 0  # of GRPO after the fine-tuning
    draft_questions: int = 800  # of train: those whose answers the draft learns
    draft_layers: int = 6
    draft_steps: int = 120
    block_questions: int = 800  # of train: those whose answers are drafted
    blocks: int = 1600
    harm_blocks: int = 240
    scorer_steps: int = 60
    scorer_batch: int = 192  # blocks
    gamma: int = 8
    batch: int = 16

    @property
    def counts(self) -> dict[str, int]:
        """Questions of each split."""
        return {"train": self.train, "val": self.val, "test": self.test}


def python(module: str, *arguments: Any) -> list[str]:
    """A command of a module or of a script with its arguments."""
    name = [module] if module.endswith(".py") else ["-m", module]
    return [sys.executable, *name, *map(str, arguments)]


def sft_command(model: Path, data: Path, folder: Path, steps: int, batch: int, lr: float, seed: int) -> list[str]:
    """Supervised fine-tuning of all weights on DATA.train.jsonl, validated on DATA.val.jsonl."""
    device = get_device_name()
    settings = {
        "data.train_files": f"{data}.train.jsonl", "data.val_files": f"{data}.val.jsonl", "data.max_length": 512,
        "data.multiturn.enable": "true", "data.train_batch_size": batch, "data.micro_batch_size_per_gpu": batch // 2,
        "data.packing": "true", "data.dataloader_num_workers": 0, "model.partial_pretrain": model,
        "model.enable_gradient_checkpointing": "false", "model.fsdp_config.dtype": default_dtype(device),
        "optim.lr": lr, "optim.weight_decay": 0.0, "trainer.device": device, "trainer.n_gpus_per_node": 1,
        "trainer.total_epochs": 1000, "trainer.total_training_steps": steps, "trainer.test_freq": max(1, steps // 4),
        "trainer.save_freq": max(1, steps // 6), "trainer.max_ckpt_to_keep": 1, "trainer.seed": seed + 1,
        "trainer.default_local_dir": folder, "trainer.logger": "[tensorboard]", "trainer.project_name": "pretrained",
        "trainer.experiment_name": folder.name, "trainer.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
    }  # fmt: skip
    return python("verl.trainer.fsdp_sft_trainer", *(f"{key}={value}" for key, value in settings.items()))


def rl_command(model: Path, data: Path, folder: Path, steps: int, seed: int, limit: int) -> list[str]:
    """GRPO of the fine-tuned target, with the settings of examples.pretrained.demo; `limit`: tokens of an answer."""
    more = {"data.max_response_length": limit, "data.max_prompt_length": 256,
            "custom_reward_function.path": "examples/pretrained/spd/reward.py",
            "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]"}  # fmt: skip
    settings = [f"{key}={value}" for key, value in more.items()]
    return training_command(model, from_files(data), folder, steps, seed, *settings)


def write_rl_data(folder: Path, sizes: Sizes, seed: int, gsm8k: Path | None = None) -> None:
    """Write GRPO's train.parquet and val.parquet; the validation questions are never trained on."""
    folder.mkdir(exist_ok=True)
    counts = {**sizes.counts, "train": max(sizes.train, sizes.rl_questions)}
    drawn = tasks.draw(counts, seed=seed, gsm8k=gsm8k)
    for split in ("train", "val"):
        rows = [{"data_source": a.task, "prompt": tasks.messages(a.question),
                 "reward_model": {"style": "rule", "ground_truth": a.answer},
                 "extra_info": {"index": i, "entry": json.dumps(a.entry, default=str)}}
                for i, a in enumerate(drawn[split])]  # fmt: skip
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


def write_conversations(rows: Sequence[Mapping[str, Any]], data: Path, held_out: int = 24) -> None:
    """DATA.train.jsonl and DATA.val.jsonl from rows with question and answer; the last ones validate."""
    for split, kept in (("train", rows[:-held_out]), ("val", rows[-held_out:])):
        lines = ({"messages": [*tasks.messages(row["question"]), {"role": "assistant", "content": row["answer"]}]}
                 for row in kept)  # fmt: skip
        Path(f"{data}.{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_question_files(out: Path, counts: dict[str, int], seed: int, gsm8k: Path | None = None) -> None:
    """questions_SPLIT.jsonl in GSM8K's format, for prepare_blocks."""
    for split, asked in tasks.draw(counts, seed=seed, gsm8k=gsm8k).items():
        lines = ({"question": a.question, "answer": f"#### {a.answer}"} for a in asked)
        (out / f"questions_{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_evaluation_questions(out: Path, target: Path, sizes: Sizes, seed: int, gsm8k: Path | None = None) -> None:
    """OUT/evaluation_SPLIT.jsonl: the questions of the pair's blocks, and further ones that no other stage has seen."""
    further = {"val": sizes.further_val, "test": sizes.further_test}
    drawn = tasks.draw(sizes.counts, seed, gsm8k, further)
    style, tokenizer = PromptStyle(tasks.INSTRUCTION, tasks.SYSTEM), hf_tokenizer(str(target))
    for split in further:
        more = drawn[split][sizes.counts[split] :]
        prompts = style.prompts([asked.question for asked in more], tokenizer)
        questions = [Question(f"{split}-further-{i}", asked.question, prompt, asked.answer)
                     for i, (asked, prompt) in enumerate(zip(more, prompts, strict=True))]  # fmt: skip
        file = out / f"evaluation_{split}.jsonl"
        write_questions(file, questions)
        file.write_text((out / "pair" / f"questions_{split}.jsonl").read_text() + file.read_text())


def accuracy(file: Path) -> dict[str, float]:
    """Share of right answers of each task, and of all."""
    rows = read_rows(file)
    named = {name: [row["right"] for row in rows if row["task"] == name] for name in (*tasks.TASKS, tasks.GSM8K)}
    named["all"] = [row["right"] for row in rows]
    return {name: sum(right) / len(right) for name, right in named.items() if right}


def limit_of(gsm8k: Path | None) -> int:
    """Tokens of an answer."""
    return tasks.LIMIT if gsm8k is None else tasks.LIMIT_GSM8K


def write_target_data(out: Path, counts: dict[str, int], seed: int, gsm8k: Path | None = None) -> None:
    """OUT/target.SPLIT.jsonl: the answers that come with the training questions."""
    asked = tasks.draw(counts, seed=seed, gsm8k=gsm8k)["train"]
    write_conversations([{"question": a.question, "answer": a.worked} for a in asked], out / "target")


def write_draft_data(answers: Path, out: Path) -> None:
    """OUT/draft.SPLIT.jsonl: the target's own answers, right or wrong, that ended within the limit."""
    write_conversations([row for row in read_rows(answers) if row["ended"]], out / "draft")


def pair_stages(model: Path, out: Path, sizes: Sizes, seed: int, gsm8k: Path | None = None) -> list[Stage]:
    """The stages from the model to the blocks of a trained pair, in order."""
    counts = json.dumps(sizes.counts)
    ask = python("examples.pretrained.spd.answers", "--counts", counts, "--seed", seed, "--split")
    if gsm8k is not None:
        ask[-1:] = ["--gsm8k", str(gsm8k), "--max-new-tokens", str(limit_of(gsm8k)), "--split"]
    tuned, (target, draft) = tuned_target(out, sizes), models_of(out, sizes)
    last = Stage(
        "target", sft_command(model, out / "target", out / "target_run", sizes.target_steps, sizes.batch, 2e-4, seed),
        out / "target_run", (), lambda: write_target_data(out, sizes.counts, seed, gsm8k), f"{counts} {gsm8k}",
    )  # fmt: skip
    stages = [last]

    def answers(name: str, split: str, of: Path, *options: str) -> Stage:
        stages.append(Stage(name, [*ask, split, "--model", str(of), "--out", str(out / f"{name}.jsonl"), *options],
                            out / f"{name}.jsonl", (last,)))  # fmt: skip
        return stages[-1]

    if sizes.rl_steps:
        answers("answers_val_sft", "val", tuned)
        last = Stage(
            "target_rl", rl_command(tuned, out / "rl", out / "target_rl_run", sizes.rl_steps, seed, limit_of(gsm8k)),
            out / "target_rl_run", (last,), lambda: write_rl_data(out / "rl", sizes, seed, gsm8k),
            f"{sizes.rl_questions}",
        )  # fmt: skip
        stages.append(last)
    answers("answers_val", "val", target)
    written = answers("answers_train", "train", target, "--limit", str(sizes.draft_questions))
    shortened = Stage("cut", python("examples.pretrained.spd.cut", "--model", target, "--out", out / "cut", "--layers",
                                    sizes.draft_layers), out / "cut", (last,))  # fmt: skip
    distilled = Stage(
        "draft", sft_command(out / "cut", out / "draft", out / "draft_run", sizes.draft_steps, sizes.batch, 5e-4, seed),
        out / "draft_run", (shortened, written), lambda: write_draft_data(written.result, out),
    )  # fmt: skip
    splits = [part for split in sizes.counts for part in (f"--{split}-questions", out / f"questions_{split}.jsonl")]
    drafted = {**sizes.counts, "train": sizes.block_questions}
    numbers = [part for split, count in drafted.items() for part in (f"--n-{split}-questions", count)]
    blocks = Stage(
        "blocks", python(
            "examples.spd_arithmetic.prepare_blocks", "--out", out / "pair", "--target", target, "--draft", draft,
            *splits, *numbers, "--instruction", tasks.INSTRUCTION, "--system", tasks.SYSTEM, "--max-new-tokens",
            limit_of(gsm8k), "--gamma", sizes.gamma, "--n-train-blocks", sizes.blocks, "--n-val-blocks",
            sizes.harm_blocks, "--n-harm-blocks", sizes.harm_blocks, "--device", get_device_name(), "--seed", seed,
            "--batch-size", BATCH,
        ), out / "pair", (distilled,), lambda: write_question_files(out, sizes.counts, seed, gsm8k),
    )  # fmt: skip
    return [*stages, shortened, distilled, blocks]


def tuned_target(out: Path, sizes: Sizes) -> Path:
    """The folder of the fine-tuned model."""
    return out / "target_run" / f"global_step_{sizes.target_steps}" / "huggingface"


def models_of(out: Path, sizes: Sizes) -> tuple[Path, Path]:
    """The folders of target and draft."""
    draft = out / "draft_run" / f"global_step_{sizes.draft_steps}" / "huggingface"
    target = saved_scorer(out / "target_rl_run", sizes.rl_steps) if sizes.rl_steps else tuned_target(out, sizes)
    return target, draft


def head_inputs(model: Path) -> str:
    """What the scorers read: `logits`, or `pair` for a target whose logits the training cannot compute."""
    wanted = ScoringModelConfig(head_inputs="logits", base_model_path=str(model))
    try:
        SCORERS[wanted.backbone].check_target(wanted, AutoConfig.from_pretrained(model))
    except ValueError:
        return "pair"
    return wanted.head_inputs


def scorer_stages(
    blocks: Stage, out: Path, sizes: Sizes, seed: int, gsm8k: Path | None = None, inputs: str = "logits"
) -> list[Stage]:
    """The stages of one seed of the scorers on the pair of `out`, in order; they write to OUT/seedN.

    `inputs`: spd.head_inputs of the scorers.
    """
    (target, draft), folder, prepared = models_of(out, sizes), out / f"seed{seed}", out / "pair"
    train = python(
        "train_spd_scorer.py", "--model", target, "--blocks", prepared / "blocks_train.parquet",
        "--metadata", prepared / "metadata_train.parquet", "--val-blocks", prepared / "blocks_val.parquet",
        "--val-metadata", prepared / "metadata_val.parquet", f"spd.rollout.draft_path={draft}",
        f"spd.rollout.store_path={out / 'completions.sqlite3'}", f"spd.rollout.max_tokens={limit_of(gsm8k)}",
        "trainer.total_epochs=1000", f"data.seed={seed}", f"spd.seed={seed}",
        f"trainer.total_training_steps={sizes.scorer_steps}", f"data.train_batch_size={sizes.scorer_batch}",
        f"trainer.save_freq={max(1, sizes.scorer_steps // 3)}", f"trainer.device={get_device_name()}",
    )  # fmt: skip
    more = ["trainer.logger=[file,tensorboard]", "trainer.val_before_train=false", f"spd.head_inputs={inputs}"]

    def training(role: str, reads: Stage, *options: str) -> Stage:
        command = [*train, "--output-dir", str(folder / role), *options, *more]
        return Stage(f"seed{seed}/{role}", command, folder / role, (reads,))

    supervised, grpo = training("supervised", blocks, "--supervised"), training("grpo", blocks)
    scorers = {"supervised": folder / "supervised" / "supervised"}
    scorers |= {role: saved_scorer(folder / role, sizes.scorer_steps) for role in ("grpo", "refined")}
    refined = training("refined", supervised, f"spd.adapter_path={scorers['supervised']}")
    evaluation = Stage(
        f"seed{seed}/evaluation", python(
            "scripts/eval_spd_scorer.py", "--target", target, "--draft", draft, "--scorer", scorers["grpo"],
            "--compare", *(f"{role}={scorers[role]}" for role in ("supervised", "refined")),
            "--questions", out / "evaluation_test.jsonl", "--val-questions", out / "evaluation_val.jsonl",
            "--harm-labels", prepared / "harm_labels.jsonl", "--val-harm-labels", prepared / "harm_labels_val.jsonl",
            "--max-new-tokens", limit_of(gsm8k), "--gamma", sizes.gamma, "--device", get_device_name(), "--all-rules",
            "--target-first", "--max-val-drop", DROP, "--near-drop", DROP, "--batch-size", BATCH,
            "--parts", out / "evaluated", "--out", folder / "evaluation",
        ), folder / "evaluation", (supervised, grpo, refined),
        lambda: write_evaluation_questions(out, target, sizes, SEED, gsm8k),
        f"{sizes.further_val} {sizes.further_test}",
    )  # fmt: skip
    served = Stage(
        f"seed{seed}/served", python(
            "examples.pretrained.spd.serve", "--target", target, "--draft", draft, "--pair", prepared,
            "--scorers", *(f"{'scorer' if role == 'grpo' else role}={scorers[role]}" for role in ROLES),
            "--evaluation", folder / "evaluation", "--gamma", sizes.gamma,
            "--max-new-tokens", limit_of(gsm8k), "--out", folder / "served.json",
        ), folder / "served.json", (evaluation,),
    )  # fmt: skip
    return [supervised, grpo, refined, evaluation, served]


def describe(data: Mapping[str, float]) -> str:
    """The part of a step's metrics that is shown next to the bar."""
    names = {"train/loss": "loss", "val/loss": "validation", "critic/score/mean": "reward",
             "spd/accepted_len/mean": "accepted"}  # fmt: skip
    return "  ".join(f"{label} {data[name]:.3f}" for name, label in names.items() if name in data)


def watched(stage: Stage, sizes: Sizes) -> tuple[Path, int] | None:
    """The folder of metrics and the steps of a training stage."""
    steps = {"target": sizes.target_steps, "target_rl": sizes.rl_steps, "draft": sizes.draft_steps}
    steps |= dict.fromkeys(ROLES, sizes.scorer_steps)
    name = stage.name.rpartition("/")[2]
    if name not in steps:
        return None
    return stage.result / "supervised" if name == "supervised" else stage.result, steps[name]


def report(out: Path, seeds: Sequence[int]) -> None:
    """Print the figures that exist."""
    for name, what in (("answers_val_sft", "before GRPO"), ("answers_val", "the target")):
        if (file := out / f"{name}.jsonl").exists():
            named = ", ".join(f"{name} {100 * share:.1f} %" for name, share in accuracy(file).items())
            console.print(f"{what}, {len(read_rows(file))} validation questions: {named} "
                          f"(wanted of the target: {100 * TARGET_ACCURACY:.0f} % "
                          "of all)", soft_wrap=True)  # fmt: skip
    if (out / "pair" / "testbed.json").exists():
        figures = json.loads((out / "pair" / "testbed.json").read_text())["figures"]
        console.print(f"exact match accepts {figures['exact_accepted_per_forward']:.2f} draft tokens a forward on "
                      f"validation questions (wanted: {DRAFT_ACCEPTED:g})")  # fmt: skip
    files = {seed: out / f"seed{seed}" / "evaluation" / "by_question.json" for seed in seeds}
    results = {seed: gains(json.loads(file.read_text())) for seed, file in files.items() if file.exists()}
    for seed, result in results.items():
        for name, what in (("best_rule", result["rule"]), ("exact", "exact match")):
            low, high = result[f"spd_gain_over_{name}_95"]
            console.print(f"seed {seed}: {result['scorer']} over {what}, a drop of {100 * DROP:g} points on "
                          f"{result['questions']} test questions: {result[f'spd_gain_over_{name}']:.2f} times the "
                          f"accepted draft tokens, 95 % interval {low:.2f} to {high:.2f}", soft_wrap=True)  # fmt: skip
    if results:
        means = {name: mean(result[name] for result in results.values()) for name in GAINS}
        (out / "gains.json").write_text(json.dumps({"seeds": results, "means": means}, indent=1) + "\n")
        named = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
        console.print(f"means over {len(results)} seeds of the scorers: {named}", highlight=False)
    for seed in seeds:
        for name in ("evaluation/evaluation.png", "served.json"):
            if (file := out / f"seed{seed}" / name).exists():
                console.print(file)


def options(doc: str, sizes: Any, out: Path, seeds_of: str) -> argparse.ArgumentParser:
    """The options that the demos on the pretrained pair share: `sizes` has the default of each size."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with a chat template")
    parser.add_argument("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl: a further task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help=f"of the {seeds_of}")
    parser.add_argument("--out", type=Path, default=out, help=f"default: {out.relative_to(ROOT)}")
    parser.add_argument("--until", help="the last stage to run")
    for name, value in vars(sizes).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default: {value}")
    return parser


def begin(title: str, model: Path | None) -> Path:
    """Show the title, make SIGTERM end the running command too, and return the model's folder, fetched if None.

    Raises SystemExit if `model` is not a folder of a model whose tokenizer has a chat template.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console.rule(title)
    return fetch.model_folder(model)


def until(stages: Sequence[Stage], name: str | None) -> Sequence[Stage]:
    """The stages up to the one of this name, all without a name; ends the command if there is none."""
    names = [stage.name for stage in stages]
    if name and name not in names:
        raise SystemExit(f"--until {name}: the stages are {', '.join(names)}")
    return stages[: names.index(name) + 1 if name else None]


def run_and_report(run_all: Callable[[], None], show: Callable[[], None], fetched: bool) -> int:
    """Run the stages, then show the results, with a note on the weights of a fetched model; returns the exit code."""
    try:
        run_all()
    except PhaseFailed as failure:
        console.print(str(failure), style="red", markup=False)  # a log may contain brackets
        return 1
    show()
    if fetched:
        console.print(f"The model: {fetch.NOTE}.")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; returns the exit code."""
    args = options(__doc__, Sizes(), ROOT / "outputs" / "pretrained_spd", "scorers").parse_args(argv)
    out = args.out.resolve()
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    model, gsm8k = begin("SPD scorer of a pretrained model", args.model), args.gsm8k and args.gsm8k.resolve()
    cut.check(model, sizes.draft_layers)
    out.mkdir(parents=True, exist_ok=True)
    stages, inputs = pair_stages(model, out, sizes, SEED, gsm8k), head_inputs(model)
    refuse_other_settings(stages[0], out)
    blocks = stages[-1]
    for seed in args.seeds:
        stages += scorer_stages(blocks, out, sizes, seed, gsm8k, inputs)
    run_all = partial(run_stages, until(stages, args.until), out, partial(watched, sizes=sizes), describe)
    return run_and_report(run_all, partial(report, out, args.seeds), fetched=not args.model)


if __name__ == "__main__":
    sys.exit(main())
