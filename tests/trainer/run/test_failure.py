"""What is said of an error in a user's code; tests/trainer/ppo/test_user_code.py has whole runs."""

import functools

import pytest
import torch

from verl.algos.advantage import estimate_advantages, register_adv_est
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
    [(None, "a NoneType"), (torch.zeros(2, 3), "a tensor of shape (2, 3)"),
     ((torch.zeros(2, 3), None), "(a tensor of shape (2, 3), a NoneType)"),
     ((torch.zeros(2), torch.zeros(2)), "(a tensor of shape (2,), a tensor of shape (2,))")],
)  # fmt: skip
def test_an_estimator_that_returns_something_else_is_named(returned, shown):
    name = f"returns {shown}"

    @register_adv_est(name)
    def mine(token_level_rewards, response_mask):
        return returned

    with pytest.raises(TypeError, match=r"estimator .*mine \(.*test_failure.py:\d+\) returned") as caught:
        estimate_advantages(name, {"token_level_rewards": torch.zeros(2, 3), "response_mask": torch.ones(2, 3)})
    assert shown in str(caught.value) and "two tensors of shape (2, 3)" in str(caught.value)
