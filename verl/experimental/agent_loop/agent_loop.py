"""Workers that hold many conversations at a time, and the manager that shares a batch among them."""

import asyncio
import faulthandler
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import numpy as np
import ray
import torch
from loguru import logger
from omegaconf import DictConfig, OmegaConf

from verl.config.compose import omega_conf_to_dataclass
from verl.data.rl_dataset import get_dataset_class
from verl.experimental.agent_loop.base import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    AsyncLLMServerManager,
    ConversationTooLong,
    DictConfigWrap,
    _agent_loop_registry,
    make_agent_loop,
    register,
)
from verl.experimental.agent_loop.prometheus_utils import update_prometheus_config
from verl.experimental.agent_loop.rows import (
    column_of,
    empty_output,
    is_lost,
    joined,
    routed_experts,
    with_own_scores,
)
from verl.experimental.agent_loop.utils import resolve_config_path
from verl.protocol import DataProto
from verl.reward.rows import LOST
from verl.single_controller.base.worker import STACK_SIGNAL
from verl.single_controller.ray import RayWorkerGroup
from verl.single_controller.ray.watchdog import get_within, hanging
from verl.utils.import_utils import import_external_libs, load_class_from_fqn
from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_attr
from verl.utils.tokenizer import policy_tokenizer
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import (
    RequestRouter,
    ServerHandle,
    ServerUnreachable,
    TokenOutput,
    one_replica_per_engine,
)
from verl.workers.rollout.sampling import GenerationRequest, right_padded

__all__ = [
    "AgentLoopBase", "AgentLoopManager", "AgentLoopMetrics", "AgentLoopOutput", "AgentLoopWorker",
    "AgentLoopWorkerBase", "AsyncLLMServerManager", "DictConfigWrap", "TokenOutput", "get_trajectory_info", "register",
]  # fmt: skip

CLOSE_TIMEOUT_S = 20
SEED = "__seed__"  # column: seed of the conversation


