"""A scorer for speculative decoding of a pretrained pair on GSM8K, from the fetched weights to a server.

    python -m examples.pretrained.spd.demo --gsm8k DIR [--target DIR --draft DIR] [--seeds 0 1 2] [--out DIR]
                                           [--roles supervised grpo refined] [--until STAGE]

The target is Qwen2.5-Coder-1.5B-Instruct and the draft Qwen2.5-Coder-0.5B-Instruct (examples.pretrained.fetch), or two
Hugging Face folders with the same tokenizer and a chat template. What the target answers after each mismatching draft
token of that pair is stored with this command; for another pair the first stages compute it, which takes hours on a
CPU. Then the steps of docs/spd.md: blocks, scorers, evaluation, vLLM's server.

Every stage runs once for its settings and those of the stages before it, and resumes if it was stopped; OUT/stages
has their commands, logs and times. Each of --seeds is a seed of the scorers, all on the same blocks. Ends with the
accuracies of the pair, the gains of the scorers, the tables of the server, OUT/gains.json and for each seed the
evaluation's picture and served/served.json.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import mean

from transformers import AutoConfig

from examples.demo_runner import ROOT, begin, console, python
from examples.pretrained import fetch
from examples.pretrained.spd import serve
from examples.pretrained.spd.gains import DROP, gains
from examples.pretrained.spd.labels import made_by
from examples.pretrained.stages import Stage, options, refuse_other_settings, run_and_report
from examples.spd_arithmetic.demo import saved_scorer
from recipe.spd.scorer.auto import SCORERS
from recipe.spd.scorer.config import ScoringModelConfig
from verl.utils.accelerator import get_device_name

MODELS = {"target": "qwen2.5-coder-1.5b", "draft": "qwen2.5-coder-0.5b"}
LABELS = Path(__file__).with_name("labels")  # those of MODELS
GAINS = ("spd_gain_over_best_rule", "spd_gain_over_exact")
ROLES = ("supervised", "grpo", "refined")  # the scorers; refined: GRPO from the supervised one
SUPERVISED_LR = 5e-4  # chosen by the cross-entropy on the validation mismatches of MODELS


@dataclass(frozen=True)
class Sizes:
    """How much of everything; `train` and `labelled_test` count with --own-labels or another pair only."""

    train: int = 1500  # questions
    val: int = 300
    test: int = 500
    labelled_test: int = 300  # the first test questions, by whose mismatches scorers and rules are compared
    gamma: int = 8  # draft tokens of a block
    max_new_tokens: int = 200
    scorer_steps: int = 140
    scorer_batch: int = 192  # blocks
    served: int = 48  # test questions


@dataclass(frozen=True)
class Pair:
    """The folders of both models, of GSM8K, and of what the command writes."""

    target: Path
    draft: Path
    gsm8k: Path
    out: Path

    @property
    def prepared(self) -> Path:
        """The folder of blocks, questions and labels of mismatches."""
        return self.out / "pair"


def fits_stored_labels(pair: Pair) -> bool:
    """Whether the stored labels are those of this pair, by the fingerprints of its folders."""
    return bool(made_by(LABELS, pair.target, pair.draft))


def pair_stages(pair: Pair, sizes: Sizes, own_labels: bool) -> list[Stage]:
    """The stages from the pair to its blocks, in order; labels are computed if `own_labels`."""
    models, labels = ["--target", pair.target, "--draft", pair.draft], []
    if own_labels:
        splits = {"train": ("train", sizes.val, sizes.train), "val": ("train", 0, sizes.val),
                  "test": ("test", 0, sizes.labelled_test)}  # fmt: skip
        labels = [
            Stage(f"labels_{split}", python(
                "examples.pretrained.spd.labels", *models, "--questions", pair.gsm8k / f"{file}.jsonl", "--skip", skip,
                "--count", count, "--out", pair.out / "labels" / f"{split}.parquet",
                *(["--wrong"] if split != "test" else []),
            ), pair.out / "labels" / f"{split}.parquet")
            for split, (file, skip, count) in splits.items()
        ]  # fmt: skip
    # The stored files are no stage: their bytes tell whether the blocks are theirs.
    files = [] if own_labels else sorted(LABELS.glob("*.parquet"))
    stored = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    blocks = Stage("blocks", python(
        "examples.pretrained.spd.blocks", "--labels", pair.out / "labels" if own_labels else LABELS, "--gsm8k",
        pair.gsm8k, "--target", pair.target, "--out", pair.prepared,
    ), pair.prepared, tuple(labels), given=stored)  # fmt: skip
    return [*labels, blocks]


def head_settings(model: Path) -> list[str]:
    """What the heads read of this target: the states after two thirds of its layers and, where the training can
    compute its logits, entropy and margin."""
    target = AutoConfig.from_pretrained(model).get_text_config()
    wanted = ScoringModelConfig(
        head_inputs="logits", state_layer=round(target.num_hidden_layers * 2 / 3), base_model_path=str(model)
    )
    try:
        SCORERS[wanted.backbone].check_target(wanted, target)
    except ValueError:
        wanted.head_inputs = "pair"
    return [f"spd.head_inputs={wanted.head_inputs}", f"spd.state_layer={wanted.state_layer}"]


def scorer_stages(
    blocks: Stage, pair: Pair, sizes: Sizes, seed: int, roles: Sequence[str] = ROLES[:1], head: Sequence[str] = ()
) -> list[Stage]:
    """The stages of one seed of the scorers, in order; they write to OUT/seedN.

    `roles`: of ROLES. `head`: settings of all scorers, see `head_settings`.
    """
    folder, prepared = pair.out / f"seed{seed}", pair.prepared
    train = python(
        "train_spd_scorer.py", "--model", pair.target, "--blocks", prepared / "blocks_train.parquet",
        "--metadata", prepared / "metadata_train.parquet", "--val-blocks", prepared / "blocks_val.parquet",
        "--val-metadata", prepared / "metadata_val.parquet", f"spd.rollout.draft_path={pair.draft}",
        f"spd.rollout.store_path={pair.out / 'completions.sqlite3'}", f"spd.rollout.max_tokens={sizes.max_new_tokens}",
        "trainer.total_epochs=1000", f"data.seed={seed}", f"spd.seed={seed}",
        f"trainer.total_training_steps={sizes.scorer_steps}", f"data.train_batch_size={sizes.scorer_batch}",
        f"trainer.save_freq={max(1, sizes.scorer_steps // 3)}", f"trainer.device={get_device_name()}",
    )  # fmt: skip
    more = ["trainer.logger=[file,tensorboard]", "trainer.val_before_train=false", *head]
    scorers = {role: saved_scorer(folder / role, sizes.scorer_steps) for role in ROLES}
    scorers["supervised"] = folder / "supervised" / "supervised"
    trained: dict[str, Stage] = {}
    for role in (role for role in ROLES if role in roles):
        own = {"supervised": ["--supervised", f"actor_rollout_ref.actor.optim.lr={SUPERVISED_LR}"],
               "refined": [f"spd.adapter_path={scorers['supervised']}"]}.get(role, [])  # fmt: skip
        reads = trained["supervised"] if role == "refined" else blocks
        metrics = folder / role / "supervised" if role == "supervised" else folder / role
        trained[role] = Stage(f"seed{seed}/{role}", [*train, "--output-dir", str(folder / role), *own, *more],
                              folder / role, (reads,), training=(metrics, sizes.scorer_steps))  # fmt: skip
    first = "grpo" if "grpo" in trained else next(iter(trained))  # the scorer that the evaluation calls so
    others = [f"{role}={scorers[role]}" for role in trained if role != first]
    evaluation = Stage(f"seed{seed}/evaluation", python(
        "scripts/eval_spd_scorer.py", "--target", pair.target, "--draft", pair.draft, "--scorer", scorers[first],
        *(["--compare", *others] if others else []), "--questions", prepared / "questions_test.jsonl", "--limit",
        sizes.test, "--val-questions", prepared / "questions_val.jsonl", "--val-limit", sizes.val, "--harm-labels",
        prepared / "harm_labels.jsonl", "--val-harm-labels", prepared / "harm_labels_val.jsonl", "--max-new-tokens",
        sizes.max_new_tokens, "--gamma", sizes.gamma, "--device", get_device_name(), "--all-rules", "--target-first",
        "--max-val-drop", DROP, "--near-drop", DROP, "--batch-size", 50, "--parts", pair.out / "evaluated", "--out",
        folder / "evaluation",
    ), folder / "evaluation", tuple(trained.values()))  # fmt: skip
    served = Stage(f"seed{seed}/served", python(
        "examples.pretrained.spd.serve", "--target", pair.target, "--draft", pair.draft, "--scorers",
        f"scorer={scorers[first]}", *others, "--questions", prepared / "questions_test.jsonl", "--limit", sizes.served,
        "--evaluation", folder / "evaluation", "--max-new-tokens", sizes.max_new_tokens, "--out", folder / "served",
    ), folder / "served", (evaluation,))  # fmt: skip
    return [*trained.values(), evaluation, served]


def describe(data: Mapping[str, float]) -> str:
    """The part of a step's metrics that is shown next to the bar."""
    names = {"train/loss": "loss", "val/loss": "validation", "critic/score/mean": "reward",
             "spd/accepted_len/mean": "accepted"}  # fmt: skip
    return "  ".join(f"{label} {data[name]:.3f}" for name, label in names.items() if name in data)


