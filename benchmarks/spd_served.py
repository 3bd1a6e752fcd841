"""The scorer in vLLM's speculative decoding, and refined models as their own drafter: speed, accuracy, same tokens.

Pieces that were measured before (outputs/benchmarks/spd_served/PIECE.json) are taken from there, which is logged; one
alone: `python -m benchmarks.spd_served PIECE`.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, commit, ratios, row, say
from benchmarks.served_engine import EngineProcess, Generated
from dllm_reasoning.inference.settings import self_draft_options
from examples.demo_runner import ROOT
from examples.spd_arithmetic import deepen
from examples.spd_arithmetic.demo import LIMIT, STEPS, saved_scorer
from examples.spd_arithmetic.serving import Question, accuracy, choose_threshold, read_questions
from recipe.spd.vllm_plugin import engine_options

OUT = ROOT / "outputs" / "benchmarks" / "spd_served"
DEMO = Path(os.environ.get("SPD_DEMO", ROOT / "outputs" / "spd_arithmetic"))  # what `make demo` leaves
REFINED = Path(os.environ.get("DLLM_MODEL", ROOT / "outputs" / "dllm" / "refined"))  # what `make demo-dllm` leaves
GAMMAS, GAMMA = (4, 6, 8), 8  # draft tokens of a forward: of the speeds, and of everything else
THRESHOLDS = (-1.0, 0.0, 1.0)
CANDIDATES = tuple(0.25 * k for k in range(9))
CHOSEN_AT = (1, 3, 5)  # offsets of the first block at which validation questions choose among them
REPETITIONS = 5
ALONE, TOGETHER = 24, 48  # questions of a repetition, one at a time and 16 at a time
OFFSETS = range(6)
FEW = 60  # questions of each set-up
SAME = 200  # questions of the refined model's comparison


def scorer() -> str:
    """The demo's scorer."""
    return str(saved_scorer(DEMO / "target" / "run", STEPS))


def questions(split: str) -> list[Question]:
    """Questions of the demo's test bed."""
    return read_questions(DEMO / "testbed" / f"questions_{split}.jsonl")


