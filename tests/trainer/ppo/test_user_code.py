"""Users' rewards, losses and rollouts: an error names function, file and line; a loss reads further columns."""

import importlib
import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.helpers.columns import object_columns
from tests.helpers.rl_run import compose_run, keep_batches, metrics_rows
from verl.algos.policy_loss import LOSS_COLUMNS
from verl.protocol import DataProto
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.batching import add_loss_columns
from verl.trainer.run.ray_session import run_here

MODULE = '''
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.rollout.base import BaseRollout, register_rollout


@register_policy_loss("raises_{n}")
def raises(old_log_prob, log_prob, advantages, response_mask, **kwargs):
    return log_prob / 0 + undefined_name


@register_policy_loss("no_metrics_{n}")
def no_metrics(old_log_prob, log_prob, advantages, response_mask, **kwargs):
    return log_prob.mean()


@register_rollout("a_dict_{n}")
class Rollout(BaseRollout):
    keeps_weights = True

    def update_weights(self, weights, **kwargs):
        list(weights)

    def resume(self, tags): ...

    def release(self): ...

    def generate_sequences(self, prompts):
        return {{"responses": prompts.batch["input_ids"]}}


@register_rollout("few_columns_{n}")
class FewColumns(Rollout):
    def generate_sequences(self, prompts):
        return prompts.select(batch_keys=["input_ids", "attention_mask"], non_tensor_batch_keys=[])


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1 / 0
'''
ACTOR, ROLLOUT = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
numbers = itertools.count()  # names can be registered once


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {f"{ACTOR}policy_loss__loss_mode": "raises_{n}"},
            ["step 'update_actor' of global step 1 failed: NameError: name 'undefined_name'", "{file}:8, in raises"],
        ),
        (
            {f"{ACTOR}policy_loss__loss_mode": "no_metrics_{n}"},
            ["policy loss no_metrics ({file}:11) returned a tensor of shape (); expected (loss, metrics)"],
        ),
        (
            {f"{ROLLOUT}name": "a_dict_{n}"},
            ["Rollout.generate_sequences ({file}:27) returned a dict; expected a DataProto"],
        ),
        (
            {f"{ROLLOUT}name": "few_columns_{n}"},
            ["FewColumns.generate_sequences ({file}:33) returned samples without position_ids, prompts, responses"],
        ),
        (
            {"custom_reward_function__path": "{file}"},
            ["reward function compute_score ({file}:37) raised ZeroDivisionError: division by zero (at {file}:38"],
        ),
    ],
)
def test_an_error_names_the_users_function(changes, lines, tiny_llama, tmp_path, monkeypatch, capfd):
    n = next(numbers)
    file = tmp_path / f"my_parts_{n}.py"
    file.write_text(MODULE.format(n=n))
    monkeypatch.syspath_prepend(tmp_path)
    fill = {"n": n, "file": file}
    settings = {key: value.format(**fill) for key, value in changes.items()}
    config = compose_run(
        tmp_path, tiny_llama, trainer__local="true", reward_model__num_workers=0,
        actor_rollout_ref__model__external_lib=file.stem, **settings,
    )  # fmt: skip
    assert run_here(TaskRunner(), config) == 1
    error = capfd.readouterr().err
    for line in lines:
        assert line.format(**fill) in error, error
    assert f"Full traceback: {tmp_path}/out/traceback.txt" in error
    assert (tmp_path / "out" / "traceback.txt").read_text().startswith("Traceback")


LOSS_MODULE = '''
from verl.algos.policy_loss import register_policy_loss

READS, seen = ("level", "half", "per_token", "ref_log_prob"), []


@register_policy_loss("NAME", reads=(*READS, MORE))
def of_columns(inputs, config):
    level, half, per_token, ref = (inputs.columns[name] for name in READS)
    seen.append([tuple(column.shape) for column in (level, half, per_token, ref)])
    weight = (level * half)[:, None] + per_token + ref
    return inputs.aggregate(weight * (1 + inputs.log_prob - inputs.log_prob.detach()), config.loss_agg_mode), {}
'''
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    words = solution_str.split()
    return {"score": len(words) % 2, "half": len(words) / 2, "per_token": [float(i) for i in range(len(words))]}
