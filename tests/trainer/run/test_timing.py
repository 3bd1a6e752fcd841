"""Steps are timed and named in a failure."""

import pickle
from collections import defaultdict
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from verl.trainer.run.timing import StepFailed, root_cause, step, timed_step


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

    @step("quiet")
    def quiet(self, value, *, twice):
        return value * twice


def test_arguments_and_result_pass_through_and_seconds_add_up():
    loop = Loop()
    assert loop.quiet(3, twice=2) == 6
    first = loop.timing_raw["quiet"]
    loop.quiet(3, twice=2)
    assert loop.timing_raw["quiet"] > first > 0


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