def report(out: Path, seeds: Sequence[int]) -> None:
    """Print the figures that exist; write gains.json."""
    results = {}
    for folder in (out / f"seed{seed}" for seed in seeds):
        evaluation, served = folder / "evaluation", folder / "served" / "served.json"
        if (evaluation / "evaluation.json").exists():
            record = json.loads((evaluation / "evaluation.json").read_text())
            result = gains(json.loads((evaluation / "by_question.json").read_text()))
            result["areas"] = record.get("areas", {}).get("test", {})
            results[folder.name.removeprefix("seed")] = result
            show_pair(record)
            show_gains(folder.name, result)
            console.print(evaluation / "evaluation.png")
        if served.exists():
            record = json.loads(served.read_text())
            console.print(serve.result_table(record))
            console.print(serve.described(record), soft_wrap=True, highlight=False)
    if results:
        means = {name: mean(result[name] for result in results.values()) for name in GAINS}
        (out / "gains.json").write_text(json.dumps({"seeds": results, "means": means}, indent=1) + "\n")
        named = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
        console.print(f"means over {len(results)} seeds of the scorers: {named}", highlight=False)


def show_pair(record: Mapping) -> None:
    """Print the target's accuracy, and what exact match accepts of its draft's tokens."""
    target, exact = (next(row for row in record["rows"] if row["rule"] == rule) for rule in ("target", "exact"))
    console.print(f"{record['questions']} test questions: the target answers {100 * target['accuracy']:.1f} % right, "
                  f"the pair by exact match {100 * exact['accuracy']:.1f} %, which accepts "
                  f"{exact['accepted_per_forward']:.2f} draft tokens a forward", soft_wrap=True)  # fmt: skip


