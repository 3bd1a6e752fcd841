"""Settings without their secrets; names and texts that are secret are in tests/adversary/test_secrets.py."""

from omegaconf import OmegaConf

from tests.helpers.configs import compose_ppo
from verl.utils.redact import HIDDEN, redact, redacted_yaml


def test_no_key_of_the_public_tree_is_taken_for_a_secret():
    config = compose_ppo("actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=hf")
    assert HIDDEN not in redacted_yaml(config)


def test_nested_values_are_hidden_and_the_source_is_not_changed():
    source = {"a": [{"hf_token": "hush"}], "env_vars": {"X": "hush"}, "n": 3, "api_key": None, "u": "http://a:hush@b"}
    clean = redact(source)
    assert clean == {
        "a": [{"hf_token": HIDDEN}], "env_vars": {"X": HIDDEN}, "n": 3, "api_key": None, "u": f"http://{HIDDEN}@b",
    }  # fmt: skip
    assert source["a"][0]["hf_token"] == "hush"
    assert "hush" not in redacted_yaml(OmegaConf.create(source))
