"""algorithm.filter_groups in main_ppo, as in verl 0.9: the trainer that filters is taken, and any other refuses it."""

import pytest

from tests.helpers.rl_run import compose_run
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.dapo_trainer import RayDAPOTrainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

FILTERS = {"algorithm__filter_groups__enable": "true", "algorithm__filter_groups__metric": "acc"}


def taken(config, monkeypatch):
    classes = []
    monkeypatch.setattr(TaskRunner, "build", lambda self, kind, config, stop_flag: classes.append(kind))
    TaskRunner().make_trainer(config)
    return classes


def test_the_trainer_follows_the_section(tmp_path, monkeypatch):
    assert taken(compose_run(tmp_path, "unused", **FILTERS), monkeypatch) == [RayDAPOTrainer]
    assert taken(compose_run(tmp_path, "unused"), monkeypatch) == [RayPPOTrainer]


def test_a_trainer_that_does_not_filter_says_so(tmp_path):
    with pytest.raises(ValueError, match="filter_groups.enable=true: RayPPOTrainer does not filter groups"):
        TaskRunner().build(RayPPOTrainer, compose_run(tmp_path, "unused", **FILTERS), None)