class AgentLoopWorkerBase:
    """Holds the conversations of its rows, all at the same time; a plain class that `ray.remote` takes.

    Args:
        config: the trainer's configuration.
        server_handles: the rollout servers.
        reward_router_address: not used; rewards are computed by the trainer.
        router: see AsyncLLMServerManager.
    """

    def __init__(
        self, config: DictConfig, server_handles: list[ServerHandle], reward_router_address: str | None = None,
        router: Any = None,
    ) -> None:  # fmt: skip
        self.config, self.reward_router_address = config, reward_router_address
        if not config.trainer.local:
            faulthandler.register(STACK_SIGNAL, all_threads=True)
        import_external_libs(config.actor_rollout_ref.model.get("external_lib"))
        self.server_manager = AsyncLLMServerManager(config, server_handles, router=router)
        self.rollout_config = self.server_manager.rollout_config
        self.tokenizer, self.processor = policy_tokenizer(config)
        self.dataset_cls = get_dataset_class(config.data)
        self.trainer_config = DictConfigWrap(config)
        if path := self.rollout_config.agent.agent_loop_config_path:
            for entry in OmegaConf.load(resolve_config_path(path)):
                settings = OmegaConf.to_container(entry, resolve=True)
                _agent_loop_registry[settings.pop("name")] = settings
        self._finished: asyncio.Queue[tuple[int, DataProto] | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task] = []  # the running conversations
        self._cancels_rest = False
        trace = self.rollout_config.trace
        if trace.backend is not None:
            RolloutTraceConfig.init(
                config.trainer.project_name, config.trainer.experiment_name, trace.backend, trace.token2text,
                trace.max_samples_per_step_per_worker, folder=f"{config.trainer.default_local_dir}/rollout_traces",
            )  # fmt: skip

    async def close(self) -> None:
        """Close the connections to the servers."""
        await self.server_manager.close()

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """A conversation for each row, as rows of `prompts` [B, P], `responses` [B, R] and the other tensors.

        Non-tensor columns are the arguments of the loops' `run`. meta_info["sampling"] has the sampling parameters,
        column __seed__ the seeds. With meta_info["cancelled"] no conversation runs, and all rows are lost.
        """
        meta, size = batch.meta_info, len(batch)
        columns = batch.non_tensor_batch
        index = columns.get("sample_index", np.arange(size))
        infos = await get_trajectory_info(meta.get("global_steps", -1), index.tolist(), meta.get("validate", False))
        rows = [{name: column[i] for name, column in columns.items()} for i in range(size)]
        before = self.server_manager.prompt_tokens, self.server_manager.cached_tokens

        self._cancels_rest = False

        async def hold(i: int) -> AgentLoopOutput | None:
            if meta.get("cancelled"):
                return empty_output("cancelled")
            try:
                output = await self._run_agent_loop(dict(meta["sampling"]), infos[i], **rows[i])
            except asyncio.CancelledError:
                if not self._cancels_rest:
                    raise
                return empty_output("cancelled")
            if meta.get("report_finished") and not is_lost(output):
                self._finished.put_nowait((i, self._postprocess([output])))
            return output

        self._tasks = tasks = [asyncio.create_task(hold(i)) for i in range(size)]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:  # one row raised: the others' requests are aborted
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if meta.get("report_finished"):
                self._finished.put_nowait(None)
        result = self._postprocess(outputs)
        manager = self.server_manager
        result.meta_info["prefix"] = [manager.prompt_tokens - before[0], manager.cached_tokens - before[1]]
        return result

    async def cancel_rest(self) -> None:
        """End the running `generate_sequences`: conversations that have not ended are cancelled, and lost."""
        await asyncio.sleep(0)  # a task that has not begun would not see that it is cancelled by this
        self._cancels_rest = True
        for task in self._tasks:
            task.cancel()

    async def next_finished(self) -> list[tuple[int, DataProto] | None]:
        """Rows of the running `generate_sequences` that finished since the last call, at least one; None ends them.

        Each is (position in the batch, batch of one row). Lost conversations are left out. Needs
        meta_info["report_finished"].
        """
        items = [await self._finished.get()]
        while not self._finished.empty():
            items.append(self._finished.get_nowait())
        return items

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | None:
        """The conversation of one row; None if it was lost."""
        name = row.pop("agent_name", None) or self.rollout_config.agent.default_agent_loop
        if (seed := row.pop(SEED, None)) is not None:
            sampling_params["seed"] = int(seed)
        loop = make_agent_loop(
            name, trainer_config=self.trainer_config, server_manager=self.server_manager, tokenizer=self.tokenizer,
            processor=self.processor, dataset_cls=self.dataset_cls, dataset_config=self.config.data,
        )  # fmt: skip
        with rollout_trace_attr(
            sample_index=trajectory["sample_index"], step=trajectory["step"], rollout_n=trajectory["rollout_n"],
            name="agent_loop", validate=trajectory["validate"],
        ):  # fmt: skip
            try:
                given = {"request_id": uuid4().hex, "trajectory": trajectory, **row}
                output = await loop.run(sampling_params, **given)
                if not isinstance(output, AgentLoopOutput):
                    what = f"{type(loop).__name__}.run returned {type(output).__name__}"
                    raise TypeError(f"{what}; expected an AgentLoopOutput")
                loop.check_prompt(output.prompt_ids)
            except (ServerUnreachable, ConversationTooLong) as error:
                logger.warning(f"conversation of sample {trajectory['sample_index']} is dropped: {error}")
                return None
        return output

    def _postprocess(self, outputs: list[AgentLoopOutput | None]) -> DataProto:
        """Rows of one shape; those of lost conversations are marked, and empty if nothing is known of them."""
        rollout, pad = self.rollout_config, self.tokenizer.pad_token_id
        lost = np.array([is_lost(output) for output in outputs])
        rows = [output or empty_output() for output in outputs]
        p, r = rollout.prompt_length, rollout.response_length
        reversed_prompts = right_padded([row.prompt_ids[::-1] for row in rows], p, pad, torch.int64)
        prompt_mask = right_padded([[1] * len(row.prompt_ids) for row in rows], p, 0, torch.int64).flip(1)
        responses = right_padded([row.response_ids[:r] for row in rows], r, pad, torch.int64)
        attended = right_padded([[1] * len(row.response_ids[:r]) for row in rows], r, 0, torch.int64)
        attention_mask = torch.cat([prompt_mask, attended], 1)
        tensors = {
            "prompts": reversed_prompts.flip(1),
            "responses": responses,
            "response_mask": right_padded([row.response_mask[:r] for row in rows], r, 0, torch.int64),
            "input_ids": torch.cat([reversed_prompts.flip(1), responses], 1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        }
        if rollout.calculate_log_probs:
            values = [(row.response_logprobs or [0.0] * len(row.response_ids))[:r] for row in rows]
            tensors["rollout_log_probs"] = right_padded(values, r, 0.0, torch.float32)
        if (experts := routed_experts(rows, p, r)) is not None:
            tensors["routed_experts"] = experts
        turns = np.array([row.num_turns for row in rows], dtype=np.int32)
        columns: dict[str, Any] = {"__num_turns__": turns, LOST: lost}
        for name in sorted({name for row in rows for name in row.extra_fields}):
            columns[name] = column_of([row.extra_fields.get(name) for row in rows])
        scores = [row.reward_score for row in rows]
        if any(score is not None for score in scores):
            columns["reward_score"] = column_of(scores)
        metrics = [row.metrics.model_dump() for row in rows]
        return DataProto.from_dict(tensors, columns, {"metrics": metrics})


class AgentLoopWorker(AgentLoopWorkerBase):
    """The worker of AgentLoopManager."""


async def get_trajectory_info(step: int, index: list[Any], validate: bool) -> list[dict[str, Any]]:
    """{step, sample_index, rollout_n, validate} of each row; rollout_n numbers equal neighbours in `index`."""
    infos = []
    for value, equal in itertools.groupby(index):
        for n, _ in enumerate(equal):
            infos.append({"step": step, "sample_index": value, "rollout_n": n, "validate": validate})
    return infos


class AgentLoopManager:
    """Shares a batch's conversations among `rollout.agent.num_workers` workers, against the servers of all ranks.

    Workers are Ray actors; with trainer.local=true there is one, in this process. A subclass, named by
    rollout.agent.agent_loop_manager_class, may set `agent_loop_workers_class` before this `__init__`.
    """

    agent_loop_workers_class: type[AgentLoopWorkerBase] = AgentLoopWorker

    def __init__(self, config: DictConfig, worker_group: Any = None, rm_resource_pool: Any = None) -> None:
        self.config, self.worker_group = config, worker_group
        rollout = config.actor_rollout_ref.rollout
        self.rollout_config: RolloutConfig = omega_conf_to_dataclass(rollout, RolloutConfig)
        model = config.actor_rollout_ref.model
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
        plain = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
        self.router = ray.remote(num_cpus=0)(RequestRouter).remote(servers) if servers > 1 else None
        actor = cls if hasattr(cls, "remote") else ray.remote(num_cpus=0)(cls)

        def start_worker(i: int) -> Any:
            named = actor.options(name=f"agent_loop_worker_{i}_{uuid4().hex[:8]}")
            return named.remote(plain, self.server_handles, router=self.router)

        self._start_worker = start_worker
        self.agent_loop_workers = [start_worker(i) for i in range(self.rollout_config.agent.num_workers)]
        ready = [worker.__ray_ready__.remote() for worker in self.agent_loop_workers]  # their errors are raised here
        get_within(config.trainer.watchdog, ready, self._labels(), "__ray_ready__", self.agent_loop_workers)

    @property
    def reports_finished(self) -> bool:
        """Whether `generate_sequences` reports each conversation as it ends: no subclass overrides it."""
        ours = self.agent_loop_workers_class.generate_sequences is AgentLoopWorkerBase.generate_sequences
        return ours and type(self).generate_sequences is AgentLoopManager.generate_sequences

    def generate_sequences(
        self, prompts: DataProto, on_finished: Callable[[int, DataProto], None] | None = None
    ) -> DataProto:
        """meta_info["n"] conversations for each prompt, those of one prompt adjacent; see AgentLoopWorkerBase.

        `on_finished` is called, here, with the row number and the batch of one row when a conversation has ended.
        """
        request = GenerationRequest.from_batch(prompts, self.rollout_config)
        sampling, rollout = request.sampling, self.rollout_config
        params: dict[str, Any] = {"temperature": 0.0} if sampling.greedy else {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
        }  # fmt: skip
        params |= {"repetition_penalty": rollout.repetition_penalty, "logprobs": rollout.calculate_log_probs}
        params |= {"stop_token_ids": list(request.eos_ids), "ignore_eos": rollout.ignore_eos}
        seeds = [row[0] + k for row in request.seeds for k in range(request.n)]  # as vLLM seeds the samples of a prompt
        rows = DataProto(None, dict(prompts.non_tensor_batch), {}).repeat(request.n, interleave=True)
        columns = rows.non_tensor_batch
        columns[SEED] = np.array(seeds, dtype=np.int64)
        names = ("global_steps", "validate")
        meta = {"sampling": params} | {name: prompts.meta_info[name] for name in names if name in prompts.meta_info}
        # Greedy answers are ReMax's baselines, of which every prompt needs one.
        cut = not (prompts.meta_info.get("validate") or sampling.greedy) and rollout.over_sample_rate
        ended = _Ended(math.ceil(len(seeds) * (1 - rollout.over_sample_rate)) if cut else None, on_finished)
        meta["report_finished"] = bool(cut or on_finished)
        batch = DataProto(None, columns, meta)
        started = time.perf_counter()
        self._reset_router()
        if self._runner is not None:
            parts, restarts = [self._runner.run(self._generate_here(batch, ended))], 0
        else:
            parts, restarts = self._generate_by_workers(batch, ended)
        metrics = self._metrics(parts, time.perf_counter() - started)
        metrics["agent_loop/restarted_workers"] = float(restarts)
        output = with_own_scores(joined(parts))
        output.meta_info = {"metrics": metrics}
        return self._with_versions(output)

    def _reset_router(self, lost: bool = True) -> None:
        """See RequestRouter.reset: a server that failed in the step before may have recovered."""
        if self._runner is not None:
            self.router.reset(lost)
        elif self.router is not None:
            call = [self.router.reset.remote(lost)]
            get_within(self.config.trainer.watchdog, call, ["the router of requests"], "reset", [self.router])

    def _labels(self) -> list[str]:
        return [f"agent loop worker {i}" for i in range(len(self.agent_loop_workers))]

    async def _generate_here(self, batch: DataProto, ended: "_Ended") -> DataProto:
        worker = self.agent_loop_workers[0]
        call = asyncio.create_task(worker.generate_sequences(batch))
        over = not batch.meta_info["report_finished"]
        while not over:
            for item in await worker.next_finished():
                if item is None:
                    over = True
                elif ended.enough(*item):
                    await worker.cancel_rest()
        return await call

    def _generate_by_workers(self, batch: DataProto, ended: "_Ended") -> tuple[list[DataProto], int]:
        """The workers' parts in order, and how many workers died; their rows are given to new ones."""
        workers = self.agent_loop_workers
        shares = [rows for rows in np.array_split(np.arange(len(batch)), len(workers)) if len(rows)]
        calls: dict[Any, int] = {}
        reports: dict[Any, int] = {}

        def start(i: int) -> None:
            columns = {name: column[shares[i]] for name, column in batch.non_tensor_batch.items()}
            meta = {**batch.meta_info, "cancelled": over}
            calls[workers[i].generate_sequences.remote(DataProto(None, columns, meta))] = i
            if batch.meta_info["report_finished"]:
                reports[workers[i].next_finished.remote()] = i

        parts: dict[int, DataProto] = {}
        deaths, over = 0, False  # over: enough conversations have ended
        limit = self.config.trainer.watchdog.generate
        deadline = time.monotonic() + (limit or 0.0)
        for i in range(len(shares)):
            start(i)
        while calls or reports:
            left = None if limit is None else max(0.0, deadline - time.monotonic())
            if not (ended_calls := ray.wait([*reports, *calls], timeout=left)[0]):
                ranks = self.worker_group.labelled() if isinstance(self.worker_group, RayWorkerGroup) else {}
                late, names = {**reports, **calls}, self._labels()
                raise hanging(list(late), [names[i] for i in late.values()], "generate_sequences", limit,
                              [workers[i] for i in late.values()], ranks)  # fmt: skip
            ref = ended_calls[0]
            try:
                result = ray.get(ref)
            except ray.exceptions.RayActorError:
                if reports.pop(ref, None) is not None:
                    continue  # the call of the dead worker ends too
                i, deaths = calls.pop(ref), deaths + 1
                if deaths > self.rollout_config.server.max_attempts:
                    raise
                logger.warning(f"agent loop worker {i} died; a new one starts its {len(shares[i])} conversations again")
                workers[i] = self._start_worker(i)
                self._reset_router(lost=False)
                start(i)
                continue
            if ref in calls:
                parts[calls.pop(ref)] = result
                continue
            i = reports.pop(ref)
            for item in result:
                if item is not None and ended.enough(int(shares[i][item[0]]), item[1]) and not over:
                    over = True
                    cancelled = [worker.cancel_rest.remote() for worker in workers[: len(shares)]]
                    ray.wait(cancelled, num_returns=len(cancelled), timeout=CLOSE_TIMEOUT_S)  # the calls say who hangs
            if None not in result:
                reports[workers[i].next_finished.remote()] = i
        return [parts[i] for i in range(len(shares))], deaths

    def _metrics(self, parts: list[DataProto], seconds: float) -> dict[str, Any]:
        rows = [row for part in parts for row in part.meta_info["metrics"]]
        metrics: dict[str, Any] = {}
        for name in AgentLoopMetrics.model_fields:
            values = np.array([row[name] for row in rows])
            prefix = f"timing_s/agent_loop/{name}"
            metrics |= {f"{prefix}/min": values.min(), f"{prefix}/max": values.max(), f"{prefix}/mean": values.mean()}
        slowest = int(np.argmax([sum(row.values()) for row in rows]))
        metrics |= {f"timing_s/agent_loop/slowest/{name}": value for name, value in rows[slowest].items()}
        asked, cached = (sum(part.meta_info["prefix"][i] for part in parts) for i in (0, 1))
        metrics["agent_loop/prefix_hit_rate"] = cached / max(asked, 1)
        reasons = Counter(reason for part in parts for reason in part.non_tensor_batch.get("end_reason", ()) if reason)
        metrics |= {f"agent_loop/end/{reason}": count / len(rows) for reason, count in sorted(reasons.items())}
        return {name: float(value) for name, value in metrics.items()}

    def _with_versions(self, output: DataProto) -> DataProto:
        """With column weights_version: that of a conversation's turns, which must be one."""
        versions = set()
        for given in output.non_tensor_batch.pop("weights_versions", ()):
            versions |= {version for version in given or () if version is not None}
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
            ray.wait([w.close.remote() for w in self.agent_loop_workers], num_returns=len(self.agent_loop_workers),
                     timeout=CLOSE_TIMEOUT_S)  # fmt: skip
            for worker in self.agent_loop_workers:
                ray.kill(worker)


class _Ended:
    """Rows of conversations that have ended, each passed on; `wanted` of them are enough, or None for all."""

    def __init__(self, wanted: int | None, on_finished: Callable[[int, DataProto], None] | None) -> None:
        self.wanted, self.on_finished = wanted, on_finished
        self.rows: set[int] = set()

    def enough(self, row: int, sample: DataProto) -> bool:
        """A row has ended; whether the others may be cancelled."""
        self.rows.add(row)
        if self.on_finished is not None:
            self.on_finished(row, sample)
        return self.wanted is not None and len(self.rows) >= self.wanted


def manager_class(config: DictConfig) -> type[AgentLoopManager]:
    """The class that rollout.agent.agent_loop_manager_class names, by default AgentLoopManager."""
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    return AgentLoopManager if name is None else load_class_from_fqn(name, "agent loop manager")
