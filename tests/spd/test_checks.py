"""The recipe's part of a dry run: servers, separator, settings."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig

from recipe.spd.checks import check_scorer, check_servers_and_separator
from recipe.spd.scorer.auto import SCORERS
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig, load_spd_scorer
from tests.helpers.configs import CONFIG_DIR, compose_ppo
from verl.config.compose import to_settings
from verl.config.ppo import PPOConfig
from verl.planning.config_check import tree_problems
from verl.planning.memory_estimate import estimate_memory, measure_loaded

RECIPE = CONFIG_DIR.parents[2] / "recipe" / "spd" / "config"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("SPD_VLLM_URLS", raising=False)
    monkeypatch.delenv("SPD_SEP_TOKEN_ID", raising=False)


def compose(*overrides):
    config = compose_ppo("actor_rollout_ref.model.path=m", *overrides, config_dir=RECIPE, config_name="spd_trainer")
    return OmegaConf.create(OmegaConf.to_container(config, resolve=True))


@pytest.fixture
def findings(tiny_llama):
    """What a dry run knows of the target when it checks a scorer."""
    return SimpleNamespace(hf_config=AutoConfig.from_pretrained(tiny_llama), tokenizer=None, datasets={})


def refusals(findings, *overrides):
    """The messages of check_scorer."""
    return [problem.message for problem in check_scorer(to_settings(compose(*overrides), PPOConfig), findings)]


def problems_of(tokenizer, *overrides):
    return list(check_servers_and_separator(compose(*overrides), SimpleNamespace(tokenizer=tokenizer)))


def test_the_recipe_sets_nothing_that_has_no_effect():
    config = compose_ppo("actor_rollout_ref.model.path=m", config_dir=RECIPE, config_name="spd_trainer")
    assert tree_problems(config, PPOConfig)[2] == []


def test_an_address_without_http_and_a_wrong_setting_are_wrong(monkeypatch):
    assert [p.kind for p in problems_of(None, "spd.rollout.rounds=2")] == ["wrong"]
    monkeypatch.setenv("SPD_VLLM_URLS", "127.0.0.1:9")
    (problem,) = problems_of(None)
    assert problem.kind == "wrong" and "must start with http://" in problem.message


def test_a_target_or_a_head_that_does_not_fit_the_settings_is_wrong(findings, monkeypatch):
    assert refusals(findings, "spd.head_inputs=pair") == []
    assert "needs a target with tied embeddings" in refusals(findings, "spd.head_inputs=logits")[0]
    findings.hf_config.tie_word_embeddings = True
    assert refusals(findings, "spd.head_inputs=logits") == []
    assert "spd.state_layer=99 must be an inner layer" in refusals(findings, "spd.state_layer=99")[0]

    def make_head(config):
        raise ValueError(f"this head needs spd.head_inputs=pair, not {config.head_inputs}")

    monkeypatch.setattr(SCORERS["target"], "make_head", make_head)
    assert refusals(findings) == ["this head needs spd.head_inputs=pair, not state"]


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (["actor_rollout_ref.model.lora_rank=8"], "actor_rollout_ref.model.lora_rank=0"),
        (["spd.backbone=own", "spd.head_inputs=logits"], "spd.head_inputs=pair"),
        (["spd.backbone=own", "spd.state_layer=1"], "spd.state_layer=null"),
        (["spd.adapter_path={saved}", "spd.state_layer=1"], "spd.state_layer=null"),
        (["spd.state_layer=2"], "a number below that, or null"),
    ],
)
def test_the_advice_of_a_refusal_helps(tiny_llama, findings, tmp_path, wrong, advice):
    AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=tiny_llama)).save_pretrained(tmp_path)
    given = [f"actor_rollout_ref.model.path={tiny_llama}", *(override.format(saved=tmp_path) for override in wrong)]
    (message,) = refusals(findings, *given)
    assert advice in message
    assert refusals(findings, *given, advice if "=" in advice else "spd.state_layer=1") == []


def test_a_run_without_the_group_spd_is_sent_to_its_config(tiny_llama):
    without = compose_ppo("actor_rollout_ref.rollout.name=spd", f"actor_rollout_ref.model.path={tiny_llama}")
    (problem,) = check_servers_and_separator(without, SimpleNamespace(tokenizer=None))
    assert "--config-path pkg://recipe.spd.config --config-name spd_trainer" in problem.message
    assert problems_of(None, f"actor_rollout_ref.model.path={tiny_llama}") == []


@pytest.mark.parametrize(("backbone", "inputs"), [("target", "state"), ("own", "state"), ("own", "pair")])
def test_the_memory_estimate_knows_what_of_a_scorer_trains(tiny_llama, backbone, inputs):
    settings = (f"spd.backbone={backbone}", f"spd.head_inputs={inputs}", "spd.head_size=16")
    config = OmegaConf.to_container(compose(*settings, "data.max_prompt_length=92"))
    hf_config = AutoConfig.from_pretrained(tiny_llama)
    size, exact = measure_loaded(hf_config, config)
    model = load_spd_scorer(
        SimpleNamespace(local_path=tiny_llama, path=tiny_llama, trust_remote_code=False, override_config={}),
        torch.float32, spd={"backbone": backbone, "head_inputs": inputs, "head_size": 16},
    )  # fmt: skip
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert exact and size.trainable == trained
    assert size.parameters == sum(p.numel() for p in model.parameters())
    parts = estimate_memory(size, config, ranks=1, micro=64, samples=64)["update"]
    frozen = 2 if backbone == "target" else 4  # bytes: a frozen target is held in bfloat16
    assert parts["weights"] == 4 * trained + frozen * (size.parameters - trained)
    # 64 samples of n = 16 are 4 forwards of 92 + 8 tokens; a frozen target keeps one layer, the own one both.
    layers = 1 if backbone == "target" else hf_config.num_hidden_layers
    assert parts["activations of a micro-batch"] == 4 * 100 * hf_config.hidden_size * 34 * layers * 2
    assert parts["logits of a micro-batch"] == 64 * 8 * 4 * 3
    assert "KV cache of the rollout" not in parts  # a server's, not the rank's
