"""Servers and workers that die while conversations are held: real processes, none forgotten."""

import subprocess
import threading

import numpy as np
import pytest
import torch

from tests.agents.agent_loop.parts import listed, prompts_of, server_group
from tests.agents.agent_loop.serve import ServerProcess
from tests.agents.agent_loop.test_killed_tools_run import command, save_calling_llama
from tests.agents.agent_loop.test_tool_agent_loop import CALL, TEMPLATE, WORDS
from tests.helpers.columns import object_columns
from tests.helpers.configs import compose_ppo
from tests.helpers.models import save_markov_llama
from tests.helpers.rl_run import metrics_rows, overrides
from tests.helpers.watched_runs import becomes
from verl.agents.agent_loop.manager import AgentLoopManager
from verl.reward.rows import LOST

pytestmark = pytest.mark.process
ANSWER = 12  # generated tokens: the call and its end, then "so" and the end


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    after = dict(zip(["add", *CALL], [*CALL, "<eos>"], strict=True)) | {"7": "so", "so": "<eos>"}
    return save_markov_llama(tmp_path_factory.mktemp("markov"), WORDS, after, TEMPLATE)


@pytest.fixture(scope="module")
def servers(model):
    started = [ServerProcess(model) for _ in range(2)]
    yield started
    for server in started:
        server.kill()


@pytest.fixture
def hold(model, tmp_path):
    """A function that holds conversations against servers: (handles, number, tool's class, more overrides)."""
    made = []

    def hold(handles, number, tool="LoggedTool", on_finished=None, **more):
        tools = listed(tmp_path, "tools", tool, log=str(tmp_path / "calls.log"))
        settings = {"name": "vllm", "mode": "async", "agent__num_workers": 2, "server__retry_delay": 0.1,
                    "agent__default_agent_loop": "tool_agent", "multi_turn__tool_config_path": tools}  # fmt: skip
        settings = {f"actor_rollout_ref__rollout__{key}": value for key, value in settings.items()}
        sizes = {"data__max_prompt_length": 8, "data__max_response_length": 40}
        config = compose_ppo(*overrides(tmp_path / "run", model, **sizes, **settings, **more))
        made.append(AgentLoopManager(config, server_group(*handles)))
        columns = object_columns(raw_prompt=[[{"role": "user", "content": "add"}]] * number)
        columns["sample_index"] = np.arange(number)
        return made[-1].generate_sequences(prompts_of(columns, width=8), on_finished)

    yield hold
    for manager in made:
        manager.close()


@pytest.mark.chaos
def test_a_worker_that_dies_is_replaced_and_its_conversations_start_again(ray_cluster, servers, hold, tmp_path):
    finished = []
    output = hold([servers[0].handle], 16, "DeadlyTool", lambda i, row: finished.append(i))
    assert (tmp_path / "calls.log.struck").exists()
    assert output.meta_info["metrics"]["agent_loop/restarted_workers"] == 1
    assert output.batch["response_mask"].sum(1).tolist() == [ANSWER] * 16 and set(finished) == set(range(16))
    assert not output.non_tensor_batch[LOST].any()
    events = (tmp_path / "calls.log").read_text().split()
    assert 16 <= events.count("begin") <= 16 + 8 and events.count("end") >= 16 - 8  # those of the dead are repeated


@pytest.mark.chaos
def test_conversations_of_a_server_that_dies_go_on_at_the_other_and_are_lost_without_one(
    ray_cluster, servers, hold, tmp_path
):
    handles = [server.handle for server in servers]
    log, go = tmp_path / "calls.log", tmp_path / "calls.log.go"

    def strike(server):
        assert becomes(lambda: log.exists() and log.read_text().count("begin"), 240)
        server.kill()
        go.touch()

    killer = threading.Thread(target=strike, args=(servers[1],))
    killer.start()
    journal = {"actor_rollout_ref__rollout__multi_turn__journal_tool_calls": "false"}  # each call is made
    output = hold(handles, 32, "HeldTool", **journal)
    killer.join()
    assert len(output) == 32 and not output.non_tensor_batch[LOST].any()
    assert output.batch["response_mask"].sum(1).tolist() == [ANSWER] * 32
    log.unlink()
    go.unlink()
    killer = threading.Thread(target=strike, args=(servers[0],))
    killer.start()
    output = hold(handles, 32, "HeldTool", **journal)
    killer.join()
    lost = output.non_tensor_batch[LOST]
    assert len(output) == 32 and lost.any()  # the calls were running when the last server died
    assert output.batch["response_mask"].sum(1)[~torch.tensor(lost)].tolist() == [ANSWER] * int((~lost).sum())


@pytest.mark.chaos
def test_every_sample_of_a_step_is_scored_or_dropped_when_the_slowest_are_cancelled(tmp_path):
    model = save_calling_llama(tmp_path / "model", sharpness=20.0)
    more = ["actor_rollout_ref.rollout.over_sample_rate=0.25", "trainer.total_training_steps=2", "trainer.save_freq=-1"]
    subprocess.run([*command(tmp_path / "run", model, "UnevenTool"), *more], check=True, timeout=300)
    rows = metrics_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        dropped = row["training/dropped_samples"]
        assert row["training/requested_samples"] == 16 == row["training/scored_samples"] + dropped
        assert dropped >= row["training/dropped_samples/lost"] >= 1
        assert row["agent_loop/end/cancelled"] == row["training/dropped_samples/lost"] / 16 <= 0.25


@pytest.mark.slow
def test_remax_gets_its_greedy_answers_from_servers_that_are_awake(model, tmp_path):
    more = ["algorithm.adv_estimator=remax", "trainer.total_training_steps=2", "trainer.save_freq=-1"]
    subprocess.run([*command(tmp_path / "run", model), *more], check=True, timeout=300)
    rows = metrics_rows(tmp_path / "run")
    assert [row["training/scored_samples"] for row in rows] == [16, 16]
    assert all(row["training/dropped_samples"] == 0 for row in rows)
