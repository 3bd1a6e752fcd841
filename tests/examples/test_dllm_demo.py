"""The dLLM demo's commands as their entries read them, its acceptance criteria, and held-out questions.

Not covered: the trained figures (`make demo-dllm` shows them).
"""

import json
import random
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from omegaconf.errors import OmegaConfBaseException

import dllm_reasoning.config
from dllm_reasoning.trainer.iterative_refine_trainer import IterativeRefineTrainer
from examples import demo_runner
from examples.dllm_arithmetic import acceptance, corpus, demo, evaluate, make_base
from tests.dllm_reasoning.models import tiny
from tests.helpers import configs
from verl.planning.sft import sft_entry
from verl.trainer.sft.trainer import FSDPSFTTrainer

REFINE = Path(dllm_reasoning.config.__file__).parent
ENTRIES = {
    "dllm_reasoning.train_iterative_refine": (IterativeRefineTrainer, REFINE, "iterative_refine"),
    "verl.trainer.fsdp_sft_trainer": (FSDPSFTTrainer, configs.CONFIG_DIR, "sft_trainer"),
}
ARGUMENTS = (Path("some/model"), Path("some/data"), Path("runs/here"), 50, 3)


def read(command):
    """The config of a training command, valid for its entry."""
    assert command[:2] == [sys.executable, "-m"]
    trainer, folder, name = ENTRIES[command[2]]
    config = configs.compose_ppo(*command[3:], config_dir=folder, config_name=name)
    assert [p for p in sft_entry(trainer, 1).problems(config)[0] if p.kind != "unused"] == []
    return config


def test_both_trainings_start_alike_and_differ_in_what_they_train():
    refine, twin = read(demo.refine_command(*ARGUMENTS)), read(demo.twin_command(*ARGUMENTS))
    for config in (refine, twin):
        assert config.model.partial_pretrain == "some/model" and config.data.train_files == "some/data/train.parquet"
        assert config.trainer.total_training_steps == 50 and config.trainer.seed == 3
        assert config.trainer.default_local_dir == "runs/here" and config.optim.optimizer == "MuonWithAdamW"
        assert (config.data.prompt_key, config.data.response_key) == ("instruction", "output")
    assert (refine.optim.lr, refine.data.train_batch_size) == (twin.optim.lr, twin.data.train_batch_size)
    settings = refine.iterative
    assert (settings.noise_pattern, settings.block_length, settings.windows_per_sample) == ("packed", 8, demo.WINDOWS)
    assert (settings.num_iterations, settings.single_round_steps, settings.noise_seed) == (demo.ROUNDS, 25, 3)
    with pytest.raises(OmegaConfBaseException, match="nose_pattern"):
        read(demo.refine_command(*ARGUMENTS, "iterative.nose_pattern=iid"))


def row(model, mode, accuracy, tokens_per_forward, same=1.0):
    return {"model": model, "mode": mode, "accuracy": accuracy, "tokens_per_forward": tokens_per_forward,
            "same_as_greedy": same}  # fmt: skip


def at_the_bounds():
    """An evaluation that reaches every minimum exactly."""
    refined = [("greedy", 0.75, 1.0), ("refine 1", 0.73, 3.5), ("converge", 0.75, 3.0), ("slide", 0.75, 3.5),
               ("verify", 0.75, 5.0), ("branch", 0.75, 3.0), ("branch 3", 0.75, 3.0)]  # fmt: skip
    twin = [("greedy", 0.77, 1.0), ("refine 1", 0.01, 3.0), ("converge", 0.77, 1.1), ("slide", 0.77, 1.2),
            ("verify", 0.77, 5 / 3), ("branch", 0.77, 1.0), ("branch 3", 0.77, 1.0)]  # fmt: skip
    rows = [row("refined", *values) for values in refined] + [row("twin", *values) for values in twin]
    return {"questions": 1000, "rows": rows, "cpu_seconds": {"refined": 300.0, "twin": 300.0},
            "greedy_refined_less_twin": {"difference": -2.0, "low": -3.0, "high": -1.0}}  # fmt: skip


def set_row(name, mode, key, value):
    def change(results):
        next(r for r in results["rows"] if (r["model"], r["mode"]) == (name, mode))[key] = value

    return change


def test_criteria_are_met_at_their_bounds():
    values = acceptance.criteria_of(at_the_bounds())
    assert values.keys() == acceptance.MINIMUM.keys()
    assert {name: value for name, (value, _) in acceptance.MINIMUM.items()} == pytest.approx(values)
    assert all(acceptance.is_met(name, value) for name, value in values.items())
    assert acceptance.criteria_table(values).row_count == len(acceptance.MINIMUM)


