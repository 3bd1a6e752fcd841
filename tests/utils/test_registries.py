"""The public tables of plug-ins, as code written for verl uses them."""

import pytest

from verl.rollout.base import _ROLLOUT_REGISTRY, BaseRollout, get_rollout_class, register_rollout
from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_policy_loss,
)


class SilentRollout(BaseRollout):
    def generate_sequences(self, prompts):
        return prompts


class OtherRollout(SilentRollout):
    pass


def first(*args, **kwargs):
    pass


def second(*args, **kwargs):
    pass


def test_an_entry_is_registered_returned_and_protected():
    """Of losses; the tables of estimators and of reward managers (tests/compat/test_behaviours) are of its class."""
    try:
        assert register_policy_loss("mine")(first) is first is get_policy_loss_fn("mine")
        assert POLICY_LOSS_REGISTRY["mine"] is first
        assert register_policy_loss("mine")(first) is first  # again
        with pytest.raises(ValueError, match="'mine' is already registered by tests.utils.test_registries"):
            register_policy_loss("mine")(second)
        assert get_policy_loss_fn("mine") is first
        POLICY_LOSS_REGISTRY["direct"] = second
        assert get_policy_loss_fn("direct") is second
    finally:
        POLICY_LOSS_REGISTRY.pop("mine", None)
        POLICY_LOSS_REGISTRY.pop("direct", None)
    with pytest.raises(ValueError, match="'mine' is unknown"):
        get_policy_loss_fn("mine")


def test_estimators_are_named_by_text_or_enum():
    assert ADV_ESTIMATOR_REGISTRY["grpo"] is get_adv_estimator_fn(AdvantageEstimator.GRPO)
    assert set(ADV_ESTIMATOR_REGISTRY) >= {str(name) for name in AdvantageEstimator}


def test_rollouts_are_keyed_by_name_and_mode():
    assert {("hf", "sync"), ("vllm", "sync"), ("spd", "sync")} <= set(_ROLLOUT_REGISTRY)
    try:
        assert register_rollout("silent", mode="sync")(SilentRollout) is SilentRollout
        assert _ROLLOUT_REGISTRY["silent", "sync"] is SilentRollout is get_rollout_class("silent", "sync")
        with pytest.raises(ValueError, match="'silent/sync' is already registered"):
            register_rollout("silent", mode="sync")(OtherRollout)
        _ROLLOUT_REGISTRY["named", "sync"] = "tests.utils.test_registries.OtherRollout"
        assert get_rollout_class("named", "sync").__name__ == "OtherRollout"
    finally:
        for name in ("silent", "named"):
            _ROLLOUT_REGISTRY.pop((name, "sync"), None)


def test_a_name_in_another_case_is_suggested():
    with pytest.raises(ValueError, match="rollout.name='vLLM' is unknown; did you mean 'vllm'"):
        get_rollout_class("vLLM")
    with pytest.raises(ValueError, match="adv_estimator='GRPO' is unknown; did you mean 'grpo'"):
        get_adv_estimator_fn("GRPO")
