"""Tokens drafted in a round: tokens per target forward at 4, 8 and 16, and the speed that a cost model gives them.

    python -m benchmarks.run spd_gamma

Takes the test bed and scorer of `make demo`, trained on blocks of 8. The model counts a round as one verification,
gamma steps of the draft and a judgement, in units of the target's forward of one token: tokens / (v + gamma c + j). v,
c and j are measured here, one row at a time; on a GPU v is near 1, and c is the draft's share of the target's weights.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import Value

import torch

from benchmarks.harness import Row, say
from examples.demo_runner import ROOT
from examples.spd_arithmetic.demo import LIMIT, STEPS, saved_scorer
from recipe.spd.data.blocks import Block
from recipe.spd.rollout.decoder import greedy_generate, speculative_generate
from scripts.eval_spd_scorer import load_questions, parse
from scripts.spd_evaluation.measures import mean_and_error
from scripts.spd_evaluation.pool import Job, Run
from scripts.spd_evaluation.worker import Worker

DEMO = ROOT / "outputs" / "spd_arithmetic"
GAMMAS = (4, 8, 16)
QUESTIONS, TIMED = 400, 12


class Clock:
    """Seconds of each forward of a module, or of each call of a function."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def watch(self, module: torch.nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        """Time the module's forwards until the handles are removed."""
        return [module.register_forward_pre_hook(self._begin), module.register_forward_hook(self._end)]

    def _begin(self, *_: object) -> None:
        self._begun = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self._begun)

    def timed(self, function: Callable[[Block], torch.Tensor]) -> Callable[[Block], torch.Tensor]:
        """The same function."""

        def call(block: Block) -> torch.Tensor:
            self._begin()
            result = function(block)
            self._end()
            return result

        return call

    @property
    def median(self) -> float:
        """Of all calls, in seconds."""
        return statistics.median(self.seconds)


def costs(worker: Worker, gamma: int, threshold: float, prompts: list[list[int]]) -> dict[str, float]:
    """v, c and j: verification, draft step and judgement over a forward of one token, medians at batch size 1."""
    clocks = {name: Clock() for name in ("single", "verify", "draft", "judge")}
    common = {"max_new_tokens": LIMIT, "eos_token_id": worker.eos, "batch_size": 1}
    handles = clocks["single"].watch(worker.target)
    greedy_generate(worker.target, prompts, **common)
    for handle in handles:
        handle.remove()
    handles = [*clocks["verify"].watch(worker.target), *clocks["draft"].watch(worker.draft)]
    judge = clocks["judge"].timed(worker.judges["scorer"](threshold))
    speculative_generate(worker.target, worker.draft, prompts, judge, gamma=gamma, **common)
    for handle in handles:
        handle.remove()
    single = clocks["single"].median
    return {name: clocks[name].median / single for name in ("verify", "draft", "judge")}


def run() -> list[Row]:
    """For each gamma and rule the tokens per forward and the modelled speed over plain decoding; of the scorer also the
    drop, paired with exact match on the same questions, with its 95 % interval.
    """
    evaluation = DEMO / "target" / "validation.json"
    if not evaluation.exists():
        sys.exit(f"{evaluation} is not there: `make demo` makes the scorer that this benchmark measures")
    threshold = json.loads(evaluation.read_text())["chosen"]
    bed, rows = DEMO / "testbed", []
    for gamma in GAMMAS:
        args = parse([
            "--target", str(bed / "target"), "--draft", str(bed / "draft"), "--out", str(DEMO),
            "--scorer", str(saved_scorer(DEMO / "target" / "run", STEPS)), "--gamma", str(gamma),
            "--questions", str(bed / "questions_test.jsonl"), "--val-questions", str(bed / "questions_val.jsonl"),
            "--harm-labels", str(bed / "harm_labels.jsonl"), "--max-new-tokens", str(LIMIT),
        ])  # fmt: skip
        questions = load_questions(args.questions, QUESTIONS)
        worker = Worker(Job(args, {"test": questions}, [], []), Value("q", 0))
        ratios = costs(worker, gamma, threshold, [q["prompt_ids"] for q in questions[:TIMED]])
        say(f"gamma {gamma}: " + ", ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
        rows += [Row(f"gamma{gamma}_{name}_cost", value, "of a target forward of one token", value, value, 1)
                 for name, value in ratios.items()]
        outcomes = {rule: worker.decode(Run("test", rule, threshold)) for rule in ("exact", "scorer")}
        pairs = zip(outcomes["exact"].correct, outcomes["scorer"].correct, strict=True)
        drop, error = (100 * value for value in mean_and_error([int(exact) - int(ours) for exact, ours in pairs]))
        rows.append(Row(f"gamma{gamma}_scorer_drop", drop, "points", drop - 1.96 * error, drop + 1.96 * error, 1))
        for rule, judging in (("exact", 0.0), ("scorer", ratios["judge"])):
            outcome = outcomes[rule]
            tokens = sum(map(len, outcome.result.tokens)) / sum(outcome.result.rounds)
            accuracy = sum(outcome.correct) / len(outcome.correct)
            modelled = tokens / (ratios["verify"] + gamma * ratios["draft"] + judging)
            for name, value, unit in (
                ("tokens", tokens, "per target forward"),
                ("accuracy", 100 * accuracy, "%"),
                ("speed", modelled, "times plain decoding, by the model"),
            ):
                rows.append(Row(f"gamma{gamma}_{rule}_{name}", value, unit, value, value, 1))
    return rows
