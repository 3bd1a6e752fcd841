"""Faults that users of asynchronous trainers report, and the tests that fail if one of them is put in.

Modules without a folder are in tests/trainer/fully_async.

| fault | tests |
|---|---|
| without staleness, a run differs from the synchronous one | test_runs: without_staleness_a_run_equals |
| ratios are taken against another policy than the one that generated | test_runs: stale_and_partial_samples |
| that is possible by settings | test_settings: what_cannot_work_is_refused; tests/algos/test_decoupled |
| prompts are lost or repeated across a resume | test_kills: a_killed_run_is_resumed; below: a_checkpoint_has |
| a checkpoint is incomplete | test_kills: a_run_that_is_killed_while_it_saves; test_rollouter: a_checkpoint_has |
| a continued generation forgets its budget | tests/rollout/test_interrupted: an_interrupted_turn_is_one_answer |
| a continued generation loses columns | below: samples_of_several_versions_have_all_columns |
| a slow source of prompts is starved | test_rollouter: a_slow_source_of_prompts, prompts_that_take_longer |
| a sample is recycled for ever | test_rollouter: prompts_that_are_too_old; test_journal: nothing_follows_an_end |
| a cache of old weights is read | tests/rollout/test_interrupted: tokens_before_and_after_new_weights |
| a dead engine counts as success | below: a_server_that_has_ended; test_rollouter: a_dead_server_ends_the_run |
| a start waits for ever for CPUs | test_runs: too_few_cpus_for_the_servers |
| a batch is older than the bound | below: an_update_refuses_a_batch_that_is_too_old; test_staleness |
| a sample is trained twice | test_journal: nothing_follows_an_end; test_kills |
| a failed grade of a checkpoint ends every resumed run | below: a_grade_that_failed; test_kills: reward |
| parallel requests of a program end the run at a sync | below: parallel_requests; test_runs: programs |
"""

import asyncio
import json
import operator
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.http_server import serving
from tests.trainer.fully_async.test_rollouter import BATCH, N, Worker, begun
from verl.agents.agent_loop.base import AgentLoopOutput
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.reward.pool import Failure
from verl.reward.rows import GRADED
from verl.trainer.fully_async.phase import SAMPLE_ID, SPANS, SeparateRolloutPhase
from verl.trainer.fully_async.samples import Group, Sample
from verl.trainer.fully_async.staleness import StalenessBound
from verl.trainer.fully_async.trainer import FullyAsyncTrainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.run.timing import StepFailed


def queued(number, k, spans, **fields):
    tokens = sum(count for _, count in spans)
    output = AgentLoopOutput(
        prompt_ids=[7, 8], response_ids=list(range(10, 10 + tokens)), response_mask=[1] * tokens,
        response_logprobs=[-0.5 * i for i in range(tokens)], extra_fields=fields, num_turns=2,
    )  # fmt: skip
    return Sample(f"{number}/{k}", seed=k, state="queued", output=output, spans=spans, result={"score": number + k})


def test_samples_of_several_versions_have_all_columns():
    """Those of the prompt, of the conversation, and the log-prob of each token, in the row of the sample. A loop that
    does not say why it ended did so by its last token."""
    rollout = RolloutConfig(name="vllm", prompt_length=4, response_length=6, n=2, calculate_log_probs=True,
                            stop_token_ids=[13])  # fmt: skip
    phase = object.__new__(SeparateRolloutPhase)
    phase.rollout_config, phase.tokenizer = rollout, SimpleNamespace(pad_token_id=0)
    groups = []
    for number, spans in enumerate(([(0, 2), (1, 1), (2, 3)], [(2, 4)])):
        columns = {"uid": str(number), "data_source": f"source {number}", "extra_info": {"index": number}}
        arrays = {name: np.array([value], dtype=object) for name, value in columns.items()}
        ended = {} if number else {"end_reason": "turns"}
        samples = [queued(number, k, spans, notes=f"{number}/{k}", **ended) for k in range(2)]
        groups.append(Group(number, DataProto(None, arrays, {}), {}, 1, samples))
    batch, _ = phase.batch_of(groups, 5)
    assert batch.meta_info == {"global_steps": 5, "temperature": 1.0}
    columns = batch.non_tensor_batch
    assert columns[SAMPLE_ID].tolist() == columns["notes"].tolist() == ["0/0", "0/1", "1/0", "1/1"]
    assert columns["data_source"].tolist() == ["source 0"] * 2 + ["source 1"] * 2
    assert [row["index"] for row in columns["extra_info"]] == [0, 0, 1, 1]
    assert columns["weights_version"].tolist() == [0, 0, 2, 2]
    assert columns[SPANS].tolist() == [[(0, 2), (1, 1), (2, 3)]] * 2 + [[(2, 4)]] * 2
    assert [result["score"] for result in columns[GRADED]] == [0, 1, 1, 2]
    assert columns["end_reason"].tolist() == ["turns", "turns", "stop", "stop"]
    assert columns["__num_turns__"].tolist() == [2] * 4
    assert batch.batch["responses"][0].tolist() == [10, 11, 12, 13, 14, 15]
    assert torch.equal(batch.batch["rollout_log_probs"][0], -0.5 * torch.arange(6))
    assert batch.batch["response_mask"].sum(1).tolist() == [6, 6, 4, 4]


