"""The rollout phase of asynchronous training: servers on ranks of their own, fed by a Rollouter."""

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.error import HTTPError

import numpy as np
import ray

from verl.agents.agent_loop.interruptible import InterruptibleWorker
from verl.agents.agent_loop.manager import conversation_metrics, conversations_of
from verl.agents.agent_loop.rows import batch_of, use_loop_scores
from verl.agents.agent_loop.worker import SEED
from verl.config.asynchronous import AsyncPPOConfig
from verl.config.compose import to_omegaconf, with_values
from verl.protocol import DataProto
from verl.protocol.serialization import object_array
from verl.reward.rows import GRADED
from verl.reward.stream import RewardStream
from verl.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.rollout.sampling import GenerationRequest
from verl.rollout.server_process import DIRECT
from verl.trainer.fully_async import journal
from verl.trainer.fully_async.journal import Journal, Timeline
from verl.trainer.fully_async.rollouter import Rollouter
from verl.trainer.fully_async.samples import UNGRADED, Group, Sample
from verl.trainer.fully_async.staleness import StalenessBound
from verl.trainer.ppo.metric_utils import reduce_metrics
from verl.trainer.ppo.rollout_phase import RolloutPhase, without_lost
from verl.trainer.run.prompt_stream import PromptStream
from verl.utils.request_router import RequestRouter

STAYS_AWAKE = {"free_cache_engine": False, "lora_as_adapter": False}  # servers get all weights, and keep them
ENGINE_FAILED = 503  # status of a server's GET /health
SAMPLE_ID, SPANS = "sample_id", "version_spans"  # columns


async def close_all(replicas: Sequence[RolloutReplica]) -> None:
    """End the ranks and servers of replicas."""
    await asyncio.gather(*(replica.close() for replica in replicas))


