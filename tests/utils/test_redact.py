"""Secrets are hidden by name and in texts; harmless names stay."""

import pytest
from omegaconf import OmegaConf

from tests.helpers.configs import compose_ppo
from verl.utils.redact import HIDDEN, is_secret_name, redact, redact_text, redacted_yaml


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "api_key", "password", "client_secret", "access_key", "token", "authorization",
     "AWS_SECRET_ACCESS_KEY", "HUGGING_FACE_HUB_TOKEN", "server_key", "auth_token"],
)  # fmt: skip
def test_secret_names(name):
    assert is_secret_name(name)


def test_no_key_of_the_public_tree_is_taken_for_a_secret():
    config = compose_ppo("actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=hf")
    assert HIDDEN not in redacted_yaml(config)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://user:hush@host:8080/v1", "host:8080/v1"),
        ("socks5://hush@host", "@host"),
        ("https://host/a?token=hush&b=2", "&b=2"),
        ("WANDB_API_KEY=hush done", "done"),
        ("{'api_key': 'hush', 'n': 1}", "'n': 1"),
        ("password: hush, user: me", "user: me"),
    ],
)
def test_texts(text, kept):
    clean = redact_text(text)
    assert kept in clean
    assert clean.count("hush") == text.count("hush") - clean.count(HIDDEN)
    assert HIDDEN in clean


def test_texts_without_secrets_stay():
    for text in ("http://host:8000/v1", "max_token_len=3, prompt_key=prompt", "a@b.c wrote key: value"):
        assert redact_text(text) == text


def test_nested_values_are_hidden_and_the_source_is_not_changed():
    source = {"a": [{"hf_token": "hush"}], "env_vars": {"X": "hush"}, "n": 3, "api_key": None, "u": "http://a:hush@b"}
    clean = redact(source)
    assert clean == {
        "a": [{"hf_token": HIDDEN}], "env_vars": {"X": HIDDEN}, "n": 3, "api_key": None, "u": f"http://{HIDDEN}@b",
    }  # fmt: skip
    assert source["a"][0]["hf_token"] == "hush"
    assert "hush" not in redacted_yaml(OmegaConf.create(source))