class Engines:
    """Engines by name, started together and ended together."""

    def __init__(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        self.options = options

    def __enter__(self) -> dict[str, EngineProcess]:
        self._stack = ExitStack()
        started = {name: EngineProcess(dict(o), OUT / f"{name}.log") for name, o in self.options.items()}
        for engine in started.values():
            self._stack.callback(engine.close)
        return {name: engine.wait() for name, engine in started.items()}

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def exact_options(target: str, gamma: int) -> dict[str, Any]:
    """vLLM's own speculation, without the plugin."""
    draft = str(DEMO / "testbed" / "draft")
    return {"model": target, "speculative_config": {"method": "draft_model", "model": draft,
                                                    "num_speculative_tokens": gamma}}  # fmt: skip


def scorer_options(target: str, gamma: int = GAMMA, threshold: float = 1.0, **more: Any) -> dict[str, Any]:
    """The same with the scorer."""
    return engine_options(
        target, scorer(), draft=str(DEMO / "testbed" / "draft"), threshold=threshold, gamma=gamma, **more
    )


def all_options(target: str, **more: Any) -> dict[str, dict[str, Any]]:
    """Plain decoding, and exact and judged acceptance with each of GAMMAS, at the threshold chosen for accuracy."""
    more["threshold"] = next(r.value for r in measure("accuracy") if r.name == "served_threshold")
    exact = {f"exact{g}": exact_options(target, g) for g in GAMMAS}
    judged = {f"scorer{g}": scorer_options(target, g, **more) for g in GAMMAS}
    return {"greedy": {"model": target}, **exact, **judged}


def alternating(ways: Mapping[str, Callable[[], Generated]]) -> dict[str, list[Generated]]:
    """Each way in turn, REPETITIONS times after an untimed round."""
    results: dict[str, list[Generated]] = {name: [] for name in ways}
    for repetition in range(REPETITIONS + 1):
        for name, work in ways.items():
            made = work()
            if repetition:
                results[name].append(made)
    return results


def speeds(results: Mapping[str, Sequence[Generated]]) -> dict[str, list[float]]:
    """Tokens per CPU second of each repetition."""
    return {name: [made.speed for made in repetitions] for name, repetitions in results.items()}


def fastest(kind: str, speed: Mapping[str, list[float]]) -> str:
    """The engine of a kind ("exact", "scorer") whose gamma gives the highest median."""
    return max((f"{kind}{g}" for g in GAMMAS), key=lambda name: statistics.median(speed[name]))


def ratio_rows(speed: Mapping[str, list[float]], batch: int, suffix: str) -> list[Row]:
    """The scorer over plain and over exact decoding, the two at their best gamma, and the speed of each engine."""
    exact, judged = fastest("exact", speed), fastest("scorer", speed)
    greedy = ratios(speed[judged], speed["greedy"])
    return [
        row(f"served_scorer_over_greedy{suffix}", greedy, f"times, {judged}"),
        row(f"served_scorer_over_exact{suffix}", ratios(speed[judged], speed[exact]), f"times, {judged} / {exact}"),
        *(row(f"served_{name}{suffix}", values, f"tokens per CPU second, batch {batch}")
          for name, values in speed.items()),
    ]  # fmt: skip


def speed_rows() -> list[Row]:
    """Plain, exact and judged decoding of the demo's target, deepened to 66 million parameters, batch 1 and 16."""
    target = OUT / "deepened"
    if not (target / "config.json").exists():
        deepen.main(["--model", str(DEMO / "testbed" / "target"), "--out", str(target)])
    asked = [q.prompt_ids for q in questions("test")]
    rows = []
    with Engines(all_options(str(target), allow_foreign_target=True)) as engines:
        for batch, count, suffix in ((1, ALONE, ""), (16, TOGETHER, "_16")):
            results = alternating(
                {name: lambda e=e, n=count, b=batch: e.generate(asked[:n], b) for name, e in engines.items()}
            )
            speed = speeds(results)
            rows += ratio_rows(speed, batch, suffix)
            if batch == 1:
                shares = [made.judging / made.cpu for made in results[fastest("scorer", speed)]]
                rows.append(row("judge_share", shares, "of the CPU time, batch 1"))
    return rows


def demo_rows() -> list[Row]:
    """The same on the demo's target as it is, which is hardly dearer than its draft; batch 1."""
    target = str(DEMO / "testbed" / "target")
    asked = [q.prompt_ids for q in questions("test")[:ALONE]]
    with Engines(all_options(target)) as engines:
        speed = speeds(alternating({name: lambda e=e: e.generate(asked, 1) for name, e in engines.items()}))
    return ratio_rows(speed, 1, "_demo")


def accuracy_rows() -> list[Row]:
    """Accuracy of the demo's target in vLLM at a threshold chosen there on validation questions, over block offsets."""
    target = str(DEMO / "testbed" / "target")
    validation, test = questions("val"), questions("test")
    judged = {f"scorer{g}": scorer_options(target, g) for g in GAMMAS}
    with Engines({"greedy": {"model": target}, **judged}) as engines:
        plain = engines["greedy"]

        def right(asked: list[Question], begun: list[list[int]], gamma: int = GAMMA, **xargs: float) -> float:
            prompts = [q.prompt_ids + ids for q, ids in zip(asked, begun, strict=True)]
            made = engines[f"scorer{gamma}"].generate(prompts, 16, max_tokens=LIMIT, **xargs).tokens
            return accuracy(target, asked, [a + b for a, b in zip(begun, made, strict=True)])

        own = plain.generate([q.prompt_ids for q in validation], 16, max_tokens=LIMIT).tokens

        def mean_right(**xargs: float) -> float:
            begun = [[ids[: offset - 1] for ids in own] for offset in CHOSEN_AT]
            return statistics.fmean(right(validation, ids, **xargs) for ids in begun)

        threshold = choose_threshold(mean_right(spd=0), {t: mean_right(spd_threshold=t) for t in CANDIDATES})
        own = plain.generate([q.prompt_ids for q in test], 16, max_tokens=LIMIT).tokens
        base = accuracy(target, test, own)
        drops = [
            # vLLM's prefill emits one token of the target before the first block.
            100 * (base - right(test, [ids[: offset - 1] for ids in own], spd_threshold=threshold))
            for offset in OFFSETS
            if offset
        ]
        nothing = [[] for _ in test]
        exact = right(test, nothing, spd=0)
        by_gamma = {g: 100 * (base - right(test, nothing, g, spd_threshold=threshold)) for g in GAMMAS}
    drops.insert(0, 100 * (base - decoder_accuracy(target, test, threshold)))
    return [
        row("served_drop_points", [max(by_gamma.values())], f"points, {len(test)} questions, worst gamma"),
        *(row(f"served_drop_points_gamma{g}", [drop], "points") for g, drop in by_gamma.items()),
        row("served_drop_offsets_max", [max(drops)], "points, worst of block offsets 0 to 5"),
        *(row(f"served_drop_offset_{o}", [drop], "points") for o, drop in zip(OFFSETS, drops, strict=True)),
        row("served_threshold", [threshold], "chosen in vLLM on validation questions"),
        row("served_accuracy_greedy", [100 * base], "%"),
        row("served_accuracy_exact", [100 * exact], "%"),
    ]


def decoder_tokens(target: str, prompts: list[list[int]], threshold: float) -> list[list[int]]:
    """Answers by the recipe's own decoder."""
    import torch
    from transformers import AutoModelForCausalLM

    from recipe.spd.rollout.decoder import speculative_generate
    from scripts.spd_evaluation import rules
    from spd_scorer import AutoModelForSPDScoring

    torch.set_num_threads(1)
    model, draft = (
        AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (target, DEMO / "testbed" / "draft")
    )
    judge = rules.scorer(AutoModelForSPDScoring.from_pretrained(scorer(), target, model), threshold)
    return speculative_generate(
        model, draft, prompts, judge, gamma=GAMMA, max_new_tokens=LIMIT, batch_size=200,
        eos_token_id=model.generation_config.eos_token_id,
    ).tokens  # fmt: skip


def decoder_accuracy(target: str, asked: list[Question], threshold: float) -> float:
    """Accuracy where blocks start right after the prompt, which vLLM never does."""
    return accuracy(target, asked, decoder_tokens(target, [q.prompt_ids for q in asked], threshold))


def same_rows() -> list[Row]:
    """Share of greedy answers that equal the recipe's own decoder, which starts after the target's first token."""
    target = str(DEMO / "testbed" / "target")
    prompts = [q.prompt_ids for q in questions("test")]
    with Engines({"scorer": scorer_options(target)}) as engines:
        first = [ids[:1] for ids in engines["scorer"].generate(prompts, 16, max_tokens=1).tokens]
        begun = [p + f for p, f in zip(prompts, first, strict=True)]
        same = []
        for threshold in THRESHOLDS:
            served = engines["scorer"].generate(prompts, 16, max_tokens=LIMIT, spd_threshold=threshold).tokens
            rest = decoder_tokens(target, begun, threshold)
            expected = [(f + r)[:LIMIT] for f, r in zip(first, rest, strict=True)]
            same.append(sum(a == b for a, b in zip(served, expected, strict=True)) / len(prompts))
    return [row("served_same_tokens", [min(same)], f"share of {len(prompts)} questions, least of three thresholds")]


def variant_rows() -> list[Row]:
    """The same answers from engines set up otherwise, and with mixed thresholds in one batch."""
    target = str(DEMO / "testbed" / "target")
    prompts = [q.prompt_ids for q in questions("test")[:FEW]]
    variants = {
        "prefix cache": {"enable_prefix_caching": True}, "chunked prefill": {"max_num_batched_tokens": 192},
        "compiled": {"enforce_eager": False}, "two tensor-parallel ranks": {"tensor_parallel_size": 2},
    }  # fmt: skip
    options = {"as above": scorer_options(target), **{n: scorer_options(target, **v) for n, v in variants.items()}}
    same = {}
    for name, chosen in options.items():
        with Engines({name.replace(" ", "_"): chosen}) as engines:
            (engine,) = engines.values()
            made = [engine.generate(prompts, 16, max_tokens=LIMIT, spd_threshold=t).tokens for t in THRESHOLDS]
            if name == "as above":
                expected = made
                cycle = [THRESHOLDS[i % len(THRESHOLDS)] for i in range(FEW)]
                mixed = engine.generate(prompts, 16, max_tokens=LIMIT, spd_threshold=cycle).tokens
                right = [expected[THRESHOLDS.index(t)][i] for i, t in enumerate(cycle)]
                same["mixed"] = sum(a == b for a, b in zip(mixed, right, strict=True)) / FEW
            elif name == "prefix cache":  # the answers of the first pass are cached prefixes now
                made = [engine.generate(prompts, 16, max_tokens=LIMIT, spd_threshold=t).tokens for t in THRESHOLDS]
        pairs = [(a, b) for t, u in zip(made, expected, strict=True) for a, b in zip(t, u, strict=True)]
        same[name] = sum(a == b for a, b in pairs) / len(pairs)
    say(", ".join(f"{name} {share:.3f}" for name, share in same.items()))
    unit = f"share of {FEW} questions and three thresholds, worst of {len(same)} set-ups"
    return [row("served_same_tokens_variants", [min(same.values())], unit)]


def refined_rows() -> list[Row]:
    """A refined model as its own drafter, the demo's as it is: batch 1 and 16, and the tokens against plain."""
    from transformers import AutoTokenizer

    from examples.dllm_arithmetic.corpus import draw

    tokenizer, model = AutoTokenizer.from_pretrained(REFINED), str(REFINED)
    texts = draw({"train": 0, "val": 0, "test": SAME}, seed=99)["test"]["instruction"]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    modes = ("slide", "verify", "auto")
    options = {"greedy": {"model": model}, **{mode: self_draft_options(model, mode=mode) for mode in modes}}
    rows = []
    with Engines(options) as engines:
        for batch, count, suffix in ((1, ALONE, ""), (16, 2 * TOGETHER, "_16")):
            speed = speeds(alternating(
                {name: lambda e=e, n=count, b=batch: e.generate(prompts[:n], b) for name, e in engines.items()}
            ))  # fmt: skip
            for mode in modes:
                name = f"served_refined_over_greedy{'' if mode == 'verify' else f'_{mode}'}{suffix}"
                rows.append(row(name, ratios(speed[mode], speed["greedy"]), f"times, {mode}"))
            rows.append(row(f"served_refined_greedy{suffix}", speed["greedy"], f"tokens per CPU second, batch {batch}"))
        own = engines["greedy"].generate(prompts, 16).tokens
        same = [sum(a == b for a, b in zip(engines[m].generate(prompts, 16).tokens, own, strict=True)) for m in modes]
    unit = f"share of {len(prompts)} questions, worst mode"
    return [*rows, row("served_refined_same_tokens", [min(same) / len(prompts)], unit)]


PIECES: dict[str, Callable[[], list[Row]]] = {
    "accuracy": accuracy_rows, "speed": speed_rows, "demo": demo_rows, "same": same_rows,
    "variants": variant_rows, "refined": refined_rows,
}  # fmt: skip


def measure(name: str) -> list[Row]:
    """The rows of a piece, measured here or before."""
    kept = OUT / f"{name}.json"
    if kept.exists():
        record = json.loads(kept.read_text())
        say(f"{name}: measured before, tree {record['tree']} (delete {kept} to measure it again)")
        return [Row(**values) for values in record["rows"]]
    say(PIECES[name].__doc__)
    rows = PIECES[name]()
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"tree": commit(), "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    return rows


def run() -> list[Row]:
    """All rows; pieces whose models are missing are left out, with a line that says so."""
    rows: list[Row] = []
    for name in PIECES:
        needed, command = (REFINED, "make demo-dllm") if name == "refined" else (Path(scorer()), "make demo")
        if needed.is_dir():
            rows += measure(name)
        else:
            say(f"{needed} is not there ({command} makes it): {name} is left out")
    return rows


if __name__ == "__main__":
    for piece in sys.argv[1:]:
        for r in measure(piece):
            print(f"{r.name:40} {r.value:10.4g}  {r.low:.4g} to {r.high:.4g}  {r.unit}")
