"""Command that prepares everything a scorer is trained and measured on: questions, drafted blocks, harm labels.

    python -m examples.spd_arithmetic.prepare_blocks --out DIR --target DIR --draft DIR \
        --train-questions train.jsonl --test-questions test.jsonl [--engine vllm] [--tensor-parallel 4]
    python -m examples.spd_arithmetic.prepare_blocks --out DIR [--seed S] [--softness U]   # the test bed of the demo

A killed command resumes where it stopped, with the same result as an uninterrupted one.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd
import torch
from loguru import logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers import AutoTokenizer

from examples.spd_arithmetic import train_pair
from examples.spd_arithmetic.blocks import DraftedBlock, OwnPath, drifted_blocks, harm_labels, own_paths
from examples.spd_arithmetic.pair import EVERYTHING, Pair, PairFiles, open_pair
from examples.spd_arithmetic.questions import (
    INSTRUCTION,
    SPLITS,
    PromptStyle,
    Question,
    Splits,
    draw_questions,
    read_splits,
    write_questions,
)
from examples.spd_arithmetic.train_pair import DEFAULTS
from examples.spd_arithmetic.workers import RayWorkers, Workers
from recipe.spd.rollout import answers, decoder
from scripts.spd_evaluation import rules
from scripts.spd_evaluation.measures import mean_and_error
from verl.data.fingerprint import model_dir_fingerprint
from verl.models import grouped_attention, kv_cache
from verl.utils.accelerator import default_dtype
from verl.utils.fs import output_folder

HERE = Path(__file__).parent
CODE = (*train_pair.CODE, "questions.py", "pair.py", "hf_tasks.py", "vllm_tasks.py", "blocks.py", "workers.py",
        "prepare_blocks.py")
CODE_ELSEWHERE = (rules, decoder, answers, grouped_attention, kv_cache)
MODEL_SETTINGS = {
    "softness": "u: probability that the first token of another wording than the target's own counts in its training",
    "draft_softness": "the same for the wordings that the draft prefers",
    "draft_house_share": "share of the target's own wordings among the draft's",
    "target_steps": "steps of the target's training",
    "draft_steps": "steps of the draft's training",
}
SANITY_QUESTIONS = 200
DRIFTED_DROP = 0.05  # of accuracy after accepted mismatches
KEPT = "finished_parts"
SECONDS_BETWEEN_LINES = 15.0
SPEED_SECONDS = 300.0  # over which the speed is measured that gives the time left


@dataclass
class Phases:
    """Seconds of each phase, with a progress bar while it runs, or lines where the output is no terminal."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    spoke: float = field(default_factory=time.perf_counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[train_pair.Report]:
        """Time a phase; the yielded function (done, in all, label) moves its bars."""
        begin = time.perf_counter()
        bars: dict[str, int] = {}

        def report(done: float, total: int, label: str = "") -> None:
            title = f"{name} {label}".strip()
            if title not in bars:
                bars[title] = self.progress.add_task(title, total=total)
            bar = self.progress.tasks[bars[title]]
            if done < bar.completed:  # another queue of rows begins
                self.progress.reset(bar.id)
            self.progress.update(bar.id, completed=done, total=total)
            if self.progress.disable and time.perf_counter() - self.spoke > SECONDS_BETWEEN_LINES:
                self.spoke = time.perf_counter()
                left = "?" if bar.time_remaining is None else f"{bar.time_remaining:.0f}"
                print(f"  {title}: {done:.0f} of {total}, about {left} s left", flush=True)

        yield report
        self.seconds[name] = round(time.perf_counter() - begin, 2)
        if self.progress.disable:
            print(f"  {name}: {self.seconds[name]:.1f} s", flush=True)


