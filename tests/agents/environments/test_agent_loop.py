"""The agent loop of an environment: every token by hand, with a model whose answers are given."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.agents.agent_loop.scripted import ScriptedEngine
from tests.agents.environments.conftest import SKYRL_GYM
from tests.helpers.configs import compose_ppo
from verl.agents.agent_loop.base import DictConfigWrap
from verl.agents.agent_loop.environment_agent_loop import EnvironmentAgentLoop
from verl.agents.agent_loop.rows import is_lost
from verl.agents.environments.processes import environment_rows
from verl.config.environment import EnvironmentConfig
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.config import RolloutConfig

pytestmark = pytest.mark.process
WORDS = "yes no crash again".split()


@pytest.fixture
def run(files, tiny_llama):
    tokenizer = hf_tokenizer(tiny_llama)
    tokenizer.add_tokens([word for word in WORDS if word not in tokenizer.get_vocab()])
    settings = EnvironmentConfig(name=SKYRL_GYM, size=4, val_size=1, max_turns=2)
    row = environment_rows(settings, files)["train"][3]
    config = compose_ppo(f"actor_rollout_ref.model.path={tiny_llama}", "actor_rollout_ref.rollout.name=vllm")
    config.data.environment = dict(settings)
    wrapped = DictConfigWrap(config)

    def conversation(*answers, response_length=40):
        rollout = RolloutConfig(name="vllm", mode="async", prompt_length=12, response_length=response_length)
        written = [tokenizer(answer)["input_ids"] for answer in answers]
        server = ScriptedEngine(rollout, lambda *asked: written.pop(0))
        loop = EnvironmentAgentLoop(wrapped, server, tokenizer, None)
        wrapped.shared.pop("environment").close()
        wrapped.shared["environment"] = loop.pool = type(loop.pool)(settings)  # of this event loop
        output = asyncio.run(loop.run({"stop_token_ids": [2]}, extra_info=row["extra_info"]))
        loop.pool.close()
        return output, SimpleNamespace(decode=tokenizer.decode, asked=server.seen)

    return conversation


def test_the_environments_words_are_not_trained(run):
    output, seen = run("no <eos>", "yes <eos>")
    assert seen.decode(output.prompt_ids) == "q : 3 ? a :"
    assert seen.decode(output.response_ids) == "no <eos> q : again a : yes <eos>"
    assert output.response_mask == [1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert seen.asked[1] == output.prompt_ids + output.response_ids[:7]
    assert output.extra_fields["reward_scores"] == {"score": 1.0, "acc": 1.0, "steps": 2}
    assert output.extra_fields["end_reason"] == "stop" and output.num_turns == 4 and not is_lost(output)


def test_limits_end_a_conversation_which_is_scored(run):
    output, _ = run("no <eos>", "no <eos>")  # the environment would ask a third time
    assert output.extra_fields["reward_scores"]["score"] == 0.0 and output.extra_fields["end_reason"] == "turns"
    output, seen = run("no <eos>", response_length=7)
    assert len(seen.asked) == 1 and output.extra_fields["end_reason"] == "length" and not is_lost(output)
    output, _ = run("yes yes yes", response_length=2)
    assert output.extra_fields["end_reason"] == "length" and output.response_mask == [1, 1]


def test_a_conversation_whose_environment_fails_is_lost_not_scored(run):
    output, _ = run("crash <eos>")
    assert is_lost(output) and output.extra_fields["reward_scores"] == {} and output.reward_score is None
