"""Workers that are Ray actors, on a scripted engine: the slowest are cancelled, and one router serves them all."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import ray

from tests.agents.agent_loop.parts import prompts_of, server_group
from tests.agents.agent_loop.scripted import ScriptedEngine
from tests.helpers.columns import object_columns
from tests.helpers.configs import SOUND, compose_ppo
from tests.helpers.models import make_tokenizer
from verl.agents.agent_loop import manager as manager_module
from verl.agents.agent_loop.manager import AgentLoopManager
from verl.agents.agent_loop.worker import AgentLoopWorkerBase
from verl.reward.rows import LOST
from verl.rollout.replica import ServerHandle
from verl.single_controller.ray.watchdog import PhaseTimeout

pytestmark = pytest.mark.process
EOS, SLOW, SLOW_S = 2, 9, 300.0


class ScriptedWorker(AgentLoopWorkerBase):
    """Answers a prompt at once, but one that begins with SLOW after SLOW_S."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.asks, self.server_manager = self.server_manager, ScriptedEngine(self.rollout_config, self.answer)

    async def answer(self, request_id, prompt_ids, sampling_params):
        await asyncio.sleep(SLOW_S if prompt_ids[0] == SLOW else 0)
        return [7, EOS]

    async def acquire(self, conversation):
        return await self.asks._routed("acquire", conversation)


class DyingWorker(ScriptedWorker):
    """A ScriptedWorker; the first one that has to cancel conversations while it holds any dies."""

    async def cancel_rest(self):
        struck = Path(self.config.trainer.default_local_dir + ".struck")
        if not all(task.done() for task in self._tasks):
            with contextlib.suppress(FileExistsError):
                struck.touch(exist_ok=False)
                os._exit(1)
        await super().cancel_rest()


class StoppingWorker(ScriptedWorker):
    """A ScriptedWorker that stops, with all its threads, when it gets a prompt that begins with SLOW."""

    async def answer(self, request_id, prompt_ids, sampling_params):
        if prompt_ids[0] == SLOW:
            os.kill(os.getpid(), signal.SIGSTOP)
        return await super().answer(request_id, prompt_ids, sampling_params)


@pytest.fixture
def manager(ray_cluster, tmp_path):
    """A function that makes a manager of two workers of a class, with two servers."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    made = []

    def make(worker, *overrides):
        class Manager(AgentLoopManager):
            agent_loop_workers_class = worker

        rollout = {"name": "vllm", "mode": "async", "prompt_length": 4, "response_length": 8, "agent.num_workers": 2}
        config = compose_ppo(
            *SOUND, f"actor_rollout_ref.model.path={tmp_path / 'model'}", f"trainer.default_local_dir={tmp_path}/run",
            *(f"actor_rollout_ref.rollout.{name}={value}" for name, value in rollout.items()), *overrides,
        )  # fmt: skip
        made.append(Manager(config, server_group(ServerHandle("127.0.0.1:1"), ServerHandle("127.0.0.1:2"))))
        return made[-1]

    yield make
    for one in made:
        one.close()


def generated(manager, first_ids, on_finished=None):
    columns = object_columns(raw_prompt_ids=[[i, 5] for i in first_ids])
    columns["sample_index"] = np.arange(len(first_ids))
    return manager.generate_sequences(prompts_of(columns, width=4), on_finished)


OVER_SAMPLE = "actor_rollout_ref.rollout.over_sample_rate=0.25"


def test_the_slowest_of_all_workers_are_cancelled(manager):
    made, finished = manager(ScriptedWorker, OVER_SAMPLE), []
    for _ in range(2):  # a step leaves nothing behind
        started = time.monotonic()
        output = generated(made, [5, 6, SLOW, 5, 6, SLOW, 6, 5], lambda i, row: finished.append(i))
        assert time.monotonic() - started < SLOW_S
        assert output.non_tensor_batch[LOST].nonzero()[0].tolist() == [2, 5]
        assert output.batch["response_mask"].sum(1).tolist() == [2, 2, 0, 2, 2, 0, 2, 2]
        assert output.meta_info["metrics"]["agent_loop/end/cancelled"] == 0.25
    assert sorted(finished) == sorted([0, 1, 3, 4, 6, 7] * 2)


def test_a_worker_that_dies_after_the_cut_does_not_hold_its_conversations_again(manager):
    made = manager(DyingWorker, OVER_SAMPLE)
    started = time.monotonic()
    output = generated(made, [5, 6, 6, 5, 6, SLOW, SLOW, 5])
    assert time.monotonic() - started < SLOW_S
    assert output.meta_info["metrics"]["agent_loop/restarted_workers"] == 1
    assert output.non_tensor_batch[LOST].tolist() == [False] * 4 + [True] * 4


def test_workers_share_the_counts_of_running_requests(manager):
    made = manager(ScriptedWorker)
    workers = made.agent_loop_workers
    assert [ray.get(workers[i % 2].acquire.remote(f"conversation {i}")) for i in range(4)] == [0, 1, 0, 1]
    assert ray.get(workers[1].acquire.remote("conversation 0")) == 0  # where its first turn was
    made._reset_router()
    assert [ray.get(worker.acquire.remote(name)) for worker, name in zip(workers, "ab", strict=True)] == [0, 1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("on_finished", [None, lambda i, row: None], ids=["at the end", "one by one"])
def test_a_worker_that_stops_is_named_within_the_limit(monkeypatch, manager, on_finished):
    monkeypatch.setattr(manager_module, "CLOSE_TIMEOUT_S", 1)
    made = manager(StoppingWorker, "trainer.watchdog.generate=2")
    message = r"^agent loop worker 1 \(stopped\) did not finish generate_sequences within trainer.watchdog.generate=2 s"
    started = time.monotonic()
    with pytest.raises(PhaseTimeout, match=message):
        generated(made, [5, 6, 5, SLOW], on_finished)
    assert 2 <= time.monotonic() - started < 30


@pytest.mark.timeout(120)
def test_a_router_that_stops_is_named_within_the_limit(manager):
    made = manager(ScriptedWorker, "trainer.watchdog.generate=2")
    pid = ray.get(made.router.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(PhaseTimeout, match=r"^the router of requests \(stopped\) did not finish reset within"):
            generated(made, [5])
    finally:
        os.kill(pid, signal.SIGKILL)
