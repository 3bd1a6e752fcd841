"""The commands that the SPD demo and frontier would run: each is read by the entry it names.

Not covered: that they train and evaluate well (make demo shows it), and the test bed's content (test_testbed.py).
"""

import itertools
from pathlib import Path

import pytest

import train_spd_scorer as entry
from examples.spd_arithmetic import demo, frontier, prepare_blocks
from examples.spd_arithmetic.train_pair import DEFAULTS
from scripts import eval_spd_scorer
from tests.helpers.configs import compose_ppo

RECIPE = Path(entry.__file__).parent / "recipe" / "spd" / "config"


def trained_config(command):
    """The config that a training command gives the trainer, and its options."""
    assert command[1] == "train_spd_scorer.py"
    args = entry.parse_args(command[2:])
    data = entry.PreparedData(Path("t.parquet"), rows=384, skipped_matches=0, longest_input=64, gamma=8)
    overrides = entry.training_overrides(args, data, data if args.val_blocks else None)
    return compose_ppo(*overrides, config_dir=RECIPE, config_name="spd_trainer"), args


def evaluated(command):
    assert command[1] == "scripts/eval_spd_scorer.py"
    return eval_spd_scorer.parse(command[2:])


@pytest.mark.parametrize("backbone", ["target", "own"])
def test_the_phases_of_the_demo_hand_on_what_the_one_before_leaves(tmp_path, backbone):
    args = demo.parse_arguments(["--backbone", backbone, "--out", str(tmp_path), "--questions", "50", "--seed", "3"])
    phases = demo.commands(args)
    made = prepare_blocks.parse_arguments(phases["test bed"][3:])
    config, trained = trained_config(phases["training"])
    judged = evaluated(phases["evaluation"])
    assert (made.seed, made.n_test_questions, config.data.seed, config.spd.seed) == (3, 50, 3, 3)
    assert trained.blocks == str(made.out / "blocks_train.parquet")
    assert judged.questions == made.out / "questions_test.jsonl" != judged.val_questions
    last = f"global_step_{config.trainer.total_training_steps}"
    assert judged.scorer == str(Path(config.trainer.default_local_dir) / last / "actor" / "huggingface")
    assert config.trainer.save_freq == config.trainer.total_training_steps
    assert config.actor_rollout_ref.model.path == str(judged.target) == str(made.out / "target")
    assert config.spd.backbone == backbone and config.spd.head_inputs == ("pair" if backbone == "own" else "state")
    assert config.actor_rollout_ref.model.lora_rank == (16 if backbone == "own" else 0)
    assert made.max_new_tokens == config.spd.rollout.max_tokens == judged.max_new_tokens


@pytest.mark.parametrize("seed", [0, 2])
def test_the_frontier_sweeps_every_rule_on_a_test_bed_of_its_own(tmp_path, seed):
    phases = frontier.commands(70, seed, tmp_path)
    made = prepare_blocks.parse_arguments(phases["test bed"][3:])
    assert (made.seed, made.softness, made.n_test_questions) == (seed, DEFAULTS["softness"], 70)
    written = dict(itertools.pairwise(phases["test bed"]))  # every setting, so that a changed default is noticed
    for name, value in DEFAULTS.items():
        assert written[f"--{name.replace('_', '-')}"] == str(value)
    config, trained = trained_config(phases["training"])
    assert (config.data.seed, config.trainer.total_training_steps) == (seed, demo.STEPS)
    judged = evaluated(phases["evaluation"])
    assert judged.all_rules and judged.margins == [4.0, 6.0, 7.0, 8.0] and judged.ranks == [2, 3]
    assert judged.harmless_shares == [float(share) for share in frontier.HARMLESS_SHARES]
    assert set(judged.scorers) == set(frontier.SCORERS)
    budgeted, supervised = trained_config([*phases["supervised"], "--label-budget", "5"])
    assert supervised.supervised and supervised.label_budget == 5
    refined, _ = trained_config(phases["refined"])
    stores = {each.spd.rollout.store_path for each in (config, budgeted, refined)}
    assert len(stores) == 1 and refined.spd.adapter_path == judged.scorers["supervised"]
    assert budgeted.trainer.total_training_steps == demo.STEPS
    assert Path(judged.scorer).is_relative_to(config.trainer.default_local_dir)
