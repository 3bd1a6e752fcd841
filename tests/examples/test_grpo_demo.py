"""The GRPO demo's commands as their entries read them, and its acceptance criteria. Nothing is trained.

Not covered: the trained figures (`make demo-grpo` shows them).
"""

import json
import sys
from pathlib import Path

import pytest

from examples import demo_runner
from examples.demo_runner import ROOT
from examples.grpo_arithmetic import demo, make_start
from examples.grpo_arithmetic.acceptance import criteria_of, has_learned
from tests.helpers.configs import compose_ppo
from verl.config.roles import need_critic, reads_reference
from verl.utils.config import validate_config
from verl.utils.import_utils import load_extern_object


def trained_config(command):
    """The config of a training command, valid for the trainer."""
    assert command[:3] == [sys.executable, "-m", "verl.trainer.main_ppo"]
    config = compose_ppo(*command[3:])
    validate_config(config, use_reference_policy=reads_reference(config), use_critic=need_critic(config))
    return config


def test_the_phases_hand_on_what_the_one_before_leaves(tmp_path):
    args = demo.parse(["--out", str(tmp_path), "--seed", "3", "--steps", "10", "--sft-steps", "7"])
    phases = demo.commands(args)
    assert phases.keys() <= demo.BUDGET_S.keys() and sum(demo.BUDGET_S[name] for name in phases) < 720
    assert phases["start"][:3] == [sys.executable, "-m", "examples.grpo_arithmetic.make_start"]
    made = make_start.parse(phases["start"][3:])
    assert (made.seed, made.sft_steps) == (3, 7)
    run, control = (trained_config(phases[name]) for name in ("GRPO", "control"))
    for config in (run, control):
        assert config.data.train_files == str(made.out / "train.parquet")
        assert config.actor_rollout_ref.model.path == str(made.out / "model")
        assert (config.data.seed, config.actor_rollout_ref.rollout.name) == (3, "vllm")
        assert config.trainer.val_before_train and not config.actor_rollout_ref.rollout.val_kwargs.do_sample
        score = load_extern_object(str(ROOT / config.custom_reward_function.path), "compute_score")
        assert score(make_start.DATA_SOURCE, "the answer is 7", "7")["acc"] == 1.0
    assert Path(run.trainer.default_local_dir) == tmp_path / "run"
    assert (run.trainer.total_training_steps, control.trainer.total_training_steps) == (10, demo.CONTROL_STEPS)
    # The control is the same run without learning, and as short as its name says.
    control.actor_rollout_ref.actor.optim.lr = run.actor_rollout_ref.actor.optim.lr
    for key in ("total_training_steps", "test_freq", "save_freq", "default_local_dir", "experiment_name"):
        control.trainer[key] = run.trainer[key]
    assert control == run and trained_config(phases["control"]).actor_rollout_ref.actor.optim.lr == 0


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0.4, 0.6, True), (0.4, 0.59, False), (0.8, 0.901, True), (0.8, 0.9, False), (0.0, 0.0, False)],
)
def test_learning_is_a_gain_of_half_or_an_end_above_ninety_per_cent(start, end, expected):
    assert has_learned(start, end) == expected


def test_each_criterion_can_be_missed():
    def met(trained, control=0.4, seconds=719.0):
        criteria = criteria_of({0: 0.4, 60: trained}, {0: 0.4, 8: control}, seconds)
        return [criterion.met for criterion in criteria.values()]

    assert met(0.6) == [True, True, True]
    assert met(0.5) == [False, True, True]
    assert met(0.6, control=0.6) == [True, False, True]
    assert met(0.6, seconds=720.0) == [True, True, False]


def trainings(monkeypatch, accuracies):
    """Leaves the metrics of a training with these accuracies, by the name of its folder, in assets of running it."""
    monkeypatch.setattr(demo_runner.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(demo, "run_shown", lambda command: None)

    def train(name, command, run, steps, describe):
        run.mkdir(parents=True)
        rows = [{"step": step, "data": {demo.ACCURACY: value}} for step, value in accuracies[run.name].items()]
        rows.append({"step": steps, "data": {"critic/score/mean": 0.5, "response_length/mean": 20.0}})
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(demo, "train", train)


def test_a_run_that_misses_a_criterion_reports_it_and_ends_with_0(tmp_path, monkeypatch, capsys):
    trainings(monkeypatch, {"run": {0: 0.4, 60: 0.5}, "control": {0: 0.4, 8: 0.4}})
    assert demo.main(["--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("MISSED") == 1 and shown.count(": met") == 2 and "8 of 60 steps" in shown
    written = json.loads((tmp_path / "result.json").read_text())
    assert {name: criterion["met"] for name, criterion in written["criteria"].items()} == {
        "learned": False, "over_control": True, "seconds": True,
    }  # fmt: skip


def test_a_phase_that_fails_ends_with_1(tmp_path, monkeypatch, capsys):
    def fail(command):
        raise demo_runner.PhaseFailed("it [broke]")

    monkeypatch.setattr(demo_runner.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(demo, "run_shown", fail)
    assert demo.main(["--out", str(tmp_path)]) == 1
    assert "it [broke]" in capsys.readouterr().out and not (tmp_path / "result.json").exists()
