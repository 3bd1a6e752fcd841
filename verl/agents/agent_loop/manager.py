"""Distributes the conversations of a batch among workers, and collects their rows."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

import numpy as np
import ray
from loguru import logger
from omegaconf import DictConfig, OmegaConf

from verl.agents.agent_loop.base import AgentLoopMetrics
from verl.agents.agent_loop.prometheus_utils import update_prometheus_config
from verl.agents.agent_loop.rows import concat_rows, use_loop_scores
from verl.agents.agent_loop.worker import SEED, AgentLoopWorker
from verl.config.compose import to_settings
from verl.config.defaults import resolved
from verl.config.model import HFModelConfig
from verl.config.ppo import PPOConfig
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.rollout.replica import CLOSE_TIMEOUT_S, one_replica_per_engine
from verl.rollout.sampling import GenerationRequest
from verl.single_controller.ray import RayWorkerGroup
from verl.single_controller.ray.watchdog import get_within, timeout_error
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.request_router import RequestRouter


class AgentLoopManager:
    """Distributes a batch's conversations among `rollout.agent.num_workers` workers, against the servers of all ranks.

    Workers are Ray actors; with trainer.local=true there is one, in this process. A subclass, named by
    rollout.agent.agent_loop_manager_class, may set `agent_loop_workers_class` before this `__init__`.

    Managers, workers and loops get the trainer's configuration as a DictConfig, as those that were written for verl
    expect; `rollout_config` has the typed settings of the rollout.
    """

    agent_loop_workers_class: type[AgentLoopWorker] = AgentLoopWorker

    def __init__(self, config: DictConfig, worker_group: Any = None, rm_resource_pool: Any = None) -> None:
        self.config, self.worker_group = config, worker_group
        self.rollout_config = to_settings(config.actor_rollout_ref.rollout, RolloutConfig)
        model = to_settings(config.actor_rollout_ref.model, HFModelConfig)
        self.rollout_replicas = one_replica_per_engine(self.rollout_config, model, worker_group)
        self.server_handles = [replica.server_handle for replica in self.rollout_replicas]
        self.server_addresses = [replica.server_address for replica in self.rollout_replicas]
        if self.rollout_config.prometheus.enable:
            update_prometheus_config(self.rollout_config.prometheus, self.server_addresses)
        if self.rollout_config.over_sample_rate and not self.reports_finished:
            key = f"actor_rollout_ref.rollout.over_sample_rate={self.rollout_config.over_sample_rate}"
            raise ValueError(f"{key} needs agent loop workers whose generate_sequences is not overridden; set it to 0.")
        cls, servers = self.agent_loop_workers_class, len(self.server_handles)
        self._runner: asyncio.Runner | None = None
        if config.trainer.local:
            self._runner = asyncio.Runner()
            self.router: Any = RequestRouter(servers)
            self.agent_loop_workers = [cls(config, self.server_handles, router=self.router)]
            return
        # Resolved here: the actors have no resolvers of the user's own.
        plain = OmegaConf.create(resolved(config))
        self.router = ray.remote(num_cpus=0)(RequestRouter).remote(servers) if servers > 1 else None
        actor = cls if hasattr(cls, "remote") else ray.remote(num_cpus=0)(cls)

        def start_worker(i: int) -> Any:
            named = actor.options(name=f"agent_loop_worker_{i}_{uuid4().hex[:8]}")
            return named.remote(plain, self.server_handles, router=self.router)

        self._start_worker = start_worker
        self.agent_loop_workers = [start_worker(i) for i in range(self.rollout_config.agent.num_workers)]
        ready = [worker.__ray_ready__.remote() for worker in self.agent_loop_workers]  # their errors are raised here
        labels = [f"agent loop worker {i}" for i in range(len(ready))]
        get_within(config.trainer.watchdog, ready, labels, "__ray_ready__", self.agent_loop_workers)

    @property
    def reports_finished(self) -> bool:
        """Whether `generate_sequences` reports each conversation as it ends: no subclass overrides it."""
        is_standard = self.agent_loop_workers_class.generate_sequences is AgentLoopWorker.generate_sequences
        return is_standard and type(self).generate_sequences is AgentLoopManager.generate_sequences

    def generate_sequences(
        self, prompts: DataProto, on_finished: Callable[[int, DataProto], None] | None = None
    ) -> DataProto:
        """meta_info["n"] conversations for each prompt, those of one prompt adjacent; see AgentLoopWorker.

        `on_finished` is called, here, with the row number and the batch of one row when a conversation has ended.
        """
        rollout = self.rollout_config
        request = GenerationRequest.from_batch(prompts, rollout)
        batch = conversations_of(prompts, request, rollout)
        # Greedy answers are ReMax's baselines, of which every prompt needs one.
        wanted = None
        if rollout.over_sample_rate and not prompts.meta_info.get("validate") and not request.sampling.greedy:
            wanted = math.ceil(len(batch) * (1 - rollout.over_sample_rate))
        finished = _FinishedRows(wanted, on_finished)
        batch.meta_info["report_finished"] = wanted is not None or on_finished is not None
        self._reset_router()
        restarts = 0
        if self._runner is not None:
            parts = [self._runner.run(self._generate_here(batch, finished))]
        else:
            calls = _WorkerCalls(self, batch, finished)
            parts, restarts = calls.run(), calls.deaths
        prompt_tokens, cached_tokens = np.sum([part.meta_info["prefix"] for part in parts], axis=0)
        # First the reported rows, as they came, then the others: those of the parts, in the order of the batch.
        numbers = [*finished.rows, *(i for i in range(len(batch)) if i not in finished.rows)]
        parts = [part for part in [*finished.rows.values(), *parts] if len(part)]
        output = use_loop_scores(concat_rows(parts)[np.argsort(numbers)])
        seconds = [row for part in parts for row in part.meta_info["metrics"]]
        metrics = conversation_metrics(seconds, output.non_tensor_batch.get("end_reason", ()))
        metrics["agent_loop/prefix_hit_rate"] = float(cached_tokens / max(prompt_tokens, 1))
        metrics["agent_loop/restarted_workers"] = float(restarts)
        output.meta_info = {"metrics": metrics}
        return self._with_versions(output)

    def _reset_router(self, lost: bool = True) -> None:
        """See RequestRouter.reset: a server that failed in the step before may have recovered."""
        if self._runner is not None:
            self.router.reset(lost)
        elif self.router is not None:
            call = [self.router.reset.remote(lost)]
            get_within(self.config.trainer.watchdog, call, ["the router of requests"], "reset", [self.router])

    async def _generate_here(self, batch: DataProto, finished: "_FinishedRows") -> DataProto:
        """The part of the only worker: rows that it did not report to `finished`."""
        worker = self.agent_loop_workers[0]
        call = asyncio.create_task(worker.generate_sequences(batch))
        items = [] if batch.meta_info["report_finished"] else [None]
        while None not in items:
            items = await worker.next_finished()
            for number, row in filter(None, items):
                if finished.add(number, row):
                    await worker.cancel_rest()
        return await call

    def _with_versions(self, output: DataProto) -> DataProto:
        """With column weights_version: that of a conversation's turns, which must be one."""
        versions = set()
        for of_turns in output.non_tensor_batch.pop("weights_versions", ()):
            versions |= {version for version in of_turns or () if version is not None}
        if len(versions) > 1:
            raise RuntimeError(f"conversations were generated by several weights versions: {sorted(versions)}")
        version = versions.pop() if versions else 0
        output.non_tensor_batch["weights_version"] = np.full(len(output), version, dtype=np.int64)
        return output

    def wake_up(self) -> None:
        """Let the ranks' rollouts hold the newest weights and take requests."""
        self.worker_group.rollout_mode()

    def sleep(self) -> None:
        """Let the rollouts free their memory."""
        self.worker_group.trainer_mode()

    def clear_kv_cache(self) -> None:
        """Let the servers forget cached prefixes."""

        async def all_servers() -> None:
            await asyncio.gather(*(replica.clear_kv_cache() for replica in self.rollout_replicas))

        asyncio.run(all_servers())

    def close(self) -> None:
        """End the workers."""
        if self._runner is not None:
            self._runner.run(self.agent_loop_workers[0].close())
            self._runner.close()
        else:
            closing = [worker.close.remote() for worker in self.agent_loop_workers]
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
            for worker in self.agent_loop_workers:
                ray.kill(worker)