def show_gains(name: str, result: Mapping) -> None:
    """Print the gains of a seed with their intervals, and the areas."""
    for other, what in (("best_rule", result["rule"]), ("exact", "exact match")):
        low, high = result[f"spd_gain_over_{other}_95"]
        console.print(f"{name}: {result['scorer']} over {what}, a drop of {100 * DROP:g} points on "
                      f"{result['questions']} test questions: {result[f'spd_gain_over_{other}']:.2f} times the "
                      f"accepted draft tokens, 95 % interval {low:.2f} to {high:.2f}", soft_wrap=True)  # fmt: skip
    areas = ", ".join(f"{rule} {area:.2f}" for rule, area in result["areas"].items() if area is not None)
    console.print(f"{name}: area under the ROC curve on labelled test mismatches: {areas}", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; returns the exit code."""
    parser = options(__doc__, Sizes(), ROOT / "outputs" / "pretrained_spd", "scorers")
    for name in MODELS:
        parser.add_argument(f"--{name}", type=Path, help=f"a Hugging Face folder (default: {MODELS[name]}, fetched)")
    fetch.add_gsm8k(parser)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES[:1], help="the scorers; refined: GRPO from "
                        "the supervised one (default: supervised)")  # fmt: skip
    parser.add_argument("--own-labels", action="store_true", help="compute the labels although they are stored")
    args = parser.parse_args(argv)
    if (args.target is None) != (args.draft is None):
        parser.error("give both --target and --draft, or neither")
    if "refined" in args.roles and "supervised" not in args.roles:
        parser.error("--roles refined starts from the supervised scorer: add supervised")
    begin("SPD scorer of a pretrained pair")
    gsm8k, out = fetch.gsm8k_folder(args.gsm8k), args.out
    models = {name: fetch.model_folder(getattr(args, name), f"--{name}", MODELS[name]) for name in MODELS}
    pair, sizes = Pair(**models, gsm8k=gsm8k, out=out), Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    stages = pair_stages(pair, sizes, args.own_labels or not fits_stored_labels(pair))
    for stage in stages:
        refuse_other_settings(stage, out)
    blocks, head = stages[-1], head_settings(pair.target)
    for seed in args.seeds:
        stages += scorer_stages(blocks, pair, sizes, seed, args.roles, head)
    show = partial(report, out, args.seeds)
    return run_and_report(stages, args.until, out, describe, show, fetched=not args.target)


if __name__ == "__main__":
    sys.exit(main())
