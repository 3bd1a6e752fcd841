"""The recipe's part of a dry run: servers, separator, settings."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import recipe.spd.config
from recipe.spd.checks import check_servers_and_separator
from tests.helpers.configs import CONFIG_DIR, compose_ppo
from tests.helpers.models import make_tokenizer
from verl.utils.config_effect import settings_without_effect
from verl.utils.problems import CHECKS

RECIPE = CONFIG_DIR.parents[2] / "recipe" / "spd" / "config"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("SPD_VLLM_URLS", raising=False)
    monkeypatch.delenv("SPD_SEP_TOKEN_ID", raising=False)


def compose(*overrides):
    config = compose_ppo("actor_rollout_ref.model.path=m", *overrides, config_dir=RECIPE, config_name="spd_trainer")
    return OmegaConf.create(OmegaConf.to_container(config, resolve=True))


def found(tokenizer, *overrides):
    return list(check_servers_and_separator(compose(*overrides), SimpleNamespace(tokenizer=tokenizer)))


def test_external_lib_registers_the_check():
    import spd_scorer  # noqa: F401

    assert CHECKS.count(check_servers_and_separator) == 1 and recipe.spd.config is not None


def test_the_recipe_sets_nothing_that_has_no_effect():
    config = compose_ppo("actor_rollout_ref.model.path=m", config_dir=RECIPE, config_name="spd_trainer")
    assert settings_without_effect(config) == []


def test_a_server_that_does_not_answer_is_absent(monkeypatch):
    monkeypatch.setenv("SPD_VLLM_URLS", "http://127.0.0.1:9/v1")
    (problem,) = found(None)
    assert problem.kind == "absent"
    assert "spd.rollout.servers (SPD_VLLM_URLS)=http://127.0.0.1:9/v1/models does not answer" in problem.message


def test_an_address_without_http_and_a_wrong_setting_are_wrong(monkeypatch):
    assert [p.kind for p in found(None, "spd.rollout.rounds=2")] == ["wrong"]
    monkeypatch.setenv("SPD_VLLM_URLS", "127.0.0.1:9")
    (problem,) = found(None)
    assert problem.kind == "wrong" and "must start with http://" in problem.message


def test_a_tokenizer_without_separator_is_wrong(monkeypatch):
    tokenizer = make_tokenizer()
    monkeypatch.setenv("SPD_SEP_TOKEN_ID", str(len(tokenizer)))
    (problem,) = found(tokenizer)
    assert problem.kind == "wrong" and problem.key == "SPD_SEP_TOKEN_ID"
    monkeypatch.setenv("SPD_SEP_TOKEN_ID", "3")
    assert found(tokenizer) == []