class _WorkerCalls:
    """The generation of a batch by all workers, each of which gets a share of the rows.

    Rows that a worker reports when they have ended go to `finished`. The rows of a worker that dies are generated
    again by a new one.
    """

    def __init__(self, manager: AgentLoopManager, batch: DataProto, finished: "_FinishedRows") -> None:
        self.manager, self.batch, self.finished = manager, batch, finished
        self.workers = manager.agent_loop_workers
        shares = np.array_split(np.arange(len(batch)), len(self.workers))
        self.shares = [rows for rows in shares if len(rows)]  # numbers of each worker's rows
        # Calls of generate_sequences and of next_finished that have not ended, and the numbers of their workers.
        self.calls: dict[ray.ObjectRef, int] = {}
        self.reports: dict[ray.ObjectRef, int] = {}
        self.parts: dict[int, DataProto] = {}  # results of generate_sequences, by worker
        self.deaths = 0
        self.is_over = False  # enough conversations have ended

    def run(self) -> list[DataProto]:
        """The workers' parts in order, without the rows that were reported."""
        limit = self.manager.config.trainer.watchdog.generate
        deadline = time.monotonic() + (limit or 0.0)
        for i in range(len(self.shares)):
            self._start(i)
        while self.calls or self.reports:
            left = None if limit is None else max(0.0, deadline - time.monotonic())
            ended, _ = ray.wait([*self.reports, *self.calls], timeout=left)
            if not ended:
                raise self._timeout_error(limit)
            self._take(ended[0])
        return [self.parts[i] for i in range(len(self.shares))]

    def _start(self, i: int) -> None:
        columns = {name: column[self.shares[i]] for name, column in self.batch.non_tensor_batch.items()}
        share = DataProto(None, columns, {**self.batch.meta_info, "cancelled": self.is_over})
        self.calls[self.workers[i].generate_sequences.remote(share)] = i
        if self.batch.meta_info["report_finished"]:
            self.reports[self.workers[i].next_finished.remote()] = i

    def _take(self, call: Any) -> None:
        """Take the result of a call that has ended."""
        is_report = call in self.reports
        i = self.reports.pop(call) if is_report else self.calls.pop(call)
        try:
            result = ray.get(call)
        except ray.exceptions.RayActorError:
            if is_report and i in self.calls.values():
                return  # the worker's other call fails too
            self.deaths += 1
            if self.deaths > self.manager.rollout_config.server.max_attempts:
                raise
            self._restart(i)
            return
        if is_report:
            self._take_finished(i, result)
        else:
            self.parts[i] = result

    def _restart(self, i: int) -> None:
        count = len(self.shares[i])
        logger.warning(f"agent loop worker {i} died; a new one starts its {count} conversations again")
        self.parts.pop(i, None)
        self.reports = {report: worker for report, worker in self.reports.items() if worker != i}
        self.finished.forget(self.shares[i])
        self.workers[i] = self.manager._start_worker(i)
        self.manager._reset_router(lost=False)
        self._start(i)

    def _take_finished(self, i: int, items: list[tuple[int, DataProto] | None]) -> None:
        """Take what `next_finished` of worker i returned."""
        for number, row in filter(None, items):
            if self.finished.add(int(self.shares[i][number]), row) and not self.is_over:
                self.is_over = True
                cancelled = [worker.cancel_rest.remote() for worker in self.workers[: len(self.shares)]]
                ray.wait(cancelled, num_returns=len(cancelled), timeout=CLOSE_TIMEOUT_S)  # the calls say who hangs
        if None not in items:
            self.reports[self.workers[i].next_finished.remote()] = i

    def _timeout_error(self, limit: float) -> Exception:
        late = {**self.reports, **self.calls}
        names = [f"agent loop worker {i}" for i in late.values()]
        actors = [self.workers[i] for i in late.values()]
        group = self.manager.worker_group
        ranks = group.actors_by_label() if isinstance(group, RayWorkerGroup) else {}
        return timeout_error(list(late), names, "generate_sequences", limit, actors, ranks)


