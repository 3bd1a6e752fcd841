"""What the runs of the demo show: series over steps, acceptance criteria, times of generation, pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from rich.table import Table

from examples.demo_runner import by_step
from examples.grpo_arithmetic.acceptance import Criterion

DATA_SOURCE = "worked_arithmetic"
METRICS = {
    "accuracy": f"val-core/{DATA_SOURCE}/reward/mean@1", "reward": "critic/score/mean", "loss": "actor/pg_loss",
    "tokens_per_forward": "rollout/tokens_per_forward", "forwards": "rollout/forwards",
    "longest": "response_length/max", "length": "response_length/mean",
}  # fmt: skip
EDGE = 5  # steps that count as the start or the end of a run
EDGES = {"start": slice(EDGE), "end": slice(-EDGE, None)}
SAME_STEPS, SAME_LOSS = 3, 1e-4  # leading steps with the same samples; largest difference of their losses
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantiles of Student's t, by number of seeds
GAIN_POINTS, DECAY = 15.0, 0.05
RATIO_START, RATIO_END = 3.0, 2.5
WALL = {"1": 2.5, "4": 2.5, "16": 1.7, "64": 1.2, "tail": 1.4}  # least speed of rollout refine over hf, by batch
SAMPLES = 128  # of a step
LABELS = {
    "plain": "plain sampling", "refine": "drafts, no refinement loss", "refine_all": "drafts, loss on all samples",
    "refine_positive": "drafts, loss on positive advantages",
    "refine_fast": "drafts, no refinement loss, lr 1e-3", "refine_all_fast": "drafts, loss on all samples, lr 1e-3",
}  # fmt: skip
Series = dict[str, dict[int, float]]
"""Metric by name of METRICS -> its values by step; validations have a step 0."""


def series(run: Path) -> Series:
    """The metrics of a finished run."""
    return {name: by_step(run, metric) for name, metric in METRICS.items()}


def same_steps(plain: Path, refine: Path) -> tuple[int, float]:
    """Leading steps in which two runs drew the same samples, and the largest difference of their losses there."""
    losses = [by_step(run, METRICS["loss"]) for run in (plain, refine)]
    same = 0
    while (plain / "samples" / f"{same + 1}.jsonl").exists():
        texts = [[json.loads(line)["output"] for line in (run / "samples" / f"{same + 1}.jsonl").open()]
                 for run in (plain, refine)]  # fmt: skip
        if texts[0] != texts[1]:
            break
        same += 1
    return same, max((abs(losses[0][step] - losses[1][step]) for step in range(1, same + 1)), default=0.0)


def values(run: Series, metric: str, part: slice = slice(None)) -> list[float]:
    """A metric's values, of the steps of `part`."""
    return list(run[metric].values())[part]


def forwards_ratio(run: Series, part: slice) -> float:
    """Forwards that a sample takes part in token by token, over those that it took part in; means over steps.

    Token by token, an answer takes as many forwards as it has tokens: the one that reads the prompt gives the first.
    """
    lengths, per_forward = values(run, "length", part), values(run, "tokens_per_forward", part)
    return sum(lengths) / sum(1 + length / tokens for length, tokens in zip(lengths, per_forward, strict=True))


def batch_ratio(run: Series, part: slice) -> float:
    """The same of the batches' forwards, which their longest answers need."""
    return sum(values(run, "longest", part)) / sum(values(run, "forwards", part))


def speed(cell: Mapping[str, Any]) -> float:
    """Tokens per second."""
    return cell["tokens"] / median(cell["seconds"])


def steps_to(run: Series, accuracy: float) -> float:
    """The first validation that reaches an accuracy, as a step; infinite if none does."""
    return next((step for step, value in run["accuracy"].items() if value >= accuracy), float("inf"))


