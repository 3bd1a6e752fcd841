"""A run that fails in a user's reward, loss or rollout names the function, its file and its line."""

import itertools

import pytest

from tests.helpers.rl_run import compose_run
from verl.trainer.main_ppo import TaskRunner
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


def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return None
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
        (
            {"custom_reward_function__path": "{file}", "custom_reward_function__name": "no_score"},
            ["reward function no_score ({file}:41) returned None as a score; return a number"],
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