class _FinishedRows:
    """Collects and reports rows that have finished, and says when `wanted` of them have come (None: wait for all)."""

    def __init__(self, wanted: int | None, on_finished: Callable[[int, DataProto], None] | None) -> None:
        self.wanted, self.on_finished = wanted, on_finished
        self.rows: dict[int, DataProto] = {}  # number -> batch of one row

    def add(self, number: int, row: DataProto) -> bool:
        """A row has finished; returns whether the others may be cancelled."""
        self.rows[number] = row
        if self.on_finished is not None:
            self.on_finished(number, row)
        return self.wanted is not None and len(self.rows) >= self.wanted

    def forget(self, numbers: Iterable[int]) -> None:
        """Discard rows that are generated again."""
        for number in numbers:
            self.rows.pop(int(number), None)


def conversations_of(prompts: DataProto, request: GenerationRequest, rollout: RolloutConfig) -> DataProto:
    """The rows of a request's conversations, n for each prompt, as AgentLoopWorker takes them.

    Columns are those of the prompts and the seeds; meta_info has the sampling parameters, global_steps and validate.
    """
    params: dict[str, Any] = request.sampling.parameters()
    params |= {"repetition_penalty": rollout.repetition_penalty, "logprobs": rollout.calculate_log_probs}
    params |= {"stop_token_ids": list(request.eos_ids), "ignore_eos": rollout.ignore_eos}
    if request.records_masks and rollout.engine_returns_kept_tokens:
        params["kept_tokens"] = True
    seeds = [row[0] + k for row in request.seeds for k in range(request.n)]  # as vLLM seeds the samples of a prompt
    rows = DataProto(None, dict(prompts.non_tensor_batch), {}).repeat(request.n, interleave=True)
    rows.non_tensor_batch[SEED] = np.array(seeds, dtype=np.int64)
    names = ("global_steps", "validate")
    rows.meta_info = {"sampling": params}
    rows.meta_info |= {name: prompts.meta_info[name] for name in names if name in prompts.meta_info}
    return rows


def conversation_metrics(rows: list[dict[str, float]], end_reasons: Iterable[str | None]) -> dict[str, float]:
    """Metrics of the conversations, from the seconds that each of them spent (see AgentLoopMetrics)."""
    metrics: dict[str, Any] = {}
    for name in AgentLoopMetrics.model_fields:
        values = np.array([row[name] for row in rows])
        prefix = f"timing_s/agent_loop/{name}"
        metrics |= {f"{prefix}/min": values.min(), f"{prefix}/max": values.max(), f"{prefix}/mean": values.mean()}
    slowest = int(np.argmax([sum(row.values()) for row in rows]))
    metrics |= {f"timing_s/agent_loop/slowest/{name}": value for name, value in rows[slowest].items()}
    reasons = Counter(reason for reason in end_reasons if reason)
    metrics |= {f"agent_loop/end/{reason}": count / len(rows) for reason, count in sorted(reasons.items())}
    return {name: float(value) for name, value in metrics.items()}


def manager_class(config: PPOConfig) -> type[AgentLoopManager]:
    """The class that rollout.agent.agent_loop_manager_class names, by default AgentLoopManager."""
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    return AgentLoopManager if name is None else load_class_from_fqn(name, "agent loop manager")