def criteria_of(
    runs: Mapping[str, Sequence[Series]], students: Mapping[str, Series], same: Sequence[tuple[int, float]],
    generation: Mapping[str, Any],
) -> dict[str, Criterion]:  # fmt: skip
    """Criteria by name; `runs` has a series per seed."""
    last = EDGES["end"]
    start, end = (mean(forwards_ratio(run, part) for run in runs["refine_all"]) for part in EDGES.values())
    batches = [mean(batch_ratio(run, part) for run in runs["refine_all"]) for part in EDGES.values()]
    tokens = {name: mean(mean(values(run, "tokens_per_forward", last)) for run in runs[name])
              for name in runs if name != "plain"}  # fmt: skip
    rewards = {name: [mean(values(run, "reward", last)) for run in runs[name]] for name in runs}
    plain, count = rewards["plain"], len(rewards["plain"])
    half = STUDENT_T[count] * stdev(plain) / count**0.5 if count in STUDENT_T else float("nan")
    leading, difference = min(steps for steps, _ in same), max(loss for _, loss in same)
    opd = students["opd"]
    begun, distilled = (100 * values(opd, "accuracy")[i] for i in (0, -1))
    needed = {
        name: SAMPLES * steps_to(run, values(opd, "accuracy")[0] + GAIN_POINTS / 100) for name, run in students.items()
    }
    walls = {batch: speed(generation["refine"][batch]) / speed(generation["hf"][batch]) for batch in WALL}
    reward = mean(rewards["refine_all"])
    return {
        "same_samples": Criterion(
            "refine without refinement loss against plain: leading steps with the same samples; difference of losses",
            f"{leading} steps, {difference:.1e}", f"at least {SAME_STEPS}, at most {SAME_LOSS:g}",
            leading >= SAME_STEPS and difference <= SAME_LOSS,
        ),
        "reward": Criterion(
            f"reward in the last {EDGE} steps, with refinement loss against plain (95 % interval of {count} seeds)",
            f"{reward:.3f} against {mean(plain):.3f} ± {half:.3f}", "not below the interval",
            reward >= mean(plain) - half,
        ),
        "forwards_start": Criterion("times fewer policy forwards of a sample (of a batch) at the start",
                                    f"{start:.2f} ({batches[0]:.2f})", f"at least {RATIO_START:g}",
                                    start >= RATIO_START),
        "forwards_end": Criterion("the same after training with the refinement loss", f"{end:.2f} ({batches[1]:.2f})",
                                  f"at least {RATIO_END:g}", end >= RATIO_END),
        "decay": Criterion(
            "tokens per forward at the end without the loss and with it, lr 1e-3 "
            "(lr 1e-4: without it, with it, and with it on positive advantages only)",
            f"{tokens['refine_fast']:.2f}, {tokens['refine_all_fast']:.2f} "
            f"({tokens['refine']:.2f}, {tokens['refine_all']:.2f}, {tokens['refine_positive']:.2f})",
            f"at least {100 * DECAY:g} % fewer without it at lr 1e-3",
            tokens["refine_fast"] <= (1 - DECAY) * tokens["refine_all_fast"],
        ),
        **{f"wall_{batch}": Criterion(f"speed of generation over rollout hf, batch {batch}", f"{ratio:.2f} times",
                                      f"at least {WALL[batch]:g}", ratio >= WALL[batch])
           for batch, ratio in walls.items()},
        "opd_gain": Criterion("accuracy of the student, distilled against its start",
                              f"{distilled:.1f} % against {begun:.1f} %", f"at least {GAIN_POINTS:g} points more",
                              distilled - begun >= GAIN_POINTS),
        "opd_samples": Criterion(f"samples until {GAIN_POINTS:g} points above the start, distillation against GRPO",
                                 f"{needed['opd']:.0f} against {needed['grpo']:.0f}", "fewer",
                                 needed["opd"] < needed["grpo"]),
    }  # fmt: skip


def time_table(generation: Mapping[str, Any]) -> Table:
    """A row per rollout: times the speed of hf on each batch, and tokens per forward where they are counted."""
    table = Table("rollout", *(f"batch {name}" for name in WALL), title="Speed over rollout hf (tokens per forward)")
    for name, row in generation.items():
        cells = []
        for batch in WALL:
            counted = row[batch].get("rollout/tokens_per_forward")
            ratio = speed(row[batch]) / speed(generation["hf"][batch])
            cells.append(f"{ratio:.2f}" + (f" ({counted:.1f})" if counted else ""))
        table.add_row(name, *cells)
    return table


def draw_curves(runs: Mapping[str, Sequence[Series]], students: Mapping[str, Series], file: Path) -> None:
    """Write a PNG: tokens per forward, reward and held-out accuracy of the runs over steps, means over seeds; the
    students' accuracy over samples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    (tokens, reward), (accuracy, distilled) = figure.subplots(2, 2)
    for color, (name, of_seeds) in enumerate(runs.items()):
        for axis, metric, factor in ((tokens, "tokens_per_forward", 1), (reward, "reward", 1),
                                     (accuracy, "accuracy", 100)):  # fmt: skip
            steps = of_seeds[0][metric].keys()
            means = [factor * mean(run[metric][step] for run in of_seeds) for step in steps]
            style = "--" if name in ("refine", "refine_fast") else "-"
            axis.plot(list(steps), means, style, color=f"C{color}", label=LABELS[name])
    for name, run in students.items():
        points = run["accuracy"]
        distilled.plot([SAMPLES * step for step in points], [100 * value for value in points.values()], "o-",
                       label={"opd": "distillation", "grpo": "GRPO"}[name])  # fmt: skip
    tokens.set(xlabel="step", ylabel="tokens per forward", ylim=(0, None))
    reward.set(xlabel="step", ylabel="mean reward of a step")
    accuracy.set(xlabel="step", ylabel="accuracy on held-out questions, %")
    distilled.set(xlabel="samples", ylabel="the student's accuracy, %", ylim=(0, 103))
    for axis in (tokens, reward, accuracy, distilled):
        axis.grid(alpha=0.3)
    for axis in (tokens, distilled):
        axis.legend()
    figure.savefig(file, dpi=110)