'''


def run(tmp_path, model, monkeypatch, name, more=""):
    """(status of one step, its batch if it ended) of a run whose loss is in a module of `tmp_path`."""
    batches = keep_batches(monkeypatch)
    (tmp_path / f"{name}.py").write_text(LOSS_MODULE.replace("NAME", name).replace("MORE", more))
    monkeypatch.syspath_prepend(tmp_path)
    config = compose_run(
        tmp_path, model, trainer__local="true", trainer__total_training_steps=1, reward_model__num_workers=0,
        trainer__save_freq=0, actor_rollout_ref__actor__use_kl_loss="true", actor_rollout_ref__actor__kl_loss_coef=0,
        actor_rollout_ref__model__external_lib=name, actor_rollout_ref__actor__policy_loss__loss_mode=name,
    )  # fmt: skip
    Path(config.custom_reward_function.path).write_text(REWARD)
    data = Path(config.data.train_files)
    rows = [json.loads(line) | {"level": i % 3} for i, line in enumerate(data.read_text().splitlines())]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_here(TaskRunner(), config), batches


def test_a_step_gives_the_loss_the_numbers_of_its_columns(tiny_llama, tmp_path, monkeypatch, capfd):
    status, batches = run(tmp_path, tiny_llama, monkeypatch, "reads_four_columns")
    assert status == 0, capfd.readouterr().err
    (batch,), total, tokens = batches, 0.0, 0
    for i, extra_info in enumerate(batch.non_tensor_batch["extra_info"]):
        level, extras = extra_info["index"] % 3, batch.non_tensor_batch["__extras__"][i]
        for t, counted in enumerate(batch.batch["response_mask"][i].tolist()):
            if counted:
                own = extras["per_token"][t] if t < len(extras["per_token"]) else 0.0
                total += level * extras["half"] + own + batch.batch["ref_log_prob"][i, t].item()
                tokens += 1
    (row,) = metrics_rows(tmp_path)
    assert row["actor/pg_loss"] == pytest.approx(total / tokens, rel=1e-5) and row["actor/grad_norm"] > 0
    assert len({extras["half"] for extras in batch.non_tensor_batch["__extras__"]}) > 1
    # of four micro-batches
    assert importlib.import_module("reads_four_columns").seen == [[(8,), (8,), (8, 6), (8, 6)]] * 4


def test_a_missing_column_ends_the_run_with_the_ways_to_provide_it(tiny_llama, tmp_path, monkeypatch, capfd):
    status, batches = run(tmp_path, tiny_llama, monkeypatch, "reads_a_missing_column", "'difficulty'")
    error = capfd.readouterr().err
    assert (status, batches) == (1, [])
    for text in (
        "policy loss 'reads_a_missing_column' reads the column 'difficulty', which the batch lacks",
        "as a column of the data file", "{'score': 1.0, 'difficulty': 0.5}", "extra_fields", "per_token",
    ):  # fmt: skip
        assert text in error


@pytest.mark.parametrize("values", [[0.5, None], ["a", 1.0], [1.0, [1.0]], [[1.0] * 4, [1.0]], [[[1.0]], [[1.0]]]])
def test_values_that_are_no_numbers_are_refused(values, monkeypatch):
    monkeypatch.setitem(LOSS_COLUMNS, "mine", ("level",))
    data = DataProto.from_dict({"responses": torch.zeros(2, 3, dtype=torch.int64)}, object_columns(level=values))
    with pytest.raises(ValueError, match="'mine' reads the column 'level', where a row has .*at most 3 numbers"):
        add_loss_columns(data, "mine")
