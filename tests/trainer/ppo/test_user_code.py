"""A run that fails in a user's reward, loss, estimator or rollout names the function, its file and its line."""

import itertools

import pytest

from tests.helpers.rl_run import compose_run
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.run.ray_session import run_here

MODULE = '''
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
from verl.rollout.base import BaseRollout, register_rollout


@register_policy_loss("raises_{n}")
def raises(old_log_prob, log_prob, advantages, response_mask, **kwargs):
    return log_prob / 0 + undefined_name


@register_policy_loss("no_metrics_{n}")
def no_metrics(old_log_prob, log_prob, advantages, response_mask, **kwargs):
    return log_prob.mean()


@register_adv_est("no_returns_{n}")
def no_returns(token_level_rewards, response_mask):
    return token_level_rewards, None


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
            {"algorithm__adv_estimator": "no_returns_{n}"},
            ["advantage estimator no_returns ({file}:16) returned (a tensor of shape (32, 6), a NoneType)"],
        ),
        (
            {f"{ROLLOUT}name": "a_dict_{n}"},
            ["Rollout.generate_sequences ({file}:32) returned a dict; expected a DataProto"],
        ),
        (
            {f"{ROLLOUT}name": "few_columns_{n}"},
            ["FewColumns.generate_sequences ({file}:38) returned samples without position_ids, prompts, responses"],
        ),
        (
            {"custom_reward_function__path": "{file}"},
            ["reward function compute_score ({file}:42) raised ZeroDivisionError: division by zero (at {file}:43"],
        ),
        (
            {"custom_reward_function__path": "{file}", "custom_reward_function__name": "no_score"},
            ["reward function no_score ({file}:46) returned None as a score; return a number"],
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
