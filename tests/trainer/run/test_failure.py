"""What is said of a step that fails and of a user's code; tests/trainer/ppo/test_user_code.py has whole runs."""

import functools
import pickle
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import RayTaskError

from verl.algos.advantage import estimate_advantages, register_adv_est
from verl.trainer.run.timing import StepFailed, root_cause, step, timed_step
from verl.utils.import_utils import load_extern_object
from verl.utils.user_code import defined_at, full_traceback, user_frame

CODE = "import torch\n\n\ndef broken(token_level_rewards, response_mask):\n    return torch.sum(None)\n"


@pytest.fixture
def broken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loss.py").write_text(CODE)
    return load_extern_object(str(tmp_path / "my_loss.py"), "broken")


def raised_by(function):
    with pytest.raises(TypeError) as caught:
        function(None, None)
    return caught.value


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

    assert user_frame(full_traceback(raised_by(wrapped))) == "my_loss.py:5, in broken"
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
    with pytest.raises(StepFailed, match="failed: ValueError: lr is negative$"):
        with timed_step("update_actor", defaultdict(float), 1):
            raise error


def test_ctrl_c_is_no_failed_step():
    with pytest.raises(KeyboardInterrupt):
        with timed_step("gen", defaultdict(float), 1):
            raise KeyboardInterrupt


def test_failure_survives_the_way_through_ray():
    error = pickle.loads(pickle.dumps(StepFailed("gen", 3, "ValueError: x")))
    assert (str(error), error.step_name) == ("step 'gen' of global step 3 failed: ValueError: x", "gen")
