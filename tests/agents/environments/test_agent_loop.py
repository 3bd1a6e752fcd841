"""The agent loop of an environment, in this process and in workers that are Ray actors, on a scripted engine."""

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray

from tests.agents.agent_loop.parts import prompts_of, server_group
from tests.agents.agent_loop.scripted import ScriptedEngine
from tests.agents.environments.conftest import SKYRL_GYM
from tests.helpers.columns import object_columns
from tests.helpers.configs import SOUND, compose_ppo
from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.watched_runs import becomes
from verl.agents.agent_loop.base import DictConfigWrap
from verl.agents.agent_loop.environment_agent_loop import EnvironmentAgentLoop
from verl.agents.agent_loop.manager import AgentLoopManager
from verl.agents.agent_loop.rows import is_lost
from verl.agents.agent_loop.worker import AgentLoopWorkerBase
from verl.agents.environments.processes import environment_rows
from verl.config.environment import EnvironmentConfig
from verl.reward.rows import LOST
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.config import RolloutConfig

pytestmark = pytest.mark.process
ANSWERS = "yes no crash again".split()


@pytest.fixture
def run(files, tiny_llama):
    tokenizer = hf_tokenizer(tiny_llama)
    tokenizer.add_tokens([word for word in ANSWERS if word not in tokenizer.get_vocab()])
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


def test_limits_end_a_conversation_which_is_scored(run):
    output, _ = run("no <eos>", "no <eos>")  # the environment would ask a third time
    assert output.extra_fields["reward_scores"]["score"] == 0.0 and output.extra_fields["end_reason"] == "turns"
    output, seen = run("no <eos>", response_length=7)
    assert len(seen.asked) == 1 and output.extra_fields["end_reason"] == "length" and not is_lost(output)
    output, _ = run("yes yes yes", response_length=2)
    assert output.extra_fields["end_reason"] == "length" and output.response_mask == [1, 1]


STUB = Path(__file__).parent / "stub"
EOS, CRASHES = 2, 3


class ScriptedWorker(AgentLoopWorkerBase):
    """Answers no, then yes; in the conversation CRASHES an answer at which the environment raises."""

    def __init__(self, *args, **kwargs):
        sys.path.insert(0, str(STUB))
        super().__init__(*args, **kwargs)
        self.server_manager = ScriptedEngine(self.rollout_config, self.answer)

    def answer(self, request_id, prompt_ids, sampling_params):
        words = self.tokenizer.decode(prompt_ids).split()
        word = "yes" if "again" in words else "crash" if words[2] == str(CRASHES) else "no"
        return [*self.tokenizer(word)["input_ids"], EOS]

    def children(self):
        """The processes that this worker has started."""
        return os.getpid(), [child.pid for child in psutil.Process().children(recursive=True)]


class Manager(AgentLoopManager):
    agent_loop_workers_class = ScriptedWorker


def test_each_worker_has_its_environment_and_rows_keep_their_order(ray_cluster, files, tmp_path):
    tokenizer = make_tokenizer([*WORDS, "no", "yes", "crash", "again"])
    tokenizer.save_pretrained(tmp_path / "model")
    settings = EnvironmentConfig(name=SKYRL_GYM, size=8, val_size=1, max_turns=2)
    rows = environment_rows(settings, files)["train"]
    rollout = {"name": "vllm", "mode": "async", "prompt_length": 12, "response_length": 40, "agent.num_workers": 2}
    config = compose_ppo(
        *SOUND, f"actor_rollout_ref.model.path={tmp_path / 'model'}", f"trainer.default_local_dir={tmp_path}/run",
        *(f"actor_rollout_ref.rollout.{name}={value}" for name, value in rollout.items()),
    )  # fmt: skip
    config.data.environment = dict(settings)
    manager = Manager(config, server_group())
    try:
        given = {"raw_prompt": "prompt", "extra_info": "extra_info", "agent_name": "agent_name"}
        columns = object_columns(**{name: [row[key] for row in rows] for name, key in given.items()})
        output = manager.generate_sequences(prompts_of(columns | {"sample_index": np.arange(8)}, width=4))
        processes = dict(ray.get([worker.children.remote() for worker in manager.agent_loop_workers]))
    finally:
        manager.close()
    assert np.flatnonzero(output.non_tensor_batch[LOST]).tolist() == [CRASHES]
    others = [i for i in range(8) if i != CRASHES]
    prompts, responses = output.batch["prompts"][others], output.batch["responses"][others, :9]
    assert [text.split()[-4] for text in tokenizer.batch_decode(prompts)] == [str(i) for i in others]
    assert set(tokenizer.batch_decode(responses)) == {"no <eos> q : again a : yes <eos>"}
    assert output.batch["response_mask"][others, :9].tolist() == [[1, 1, 0, 0, 0, 0, 0, 1, 1]] * 7
    scores = output.non_tensor_batch["reward_scores"]
    assert [scores[i] for i in others] == [{"score": 1.0, "acc": 1.0, "steps": 2}] * 7
    metrics = output.meta_info["metrics"]
    assert metrics["agent_loop/end/tool_failed"] == 1 / 8 and metrics["agent_loop/end/stop"] == 7 / 8
    assert len(processes) == 2 and all(processes.values())
    started = [pid for pids in processes.values() for pid in pids]
    assert becomes(lambda: not any(map(psutil.pid_exists, started)))