def test_an_update_refuses_a_batch_that_is_too_old(monkeypatch):
    updated = []
    monkeypatch.setattr(RayPPOTrainer, "_update_actor", lambda self, batch: updated.append(self.global_steps))
    trainer = object.__new__(FullyAsyncTrainer)
    trainer.rollout = SimpleNamespace(bound=StalenessBound(batch=2, sync_every=1, threshold=1.0, versions=1))
    trainer.run_log = SimpleNamespace(timing=defaultdict(float))
    for step, refused in ((4, False), (5, True)):
        trainer.global_steps, batch = step, DataProto(None, {"weights_version": np.array([4, 2])}, {})
        if refused:
            with pytest.raises(StepFailed, match="StalenessError: step 5 would train a sample of weights version 2"):
                trainer._update_actor(batch)
        else:
            trainer._update_actor(batch)
    assert updated == [4]


def test_a_server_that_has_ended_or_whose_engine_has_failed_is_an_error():
    phase, failed = object.__new__(SeparateRolloutPhase), "server_0 .*its engine has failed.*{}.*resumes the run"
    phase.rollout_config, phase.server_names = SimpleNamespace(server=SimpleNamespace(timeout=5.0)), ["server_0"]
    statuses = [200, 404, 503]
    with serving(lambda request: (statuses.pop(0), {})) as (url, _):
        phase.replicas = [SimpleNamespace(server_address=url.removeprefix("http://"))]
        phase.check_servers()
        phase.check_servers()
        with pytest.raises(RuntimeError, match=failed.format("Service Unavailable")):
            phase.check_servers()
    with pytest.raises(RuntimeError, match=failed.format("refused")):
        phase.check_servers()


class Parallel(Worker):
    """Conversations that make two requests at a time, each of `seconds`."""

    async def _run_agent_loop(self, params, info, **row):
        calls = [self.server_manager.generate(row["request_id"], self.seconds(row["number"])) for _ in range(2)]
        tokens = sum(await asyncio.gather(*calls))
        return AgentLoopOutput(prompt_ids=[1], response_ids=[2] * tokens, response_mask=[1] * tokens, reward_score=1.0)


class Ungraded(Worker):
    """Conversations without a score."""

    async def _run_agent_loop(self, params, info, **row):
        output = await super()._run_agent_loop(params, info, **row)
        return output.model_copy(update={"reward_score": None})

    def _batch_of(self, outputs):
        return DataProto(None, {}, {})


class Grader:
    """Stands in for a RewardStream; the first grades fail, as where the process of a reward function was killed."""

    def __init__(self, failures):
        self.failures, self.graded = failures, 0

    async def grade(self, index, sample):
        self.graded += 1
        return Failure("error", "ended its process with exit code -9") if self.graded <= self.failures else 1.0

    def close(self):
        pass


def wait_until(run, condition):
    run.rollouter.call(run.rollouter._until(condition), limit=30)


def test_parallel_requests_of_a_conversation_are_interrupted_and_continue(tmp_path):
    with begun(tmp_path, lambda number: 0.1 if number == 3 else 0.0, worker=Parallel, threshold=1.0) as run:
        run.steps(1, 4)
        assert sorted(run.trained) == list(range(8))
        states = run.states()["3/0"]
    assert "interrupted" in states and all(map(operator.ne, states, states[1:]))


def test_a_grade_that_failed_before_a_checkpoint_is_made_again_after_the_resume(tmp_path):
    with begun(tmp_path, lambda number: 0.0, Grader(2), worker=Ungraded) as run:
        groups = run.rollouter.groups
        wait_until(run, lambda: len(groups) == BATCH and all(group.is_ready for group in groups.values()))
        saved = json.loads(json.dumps(run.rollouter.hold()))
    assert sum(isinstance(sample["result"], dict) for group in saved["groups"] for sample in group["samples"]) == 2
    with begun(tmp_path, lambda number: 0.0, Grader(0), saved, worker=Ungraded) as run:
        taken = run.rollouter.take(1, 30)
        assert [sample.result for group in taken for sample in group.samples] == [1.0] * BATCH * N
        assert run.rollouter.reward.graded == 2
        run.journal.check()


def test_a_checkpoint_has_prompts_that_were_drawn_and_not_started(tmp_path):
    with begun(tmp_path, lambda number: 0.0, threshold=0.5) as run:
        wait_until(run, lambda: run.rollouter.started == 3 and len(run.rollouter.waiting) == 1)
        saved = json.loads(json.dumps(run.rollouter.hold()))
    assert [group["number"] for group in saved["groups"]] == [0, 1, 2, 3]
    with begun(tmp_path, lambda number: 0.0, saved=saved, threshold=0.5) as run:
        run.steps(1, 4)
        assert sorted(run.trained) == list(range(8))


def test_a_sync_that_waits_for_a_conversation_without_an_end_is_an_error(tmp_path):
    with begun(tmp_path, lambda number: 3600.0) as run:
        wait_until(run, lambda: len(run.rollouter.running) == BATCH * N)
        with pytest.raises(RuntimeError, match="sync of version 1 did not end within trainer.watchdog.generate=0.2 s"):
            run.rollouter.sync(1, ["server_0"], False, lambda: None, 0.2)