def main(argv: list[str] | None = None) -> Path:
    """Make the test bed, or say that the one at --out was made by the same command; returns its folder."""
    args = parse_arguments(argv)
    console = Console()
    key = fingerprint(args)
    if made_by(args.out, key):
        logger.info("{} was made with the same arguments and code: reused", args.out)
        console.print(figures_table(json.loads((args.out / "testbed.json").read_text())["figures"]))
        return args.out
    refuse_foreign_folder(args.out)
    unfinished = args.out.with_name(args.out.name + ".partial")
    mark = unfinished / "fingerprint"
    if not mark.exists() or mark.read_text() != key:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        mark.write_text(key)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())
    if args.ray:
        started: Workers = RayWorkers(args.processes, args.tensor_parallel if args.device == "cuda" else 0)
    else:
        started = Workers(args.processes)
    bars = Progress(*columns, console=console, speed_estimate_period=SPEED_SECONDS, disable=not console.is_terminal)
    with started as workers, bars as progress:
        figures = build(args, unfinished, workers, Phases(progress), key)
    shutil.rmtree(unfinished / KEPT, ignore_errors=True)
    mark.unlink()
    if args.out.exists():
        shutil.rmtree(args.out)
    os.replace(unfinished, args.out)
    console.print(figures_table(figures))
    return args.out


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=output_folder, required=True, help="folder of the results, which a later run replaces")
    add("--seed", type=int, default=0)
    for name, text in MODEL_SETTINGS.items():
        add(f"--{name.replace('_', '-')}", type=type(DEFAULTS[name]), help=f"{text} (default {DEFAULTS[name]})")
    for split, count in (("train", 1000), ("val", 600), ("test", 1200)):
        add(f"--n-{split}-questions", type=int, default=count, help="how many of them (default %(default)d)")
    for split, count in (("train", 4000), ("val", 1000)):
        add(f"--n-{split}-blocks", type=int, default=count, help="at most this many (default %(default)d)")
    add("--n-harm-blocks", type=int, default=600, help="at most this many blocks of test questions get harm labels "
        "(default %(default)d)")
    add("--drift-share", type=float, default=0.5, help="share of the train blocks from decoding that accepts "
        "mismatches within --drift-margin, as contexts contain them when a scorer serves")
    add("--drift-margin", type=float, default=4.0, help="threshold of that rule: a mismatch passes if the target's "
        "logit of its own token is larger by at most this (default %(default)g)")
    add("--offsets", type=int, default=8, help="the first block of half of the train and validation answers starts "
        "after up to so many of the target's tokens, that of the others after the prompt; 0: of all of them")
    add("--gamma", type=int, default=8, help="drafted tokens per round (default %(default)d)")
    add("--max-new-tokens", type=int, default=128, help="an answer cut there counts as wrong (default %(default)d)")
    add("--batch-size", type=int, help="rows that a process decodes together, and that are lost when it is killed "
        "(default 200; 1000 for vLLM, which batches them by itself)")
    add("--target", type=Path, help="Hugging Face directory of a target model, with its tokenizer")
    add("--draft", type=Path, help="Hugging Face directory of a draft model with the same vocabulary")
    for split in SPLITS:
        add(f"--{split}-questions", type=Path, help=f"jsonl in GSM8K's format with the {split} questions, instead of "
            "the corpus; needs --target and --draft" + ("; without one they are taken from those of train"
                                                        if split == "val" else ""))
    add("--instruction", default=INSTRUCTION, help="follows each question")
    add("--system", help="system prompt")
    add("--few-shot", type=Path, help="jsonl in GSM8K's format: worked examples before each question")
    add("--thinking", action=argparse.BooleanOptionalAction, help="the chat template's enable_thinking")
    add("--template-args", type=json.loads, default={}, help="further arguments of the chat template, as JSON")
    add("--device", default="cpu", help="cpu or cuda: where blocks are made")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of both models (default: bfloat16 on cuda "
        "and on CPUs with instructions for it, else float32)")
    add("--engine", choices=("hf", "vllm"), help="what generates: plain batches of transformers, or vLLM (default: "
        "vllm on cuda, hf on a CPU, where tiny models finish before vLLM has started)")
    add("--tensor-parallel", type=int, default=1, help="GPUs that share the target (vLLM)")
    add("--memory-shares", type=float, nargs=2, default=[0.6, 0.25], metavar=("TARGET", "DRAFT"),
        help="fractions of each GPU's memory for the two engines, weights and cache included (vLLM)")
    add("--ray", action=argparse.BooleanOptionalAction, help="the work goes to Ray actors, on all nodes of the cluster "
        "in RAY_ADDRESS, or of one that is started here (default: on cuda)")
    add("--threads", type=int, help="CPU threads of a process that decodes; may change last digits (default 1; for "
        "vLLM on a CPU the cores are shared among the processes)")
    add("--processes", type=int, help="processes that share the questions, each with both models in its memory "
        "(default: one per core; for vLLM on a CPU a single one; on cuda one for each --tensor-parallel GPUs); "
        "changes no result")
    args = parser.parse_args(argv)
    together = [args.train_questions, args.test_questions, args.target, args.draft]
    real = args.target is not None
    if any(together) != all(together) or (args.val_questions and not real):
        parser.error("--train-questions, --test-questions, --target and --draft go together, and --val-questions with "
                     "them: real questions need a real pair of models")
    given = [name for name in MODEL_SETTINGS if getattr(args, name) is not None]
    if real and given:
        parser.error(f"--{given[0].replace('_', '-')} is for models trained here: not with --target and --draft")
    if not real:
        for name in MODEL_SETTINGS:
            setattr(args, name, getattr(args, name) if name in given else DEFAULTS[name])
    for name in ("drift_share", "softness", "draft_softness", "draft_house_share"):
        value = getattr(args, name)
        if value is not None and not 0.0 <= value <= 1.0:
            parser.error(f"--{name.replace('_', '-')} {value}: expected 0 to 1")
    if args.offsets < 0:
        parser.error(f"--offsets {args.offsets}: expected 0 or more")
    for name in ("processes", "tensor_parallel", "threads", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected 1 or more")
    args.dtype = args.dtype or default_dtype(args.device)
    args.engine = args.engine or ("vllm" if args.device == "cuda" else "hf")
    args.ray = args.device == "cuda" if args.ray is None else args.ray
    threaded = args.engine == "vllm" and args.device == "cpu" and not args.ray  # its rows share one copy of the weights
    args.batch_size = args.batch_size or (1000 if args.engine == "vllm" else 200)
    if not args.ray:
        args.processes = args.processes or (1 if threaded else len(os.sched_getaffinity(0)))
    # Not recorded: threads that nobody asked for must not make a resumed command another one.
    args.default_threads = max(1, torch.get_num_threads() // args.processes) if threaded else 1
    if args.device == "cuda" and not args.ray:
        parser.error("--no-ray is for a CPU: Ray gives each process its GPUs")
    if args.tensor_parallel > 1 and args.engine != "vllm":
        parser.error("--tensor-parallel needs --engine vllm")
    if min(args.memory_shares) <= 0 or sum(args.memory_shares) > 1:
        parser.error(f"--memory-shares {args.memory_shares}: expected two positive numbers that add up to at most 1")
    args.out = args.out.resolve()  # Ray's actors work in other folders
    return args


def fingerprint(args: argparse.Namespace) -> str:
    """Hash of everything the result depends on: the arguments, the files they name, the code."""
    digest = hashlib.sha256(json.dumps(recorded(args)).encode())
    for source in (*(HERE / name for name in CODE), *(Path(module.__file__) for module in CODE_ELSEWHERE)):
        digest.update(source.read_bytes())
    for name in ("train_questions", "val_questions", "test_questions", "few_shot"):
        if (file := getattr(args, name)) is not None:
            digest.update(file.read_bytes())
    if args.target is not None:
        for model in (args.target, args.draft):
            digest.update(model_dir_fingerprint(model).encode())
    return digest.hexdigest()[:16]


def recorded(args: argparse.Namespace) -> dict[str, str]:
    """The arguments that the result depends on."""
    return {name: str(value) for name, value in sorted(vars(args).items())
            if name not in ("out", "processes", "ray", "memory_shares", "default_threads")}


def made_by(out: Path, key: str) -> bool:
    """Whether a finished test bed with this fingerprint is there."""
    record = out / "testbed.json"
    return record.exists() and json.loads(record.read_text())["fingerprint"] == key


def refuse_foreign_folder(out: Path) -> None:
    """Only an older test bed may be replaced."""
    if out.exists() and any(out.iterdir()) and not (out / "testbed.json").exists():
        raise FileExistsError(f"--out {out} holds files but no testbed.json; name an empty folder or an older test bed")


def build(args: argparse.Namespace, out: Path, workers: Workers, phases: Phases, key: str) -> dict[str, float]:
    """Write all files of the test bed to `out`; returns its results."""
    with phases.phase("models") as report:
        place_models(args, out, workers, report)
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    counts = {split: getattr(args, f"n_{split}_questions") for split in SPLITS}
    with phases.phase("questions"):
        style = PromptStyle(args.instruction, args.system, args.few_shot, args.thinking, args.template_args)
        if args.target is None:
            splits = draw_questions(counts, args.seed, tokenizer)
        else:
            files = {split: getattr(args, f"{split}_questions") for split in SPLITS}
            splits = read_splits(files, counts, args.seed, tokenizer, style)
        for split in SPLITS:
            write_questions(out / f"questions_{split}.jsonl", splits[split])
    longest = max(len(q.prompt_ids) for split in SPLITS for q in splits[split])
    files = PairFiles(out, args.device, args.threads or args.default_threads, args.gamma, args.max_new_tokens,
                      args.batch_size, args.engine, longest, args.tensor_parallel, out / KEPT,
                      tuple(args.memory_shares), args.dtype)
    pair = open_pair(files, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), workers)
    written, drifted, n_drifted = {}, [], round(args.drift_share * args.n_train_blocks)
    # About two blocks of a question have a mismatch.
    asked = {"train": (splits["train"], args.n_train_blocks - n_drifted, args.offsets),
             "val": (splits["val"], args.n_val_blocks, args.offsets),
             "test": (splits["test"][: max(1, args.n_harm_blocks // 2)], args.n_harm_blocks, 0)}
    with phases.phase("own answers") as report:
        paths = dict(zip(asked, own_paths(pair, list(asked.values()), args.seed, report), strict=True))
    with phases.phase("blocks after mismatches") as report:
        if n_drifted:
            # In use a scorer judges after mismatches it accepted, where the answer is mostly still right.
            drifted = drifted_blocks(
                pair, splits["train"], args.drift_margin, n_drifted, args.seed, report, args.offsets)
        for split, n_blocks in (("train", args.n_train_blocks), ("val", args.n_val_blocks)):
            blocks = paths[split].blocks + (drifted if split == "train" else [])
            if len(blocks) < n_blocks:
                logger.warning("{} {} blocks instead of {}: only blocks with a mismatch count, and the questions have "
                               "no more; raise --n-{}-questions", len(blocks), split, n_blocks, split)  # fmt: skip
            write_split(out, split, splits[split], blocks, paths[split])
            written[f"{split}_blocks"] = len(blocks)
    with phases.phase("harm labels") as report:
        questions = {q.question_id: q for split in ("test", "val") for q in splits[split]}
        both = harm_labels(pair, paths["test"].blocks + paths["val"].blocks, questions, report)
        labels, validation = ([label for label in both if label.question_id in paths[split].correct]
                              for split in ("test", "val"))
        for name, labelled in (("harm_labels", labels), ("harm_labels_val", validation)):
            (out / f"{name}.jsonl").write_text("".join(json.dumps(asdict(label)) + "\n" for label in labelled))
    with phases.phase("sanity figures") as report:
        figures = measure(pair, splits, paths, report)
    if drifted:
        after, before, drop, error = drop_after_mismatches(drifted, paths["train"].correct)
        figures |= {"target_accuracy_after_mismatches": after, "target_accuracy_of_the_same_questions": before}
        if drop > DRIFTED_DROP and drop > 1.96 * error:
            logger.warning(
                "the target is right in {:.1%} of the training answers that begin with accepted mismatches (within a "
                "margin of {}), but in {:.1%} of its own answers to the same questions, a drop of {:.1f} ± {:.1f} "
                "points: some of these mismatches are harmful, or the target is not robust to the draft's wording. "
                "Blocks of wrong answers teach a scorer little: a lower --drift-margin gives fewer, and so may a "
                "target that is trained longer.", after, args.drift_margin, before, 100 * drop, 100 * error,
            )  # fmt: skip
    reached = [label for label in labels if not label.already_broken]
    figures |= written | {
        "mismatches_labelled": len(labels), "mismatches_reachable": len(reached),
        "mismatches_harmful": sum(label.harmful for label in reached) / max(1, len(reached)),
    }
    record = {
        "fingerprint": key, "seed": args.seed, "softness": args.softness, "gamma": args.gamma,
        "max_new_tokens": args.max_new_tokens, "source": str(args.train_questions or "corpus"),
        "arguments": recorded(args), "figures": figures,
    }
    (out / "timings.json").write_text(json.dumps({"phases": phases.seconds}, indent=1))
    (out / "testbed.json").write_text(json.dumps(record, indent=1))
    return figures


def drop_after_mismatches(
    drifted: Sequence[DraftedBlock], own: Mapping[str, bool]
) -> tuple[float, float, float, float]:
    """Accuracy of the answers after accepted mismatches and of the target's own ones to the same questions (`own`, by
    question), each question counted once, and their paired difference with its standard error.
    """
    by_question: dict[str, list[bool]] = {}
    for block in drifted:
        by_question.setdefault(block.question_id, []).append(block.is_correct_baseline)
    after = {question: sum(right) / len(right) for question, right in by_question.items()}
    drops = [own[question] - share for question, share in after.items()]
    drop, error = mean_and_error(drops) if len(drops) > 1 else (drops[0], float("inf"))
    return sum(after.values()) / len(after), sum(own[q] for q in after) / len(after), drop, error


def place_models(args: argparse.Namespace, out: Path, workers: Workers, report: train_pair.Report) -> None:
    """Put target/ and draft/ into the test bed: trained here, or links to the given pair."""
    if args.target is not None:
        for name, given in (("target", args.target), ("draft", args.draft)):
            if not (out / name).exists():
                (out / name).symlink_to(given.resolve(), target_is_directory=True)
        return
    jobs = [train_pair.Job("target", args.target_steps, args.seed, args.softness, args.draft_softness),
            train_pair.Job("draft", args.draft_steps, args.seed, house_share=args.draft_house_share)]
    train_pair.train_pair(out, args.out.parent / "models", jobs, workers, report)


def write_split(out: Path, split: str, questions: list[Question], blocks: list[DraftedBlock], path: OwnPath) -> None:
    """Write the blocks and the metadata of one split."""
    pd.DataFrame([asdict(block) for block in blocks]).to_parquet(
        out / f"blocks_{split}.parquet", write_page_checksum=True
    )
    pd.DataFrame([
        {"question_id": q.question_id, "question": q.question, "ground_truth": q.ground_truth,
         "is_correct_baseline": path.correct[q.question_id]} for q in questions
    ]).to_parquet(out / f"metadata_{split}.parquet", write_page_checksum=True)


def measure(pair: Pair, splits: Splits, paths: dict[str, OwnPath], report: train_pair.Report) -> dict[str, float]:
    """Values that distinguish a good test bed from a bad one; none of them uses test questions."""
    val = splits["val"]
    right = [r for split in ("train", "val") for r in paths[split].correct.values()]
    drafted = pair.greedy("draft", [q.prompt_ids for q in val], report)
    lenient = val[:SANITY_QUESTIONS]
    everything = pair.speculative(lenient, EVERYTHING, report)
    return {
        "target_accuracy": sum(right) / len(right),
        "draft_accuracy": sum(pair.is_right(ids, q) for ids, q in zip(drafted, val, strict=True)) / len(val),
        "exact_accepted_per_forward": paths["val"].accepted_per_forward,
        "exact_tokens_per_forward": paths["val"].tokens_per_forward,
        "accept_all_accuracy":
            sum(pair.is_right(ids, q) for ids, q in zip(everything.tokens, lenient, strict=True)) / len(lenient),
        "accept_all_accepted_per_forward": sum(everything.accepted) / sum(everything.rounds),
    }


def figures_table(figures: dict[str, float]) -> Table:
    """The results as a table."""
    table = Table("figure", "value", title="questions and blocks")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else str(value))
    return table


def run() -> None:
    """`main` as a command."""
    try:
        main()
    except (ValueError, OSError) as error:  # a wrong option or file: no traceback
        sys.exit(str(error))


if __name__ == "__main__":
    run()
