"""Every call on ranks has a phase, and with it a limit."""

import pytest

from tests.helpers.configs import compose_ppo
from verl.roles.reward_server import RewardServerWorker
from verl.rollout.replica_worker import RolloutReplicaWorker
from verl.single_controller.base.worker_group import registered_methods
from verl.single_controller.ray.watchdog import METHODS, phase_of
from verl.workers.fsdp_workers import ActorRolloutRefWorker, AsyncActorRolloutRefWorker, CriticWorker, RewardModelWorker

ROLES = (ActorRolloutRefWorker, AsyncActorRolloutRefWorker, CriticWorker, RewardModelWorker, RewardServerWorker,
         RolloutReplicaWorker)  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_every_registered_method_has_a_phase_with_a_limit(role):
    limits = compose_ppo("actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=hf").trainer.watchdog
    for method in registered_methods(role):
        assert limits[phase_of(method)] > 0, method
        assert phase_of(f"actor_rollout_{method}") == phase_of(method)


def test_phases_name_registered_methods_only_and_each_once():
    named = [name for names in METHODS.values() for name in names]
    assert len(named) == len(set(named))
    of_other_workers = {"__ray_ready__", "reset", "compute_score_batch"}
    assert of_other_workers < set(named) <= of_other_workers | {m for role in ROLES for m in registered_methods(role)}


@pytest.mark.parametrize(
    ("method", "phase"),
    [("rollout_mode", "update"), ("trainer_mode", "update"), ("close_rollout", "update"), ("rollout_server", "init"),
     ("save_is_finished", "save"), ("nodes_that_see", "save"), ("compute_rm_score", "log_prob"),
     ("compute_score_batch", "log_prob"), ("reset", "generate"), ("__ray_ready__", "init"),
     ("of_a_user", "update")],
)  # fmt: skip
def test_the_phase_of_a_method(method, phase):
    assert phase_of(method) == phase
