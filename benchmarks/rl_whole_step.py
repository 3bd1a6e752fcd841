"""Whole GRPO steps in steady state, ours with vLLM in the rank's process, or as TRL's with transformers' generation."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import pandas as pd
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.harness import Row, ratios, row, run_alone, say
from examples.demo_runner import python

WORDS, PROMPTS, SAMPLES = 64, 8, 8
ON_RANKS = ("generate_sequences", "compute_log_prob", "update_actor")  # the workers' methods of a step
WARM_UP, STEPS, TURNS = 3, 10, 2  # steps left out, steps in all of a turn, turns of each trainer


@dataclass(frozen=True)
class Case:
    """Prompt tokens, limit of an answer, whether answers run to it (else one in 64 tokens ends them), our rollout."""

    name: str
    prompt: int
    limit: int
    to_the_limit: bool
    rollout: str = "vllm"


@dataclass
class Steps:
    """Of each step: seconds, mean tokens of an answer, and (ours) the seconds in which no worker worked."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    driver: list[float] = field(default_factory=list)

    def behind_warm_up(self) -> Steps:
        """Without the first WARM_UP."""
        return Steps(self.seconds[WARM_UP:], self.tokens[WARM_UP:], self.driver[WARM_UP:])

    def __add__(self, more: Steps) -> Steps:
        return Steps(self.seconds + more.seconds, self.tokens + more.tokens, self.driver + more.driver)


CASES = (
    Case("short", 10, 64, True),
    Case("long", 256, 256, False),
    Case("short_hf", 10, 64, True, rollout="hf"),
)


def make(folder: Path, case: Case) -> None:
    """model/ (4 layers, width 128, every word about as likely as any other) and prompts.parquet."""
    torch.manual_seed(0)
    words = ["<pad>", "<end>", *(f"w{i}" for i in range(WORDS - 2))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="w0")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=1e-3)
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    rng = random.Random(0)
    texts = [" ".join(rng.choices(words[2:], k=case.prompt)) for _ in range(PROMPTS * (STEPS + 2))]
    rows = [
        {"data_source": "words", "prompt": [{"role": "user", "content": text}],
         "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": i}}
        for i, text in enumerate(texts)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    words = solution_str.split()\n"
        "    return len(set(words)) / (1 + len(words))\n"
    )


def ours(folder: Path, case: Case, turn: int) -> Steps:
    """Steps of `python -m verl.trainer.main_ppo`."""
    run, timeline = folder / f"ours{turn}", folder / f"timeline{turn}.json"
    settings = {
        "algorithm.adv_estimator": "grpo", "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet", "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": case.prompt, "data.max_response_length": case.limit, "data.dataloader_num_workers": 0,
        "custom_reward_function.path": folder / "reward.py", "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.rollout.name": case.rollout,
        "actor_rollout_ref.rollout.n": SAMPLES, "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.ignore_eos": str(case.to_the_limit).lower(),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": PROMPTS * SAMPLES,
        "actor_rollout_ref.actor.share_prompt_forward": "true", "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.optim.lr": "1e-6", "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": PROMPTS * SAMPLES,
        "trainer.device": "cpu", "trainer.n_gpus_per_node": 1, "trainer.total_training_steps": STEPS,
        "trainer.total_epochs": 10, "trainer.val_before_train": "false", "trainer.save_freq": -1,
        "trainer.default_local_dir": run, "trainer.logger": "[]", "trainer.report": "false",
        "ray_kwargs.timeline_json_file": timeline,
    }  # fmt: skip
    run_alone(python("verl.trainer.main_ppo", *(f"{k}={v}" for k, v in settings.items())), folder / f"ours{turn}.log")
    lines = [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line]
    seconds, tokens = ([line[key] for line in steps] for key in ("timing_s/step", "response_length/mean"))
    worked = work_of_steps(json.loads(timeline.read_text()), len(steps))
    return Steps(seconds, tokens, [step - work for step, work in zip(seconds, worked, strict=True)])


def work_of_steps(events: list[dict], steps: int) -> list[float]:
    """Seconds that the one rank spent in the methods of each step, from Ray's timeline (microseconds)."""
    worked = [0.0] * steps
    for method in ON_RANKS:
        calls = sorted((event["ts"], event["dur"]) for event in events if event["name"] == method)
        if calls and len(calls) != steps:
            raise RuntimeError(f"Ray's timeline has {len(calls)} calls of {method} for {steps} steps")
        for i, (_, microseconds) in enumerate(calls):
            worked[i] += microseconds / 1e6
    return worked


def trl(folder: Path, case: Case, turn: int) -> Steps:
    """Steps of TRL's GRPOTrainer, which has no driver."""
    out = folder / f"trl{turn}.json"
    command = python("benchmarks.trl_steps", folder, "--out", out, "--steps", STEPS, "--prompts", PROMPTS,
                     "--samples", SAMPLES, "--limit", case.limit, *(["--to-the-limit"] if case.to_the_limit else []))
    run_alone(command, out.with_suffix(".log"))
    return Steps(**json.loads(out.read_text()))


def compare(case: Case) -> tuple[list[Row], list[float]]:
    """Rows of both trainers in turn, and the driver's seconds of our steps.

    The ratio is that of the median steps; its range is that of the turns.
    """
    kept, medians = {"trl": Steps(), "ours": Steps()}, {"trl": [], "ours": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, case)
        for turn in range(TURNS):
            for trainer, work in (("trl", trl), ("ours", ours)):
                steps = work(folder, case, turn).behind_warm_up()
                kept[trainer] += steps
                medians[trainer].append(median(steps.seconds))
                say(f"{case.name}, {trainer}, turn {turn}: {medians[trainer][-1]:.2f} s a step, "
                    f"answers of {mean(steps.tokens):.1f} tokens on average")  # fmt: skip
    by_turn = ratios(medians["trl"], medians["ours"])
    speed = Row(f"grpo_step_vs_trl_{case.name}", median(kept["trl"].seconds) / median(kept["ours"].seconds),
                "times, TRL / ours", min(by_turn), max(by_turn), TURNS)  # fmt: skip
    rows = [speed]
    for trainer, steps in kept.items():
        rows.append(row(f"grpo_step_{trainer}_{case.name}", steps.seconds, "s"))
        tokens = row(f"grpo_answer_tokens_{trainer}_{case.name}", steps.tokens, "tokens, mean of the steps")
        tokens.value = mean(steps.tokens)
        rows.append(tokens)
    return rows, kept["ours"].driver


def run() -> list[Row]:
    """All rows."""
    rows, driver = [], []
    for case in CASES:
        compared, seconds = compare(case)
        rows += [*compared, row(f"driver_seconds_per_step_{case.name}", seconds, "s, without the workers' work")]
        driver += seconds
    return [*rows, row("driver_seconds_per_step", driver, "s, without the workers' work, all cases")]
