"""The table of rollouts with those of installed packages, and the ranks that share an engine."""

import pytest
import torch.distributed as dist

from verl.rollout import base


@pytest.mark.parametrize(
    ("name", "message"),
    [("mine", r"^entry point 'mine' .*\(a\.b\.Mine\) names no mode; use <rollout.name>.<rollout.mode>\.$"),
     ("mine.", "'mine.' .* names no mode"),
     ("vllm.sync", r"'vllm/sync' is already registered by .*\.vLLMRollout; a\.b\.Mine needs another name")],
)  # fmt: skip
def test_a_wrong_name_of_an_installed_rollout_is_refused(monkeypatch, name, message):
    monkeypatch.setattr(base, "installed_plugins", lambda kind: {name: "a.b.Mine"})
    known = dict(base._ROLLOUT_REGISTRY)
    with pytest.raises(ValueError, match=message):
        base._register_installed()
    assert base._ROLLOUT_REGISTRY == known


def test_the_rollouts_of_the_recipes_are_registered_once():
    known = dict(base._ROLLOUT_REGISTRY)
    base._register_installed()
    assert set(base._ROLLOUT_REGISTRY) == set(known) and ("spd", "sync") in known and ("refine", "sync") in known


def test_the_size_of_an_engine_divides_the_ranks(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    with pytest.raises(ValueError, match=f"{key}=4 does not divide the 6 ranks; use a divisor"):
        base.engine_group(4)
    assert base.engine_group(1) is None
