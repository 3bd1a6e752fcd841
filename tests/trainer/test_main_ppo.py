"""Roles by name, samplers, and the driver's environment."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile

import psutil
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import SequentialSampler

from tests.helpers.configs import compose_ppo
from tests.helpers.logs import logged
from tests.helpers.rl_run import compose_run
from verl.config.compose import to_settings
from verl.config.ppo import PPOConfig
from verl.config.roles import reads_reference
from verl.trainer.main_ppo import TaskRunner, create_rl_sampler, run_ppo
from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy, need_reward_model, rollout_correction
from verl.trainer.run.ray_session import SESSION_FILE, TEMP_PREFIX, stop_left_session, with_worker_env
from verl.utils.problems import ConfigError


def data_config(**keys):
    return OmegaConf.create({"sampler": {"class_path": None, "class_name": None}, "shuffle": True, "seed": 5, **keys})


def algorithm(**keys):
    base = {"adv_estimator": "grpo", "use_kl_in_reward": False, "rollout_correction": None, "use_pf_ppo": False}
    off = {"critic": {"enable": None}, "reward_model": {"enable": False}}
    return OmegaConf.create({"algorithm": base | keys, "actor_rollout_ref": {"actor": {"use_kl_loss": False}}, **off})


def test_sampler_follows_the_seed():
    orders = [list(create_rl_sampler(data_config(), range(20))) for _ in range(2)]
    assert orders[0] == orders[1] != list(range(20))
    assert list(create_rl_sampler(data_config(seed=6), range(20))) != orders[0]
    assert isinstance(create_rl_sampler(data_config(shuffle=False), range(20)), SequentialSampler)


def test_sampler_of_a_user_is_loaded_and_refuses_loader_processes(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl.data.sampler import AbstractSampler\n"
        "class Backwards(AbstractSampler):\n"
        "    def __init__(self, data_source, data_config):\n        self.n = len(data_source)\n"
        "    def __iter__(self):\n        return iter(range(self.n - 1, -1, -1))\n"
    )
    chosen = {"class_path": str(tmp_path / "mine.py"), "class_name": "Backwards"}
    sampler = create_rl_sampler(data_config(sampler=chosen, dataloader_num_workers=0), torch.arange(3))
    assert list(sampler) == [2, 1, 0]
    with pytest.raises(ValueError, match="data.dataloader_num_workers=2"):
        create_rl_sampler(data_config(sampler=chosen, dataloader_num_workers=2), torch.arange(3))


def test_a_hand_made_data_section_may_lack_keys():
    assert sorted(create_rl_sampler(OmegaConf.create({}), range(5))) == list(range(5))
    assert isinstance(create_rl_sampler(OmegaConf.create({"shuffle": False}), range(5)), SequentialSampler)
    assert list(create_rl_sampler({"seed": 1}, range(9))) == list(create_rl_sampler({"seed": 1}, range(9)))


def test_roles_by_name():
    assert Role.from_string("ref") is Role.RefPolicy and str(Role.ActorRollout) == "actor_rollout"
    with pytest.raises(ValueError, match="did you mean 'critic'"):
        Role.from_string("critc")
    assert need_reference_policy({Role.RefPolicy: object}) and not need_reference_policy({Role.ActorRollout: object})
    assert need_reward_model({Role.RewardModel: object}) and not need_reward_model({Role.RefPolicy: object})


def test_a_critic_is_needed_by_gae_alone_unless_said_otherwise():
    assert need_critic(algorithm(adv_estimator="gae")) and not need_critic(algorithm())
    config = algorithm(adv_estimator="gae")
    config.critic.enable = False
    assert not need_critic(config)
    assert reads_reference(algorithm(use_kl_in_reward=True)) and not reads_reference(algorithm())


def test_worker_environment_takes_the_user_over_the_shell_over_the_defaults(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("LOGURU_LEVEL", "DEBUG")
    env = with_worker_env({"env_vars": {"TOKENIZERS_PARALLELISM": "false"}, "working_dir": "x"})
    assert env["working_dir"] == "x"
    assert env["env_vars"]["NCCL_DEBUG"] == "INFO"
    assert env["env_vars"]["LOGURU_LEVEL"] == "DEBUG"
    assert env["env_vars"]["TOKENIZERS_PARALLELISM"] == "false"


def test_a_start_names_the_process_to_signal(tmp_path, tiny_llama, monkeypatch):
    monkeypatch.setattr("verl.trainer.main_ppo.TaskRunner.run", lambda *arguments: True)
    with logged("INFO") as lines:
        run_ppo(compose_run(tmp_path, tiny_llama, trainer__local="true", reward_model__num_workers=0))
    assert f"to end this run after a step and save: kill {os.getpid()}" in lines


@pytest.mark.process
def test_only_the_recorded_session_of_a_dead_run_is_stopped(tmp_path):
    folders = [tempfile.mkdtemp(prefix=TEMP_PREFIX) for _ in range(2)]
    nap = "import time; time.sleep(60)"
    command = [sys.executable, "-c", nap, "site-packages/ray/raylet"]
    ours, other = (subprocess.Popen([*command, folder]) for folder in folders)
    reader = subprocess.Popen([sys.executable, "-c", nap, folders[0]])  # such as a pager on its logs
    try:
        me = {"pid": os.getpid(), "started": psutil.Process().create_time(), "temp_dir": folders[0]}
        (tmp_path / SESSION_FILE).write_text(json.dumps(me))
        with pytest.raises(SystemExit, match=f"in use by the run of process {os.getpid()}"):
            stop_left_session(tmp_path)
        (tmp_path / SESSION_FILE).write_text(json.dumps({**me, "host": "another"}))
        stop_left_session(tmp_path)  # its process numbers mean nothing here
        assert ours.poll() is None
        # the same process number, but of a process that ended: the run was killed
        (tmp_path / SESSION_FILE).write_text(json.dumps({**me, "started": me["started"] - 100}))
        stop_left_session(tmp_path)
        assert not psutil.pid_exists(ours.pid) and other.poll() is None and reader.poll() is None
        assert not os.path.exists(folders[0]) and os.path.exists(folders[1])
        assert not (tmp_path / SESSION_FILE).exists()
    finally:
        for process in (ours, other, reader):
            process.kill()
        os.rmdir(folders[1])


def test_a_node_of_a_cluster_tries_the_folder_and_the_trackers_of_the_run_before_anything_is_loaded(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "mlflow" else find(name, *a))
    config = to_settings(compose_ppo("trainer.default_local_dir=/dev/null/run", "trainer.logger=[mlflow]"), PPOConfig)
    with pytest.raises(ConfigError, match="trainer.default_local_dir: /dev/null/run cannot be written: /dev/null is"):
        TaskRunner().make_trainer(config)
    with pytest.raises(ConfigError, match="trainer.logger=mlflow: not installed here; pip install mlflow"):
        TaskRunner().make_trainer(config)


def test_the_rollout_is_corrected_where_any_part_of_it_is_switched_on():
    off = {"rollout_is": None, "rollout_rs": None, "rollout_token_veto_threshold": None, "bypass_mode": False}
    assert rollout_correction(algorithm()) is None and rollout_correction(algorithm(rollout_correction=off)) is None
    parts = ({"rollout_is": "token"}, {"rollout_rs": "token"}, {"rollout_token_veto_threshold": 1e-4},
             {"bypass_mode": True})  # fmt: skip
    for part in parts:
        assert rollout_correction(algorithm(rollout_correction=off | part)) is not None
