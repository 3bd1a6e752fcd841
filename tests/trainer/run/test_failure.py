"""What is said of a step that fails and of a user's code; tests/trainer/ppo/test_user_code.py has whole runs."""

import functools
import pickle
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from ray.exceptions import OutOfMemoryError, RayTaskError

from tests.helpers.rl_run import compose_run
from verl.algos.advantage import estimate_advantages, register_adv_est
from verl.config.compose import to_settings
from verl.config.ppo import PPOConfig
from verl.trainer.run.failure import failure_message
from verl.trainer.run.timing import StepFailed, root_cause, step, timed_step
from verl.utils.import_utils import load_extern_object
from verl.utils.user_code import defined_at, full_traceback, user_frame

CODE = "import torch\n\n\ndef broken(token_level_rewards, response_mask):\n    return torch.sum(None)\n"


@pytest.fixture
def broken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loss.py").write_text(CODE)
    return load_extern_object(str(tmp_path / "my_loss.py"), "broken")


def test_a_function_is_named_with_file_and_line(broken):
    assert defined_at(broken) == "broken (my_loss.py:4)"
    assert defined_at(functools.partial(broken, None)) == "broken (my_loss.py:4)"
    assert defined_at(torch.nn.Linear(1, 1)).startswith("Linear")


def test_the_innermost_frame_of_the_user_is_that_of_the_first_cause(broken):
    def wrapped(*args):
        try:
            broken(*args)
        except TypeError as error:
            raise TypeError("later") from error

    with pytest.raises(TypeError) as caught:
        wrapped(None, None)
    assert user_frame(full_traceback(caught.value)) == "my_loss.py:5, in broken"
    assert user_frame('File "<string>", line 1, in f\n') is None


@pytest.mark.parametrize(
    ("returned", "shown"),
    [(torch.zeros(2, 3), "a tensor of shape (2, 3)"),
     ((torch.zeros(2, 3), None), "(a tensor of shape (2, 3), a NoneType)")],
)  # fmt: skip
def test_an_estimator_that_returns_something_else_is_named(returned, shown):
    name = f"returns {shown}"

    @register_adv_est(name)
    def mine(token_level_rewards, response_mask):
        return returned

    with pytest.raises(TypeError, match=r"estimator .*mine \(.*test_failure.py:\d+\) returned") as caught:
        estimate_advantages(name, {"token_level_rewards": torch.zeros(2, 3), "response_mask": torch.ones(2, 3)})
    assert shown in str(caught.value) and "two tensors of shape (2, 3)" in str(caught.value)


class Loop:
    def __init__(self):
        self.timing_raw = defaultdict(float)
        self.run_log = SimpleNamespace(timing=self.timing_raw)
        self.global_steps = 4

    @step("outer")
    def outer(self):
        return self.inner()

    @step("inner")
    def inner(self):
        raise KeyError("gone")


def test_innermost_step_names_the_failure_and_every_step_is_timed():
    loop = Loop()
    with pytest.raises(StepFailed, match="step 'inner' of global step 4 failed: KeyError: 'gone'") as failure:
        loop.outer()
    assert isinstance(failure.value.__cause__, KeyError)
    assert {"inner", "outer"} <= loop.timing_raw.keys()


def test_the_cause_is_the_worker_error_that_ray_wraps():
    error = RayTaskError("update_actor", "long text", ValueError("lr is negative")).as_instanceof_cause()
    assert str(root_cause(error)) == "lr is negative"
    failed = pytest.raises(StepFailed, match="failed: ValueError: lr is negative$")
    with failed, timed_step("update_actor", defaultdict(float), 1):
        raise error


def test_ctrl_c_is_no_failed_step():
    with pytest.raises(KeyboardInterrupt), timed_step("gen", defaultdict(float), 1):
        raise KeyboardInterrupt


def test_failure_survives_the_way_through_ray():
    error = pickle.loads(pickle.dumps(StepFailed("gen", 3, "ValueError: x")))
    assert (str(error), error.step_name) == ("step 'gen' of global step 3 failed: ValueError: x", "gen")


RAY_KILLED = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 4)
was 22.51GB used / 23.54GB limit (0.956034)
OOM kill reason: Memory usage 24020975616B exceeded threshold of 24012687360B"""


def test_a_rank_that_ray_ends_for_want_of_memory_says_so_and_names_the_keys_to_lower(tmp_path):
    cpu = {"trainer__device": "cpu", "actor_rollout_ref__rollout__name": "vllm", "trainer__n_gpus_per_node": 2}
    config = compose_run(tmp_path, "unused", **cpu, actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=6)
    config = to_settings(config, PPOConfig)
    with pytest.raises(StepFailed) as caught, timed_step("update_actor", defaultdict(float), 3):
        raise OutOfMemoryError(RAY_KILLED)
    said = failure_message(caught.value, config).splitlines()[1]
    assert said == (
        "Training failed: step 'update_actor' of global step 3 failed: Ray ended a process because the memory of "
        "machine 192.0.2.2 was used up (22.51GB used / 23.54GB limit). Close other programs there, or let the run need "
        "less: set "
        "actor_rollout_ref.model.enable_gradient_checkpointing=true, lower "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (now 6), lower "
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes (now 1073741824), lower "
        "trainer.n_gpus_per_node (now 2)."
    )
    assert "OOM kill reason" in (tmp_path / "out" / "traceback.txt").read_text()
    config = OmegaConf.create({"trainer": {"device": "cuda", "default_local_dir": str(tmp_path)}})
    said = failure_message(caught.value, config)
    assert "was used up (22.51GB used / 23.54GB limit). Close other programs there, or let the run need less.\n" in said