class SeparateRolloutPhase(RolloutPhase):
    """Starts the servers, gives them weights, and generates for training and validation."""

    has_texts = True  # servers generate nothing else

    def __init__(
        self, config: AsyncPPOConfig, tokenizer: Any, stream: PromptStream, reward_fn: Any, total_prompts: int
    ) -> None:
        self.config, self.rollout_config = config, config.actor_rollout_ref.rollout
        self.tokenizer, self.model_path = tokenizer, config.actor_rollout_ref.model.path
        self.rm_group = None  # samples are graded by the reward function alone
        self.journal, self.timeline = Journal(), Timeline()
        self.bound = StalenessBound.from_settings(config.async_training, config.data.train_batch_size)
        self.synced = 0  # weights version of the servers
        self.stream = stream
        self.replicas = self._start_replicas()
        self.server_names = [f"server_{i}" for i in range(len(self.replicas))]
        handles = [replica.server_handle for replica in self.replicas]
        worker = InterruptibleWorker(to_omegaconf(config), handles, router=RequestRouter(len(handles)))
        reward = None if reward_fn is None else RewardStream(reward_fn)
        concurrency = self.rollout_config.max_num_seqs * len(handles)
        self.rollouter = Rollouter(
            worker, self.bound, total_prompts, self._draw, reward, concurrency, self.journal, self.timeline,
            self.check_servers,
        )  # fmt: skip

    def _start_replicas(self) -> list[RolloutReplica]:
        """One server for each tensor_model_parallel_size ranks of the section rollout."""
        pool, rollout = self.config.rollout, with_values(self.rollout_config, STAYS_AWAKE)
        ranks = pool.nnodes * pool.n_gpus_per_node
        use_gpu = self.config.trainer.device != "cpu"
        kind = "GPU" if use_gpu else "CPU"
        if (free := ray.available_resources().get(kind, 0)) < ranks:
            raise ValueError(
                f"rollout.nnodes x rollout.n_gpus_per_node requests {ranks} {kind} ranks beside those of the trainer, "
                f"but Ray has {free:g} {kind}s free. Lower it, or give Ray more."
            )
        model, replica_class = self.config.actor_rollout_ref.model, RolloutReplicaRegistry.of(rollout)
        replicas = [
            replica_class(i, rollout, model, gpus_per_node=pool.n_gpus_per_node)
            for i in range(ranks // rollout.tensor_model_parallel_size)
        ]

        async def start() -> None:
            starts = [replica.init_standalone(use_gpu) for replica in replicas]
            errors = [error for error in await asyncio.gather(*starts, return_exceptions=True) if error is not None]
            if errors:
                await close_all(replicas)
                raise errors[0]

        asyncio.run(start())
        return replicas

    def close(self) -> None:
        self.rollouter.close()
        asyncio.run(close_all(self.replicas))
        self.timeline.close()
        self.journal.close()

    def check_servers(self) -> None:
        """RuntimeError if the rank of a server has ended, its engine has failed, or its server does not answer."""
        for name, replica in zip(self.server_names, self.replicas, strict=True):
            url = f"http://{replica.server_address}/health"
            try:
                with DIRECT.open(url, timeout=self.rollout_config.server.timeout):
                    pass
            except OSError as error:
                if isinstance(error, HTTPError) and error.code != ENGINE_FAILED:
                    continue  # an answer
                raise RuntimeError(
                    f"{name} ({replica.server_address}) has ended, its engine has failed, or it does not answer: "
                    f"{error}. The same command resumes the run from its last checkpoint."
                ) from error

    def send_weights(self, version: int, parts: list[ray.ObjectRef], interrupt: bool) -> None:
        """Give all servers the weights of `version` (WeightPart), between two tokens or two samples."""

        def send() -> None:
            groups = [replica.worker_group for replica in self.replicas]
            calls = [group.execute_all_async("update_weights", parts, version) for group in groups]
            for group, refs in zip(groups, calls, strict=True):
                group._fetch(refs, "update_weights")

        limit = self.config.trainer.watchdog.generate
        self.rollouter.sync(version, self.server_names, interrupt, send, limit)

    def _draw(self) -> list[Group]:
        """The groups of the next batch of prompts."""
        epoch, prompts = self.stream.epoch, self.stream.draw()
        number = int(prompts.non_tensor_batch["uid"][0])
        groups = self.groups_of(prompts, number // self.bound.batch + 1, epoch)
        for group in groups:
            for sample in group.samples:
                self.journal.record(sample.id, journal.DRAWN, self.rollouter.version)
        return groups

    def groups_of(self, prompts: DataProto, step: int, epoch: int) -> list[Group]:
        """Groups of prompts [B, P] whose samples have the seeds of `step`."""
        rollout = self.rollout_config
        asked = self._request(prompts, step)
        rows = conversations_of(asked, GenerationRequest.from_batch(asked, rollout), rollout)
        seeds, params = rows.non_tensor_batch[SEED].tolist(), rows.meta_info["sampling"]
        groups = []
        for i, uid in enumerate(prompts.non_tensor_batch["uid"]):
            samples = [Sample(f"{uid}/{k}", seeds[i * rollout.n + k]) for k in range(rollout.n)]
            groups.append(Group(int(uid), prompts[i : i + 1], params, step, samples, epoch))
        return groups

    def batch_of(self, groups: list[Group], step: int) -> tuple[DataProto, dict[str, float]]:
        """The samples of a step's finished groups, those of one prompt adjacent: [prompts * n, T], with metrics.

        As RolloutPhase.generate returns them, with the grades of the samples, and the columns weights_version (that of
        the oldest token), version_spans (lists of (version, tokens)) and sample_id.
        """
        samples = [sample for group in groups for sample in group.samples]
        output = batch_of([sample.output for sample in samples], self.rollout_config, self.tokenizer.pad_token_id)
        columns = output.non_tensor_batch
        columns.pop("weights_versions", None)
        oldest = []
        for group in groups:
            for sample in group.samples:
                versions = [version for version, _ in sample.spans]
                oldest.append(min(versions, default=group.started_at))
        columns["weights_version"] = np.array(oldest, dtype=np.int64)
        columns[SAMPLE_ID] = np.array([sample.id for sample in samples], dtype=object)
        columns[SPANS] = object_array([sample.spans for sample in samples])
        if "reward_score" not in columns or any(sample.result is not UNGRADED for sample in samples):
            scores = columns.pop("reward_score", [None] * len(samples))  # of agent loops, for the samples not graded
            results = zip(scores, (sample.result for sample in samples), strict=True)
            columns[GRADED] = object_array([score if result is UNGRADED else result for score, result in results])
        prompts = DataProto.concat([group.row for group in groups])
        batch = self._samples(prompts, use_loop_scores(output), self.rollout_config.n, step)
        return batch, conversation_metrics(output.meta_info["metrics"], columns.get("end_reason", ()))

    def generate_for_validation(
        self, prompts: DataProto, step: int, reward_fn: Any = None
    ) -> tuple[DataProto, dict[str, float]]:
        """Samples of prompts with rollout.val_kwargs, without those that failed; weights do not change meanwhile."""
        asked = self._request(prompts, step, validate=True)
        rows = conversations_of(asked, GenerationRequest.from_batch(asked, self.rollout_config), self.rollout_config)
        output = self.rollouter.call(self.rollouter.worker.generate_sequences(rows))
        metrics = conversation_metrics(output.meta_info["metrics"], output.non_tensor_batch.get("end_reason", ()))
        output.non_tensor_batch.pop("weights_versions", None)
        output = use_loop_scores(output)
        samples = self._samples(prompts, output, asked.meta_info["n"], step)
        return without_lost(samples)[0], reduce_metrics(metrics)