@pytest.mark.parametrize(("change", "missed"), [
    (lambda f: f.update(questions=999), {"questions"}),
    (lambda f: f["greedy_refined_less_twin"].update(difference=-2.1), {"greedy_gap"}),
    (set_row("refined", "slide", "tokens_per_forward", 3.4), {"slide_tokens_per_forward"}),
    (set_row("refined", "slide", "same_as_greedy", 0.999), {"slide_same_as_greedy"}),
    (set_row("refined", "verify", "tokens_per_forward", 4.9), {"verify_tokens_per_forward", "lossless_over_twin"}),
    (set_row("refined", "verify", "same_as_greedy", 0.999), {"verify_same_as_greedy", "lossless_over_twin"}),
    (set_row("twin", "slide", "tokens_per_forward", 1.7), {"lossless_over_twin"}),
    (set_row("refined", "refine 1", "tokens_per_forward", 3.4), {"refine_1_tokens_per_forward"}),
    (set_row("refined", "refine 1", "accuracy", 0.72), {"refine_1_gap"}),
    (lambda f: f["cpu_seconds"].update(twin=299.0), {"twin_cpu"}),
])  # fmt: skip
def test_a_criterion_is_missed_below_its_bound(change, missed):
    results = at_the_bounds()
    change(results)
    values = acceptance.criteria_of(results)
    assert {name for name, value in values.items() if not acceptance.is_met(name, value)} == missed


def trained(run, steps):
    (run / f"global_step_{steps}" / "huggingface").mkdir(parents=True)
    (run / "latest_checkpointed_iteration.txt").write_text(str(steps))
    rows = [{"step": s, "data": {"train/loss": 1.0 / s, "train/loss_s0": 2.0 / s}} for s in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_a_run_that_misses_a_criterion_reports_it_and_ends_with_0(tmp_path, monkeypatch, capsys):
    results = at_the_bounds()
    for r in results["rows"]:
        r.update(block=8, accuracy_se=0.01, tokens_per_second=100.0)

    def train(out, seed, steps, twin_steps, more):
        trained(out / "refinement", 2)
        trained(out / "twin", 3)
        return {"refined": 300.0, "twin": 240.0}

    monkeypatch.setattr(demo_runner.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(demo, "run_shown", lambda command: None)
    monkeypatch.setattr(demo, "refine_and_twin", train)
    monkeypatch.setattr(demo, "evaluate", lambda out, models, questions: results)
    assert demo.main(["--out", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("MISSED") == 1 and "The twin got less CPU time than the refined model" in shown
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written["criteria"]["twin_cpu"] == 0.8 and written["criteria"]["slide_tokens_per_forward"] == 3.5
    assert not any("less CPU" in line for line in demo.summary(at_the_bounds()))


def test_models_are_evaluated_in_parallel_and_timed_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "BLOCK", 4)
    monkeypatch.setattr(evaluate, "LIMIT", 12)
    model, tokenizer = tmp_path / "model", corpus.build_tokenizer()
    made = tiny("llama")
    made.resize_token_embeddings(len(tokenizer))
    made.config.eos_token_id = made.generation_config.eos_token_id = tokenizer.eos_token_id
    made.save_pretrained(model)
    tokenizer.save_pretrained(model)
    (tmp_path / "base").mkdir()
    corpus.write(corpus.draw({"test": 3}, 0), tmp_path / "base")
    in_parallel, threads = [], torch.get_num_threads()

    def run(jobs, env):
        in_parallel.append([command[command.index("--model") + 1].split("=")[0] for command, _ in jobs])
        for command, _ in jobs:
            evaluate.main(command[3:])

    monkeypatch.setattr(demo, "run_side_by_side", run)
    monkeypatch.setattr(demo, "run_logged", lambda command, log, env: run([(command, log)], env))
    results = demo.evaluate(tmp_path, {"refined": model, "twin": model}, 2)
    torch.set_num_threads(threads)
    assert in_parallel == [["refined", "twin"], ["refined"], ["twin"]]
    untimed = json.loads((tmp_path / "evaluation_twin.json").read_text())
    assert all("tokens_per_second" not in r for r in untimed["rows"])
    assert results["questions"] == 2 and len(results["rows"]) == len(evaluate.MODES) + len(demo.TWIN_MODES)
    speed = json.loads((tmp_path / "speed_twin.json").read_text())
    assert speed.keys() == set(demo.TWIN_MODES) and all(value > 0 for value in speed.values())
    assert {r["mode"]: r["tokens_per_second"] for r in results["rows"] if r["model"] == "twin"} == speed


def test_the_base_never_sees_a_held_out_question(tmp_path, monkeypatch):
    ids = corpus.vocabulary()
    free = random.Random(5)
    problems = [corpus.problems.sample_problem(free) for _ in range(40)]
    held_out = {corpus.instruction_of(p) for p in problems}
    rng = random.Random(5)
    assert make_base.draw_row(random.Random(5), ids, frozenset())[0][0] == ids[problems[0].name]
    expected = make_base.draw_row(free, ids, held_out)
    assert make_base.draw_row(rng, ids, held_out) == expected  # the 40 are skipped

    kept = []
    monkeypatch.setattr(corpus, "COUNTS", {"train": 8, "val": 3, "test": 5})
    monkeypatch.setattr(make_base, "write_base", lambda folder, seed, steps, out, *_: kept.append(out))
    make_base.main(["--out", str(tmp_path), "--seed", "2", "--steps", "1"])
    tables = {split: pd.read_parquet(tmp_path / f"{split}.parquet") for split in corpus.COUNTS}
    assert kept == [{*tables["val"]["instruction"], *tables["test"]["instruction"]}] and len(kept[0]) == 8
    assert kept[0].isdisjoint(tables["train"]["instruction"])
