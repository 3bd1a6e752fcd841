"""The rollout in which a scorer judges drafted blocks: actions, hybrid contexts, and whether the answer stays right."""

import hashlib
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger
from tensordict import TensorDict

from recipe.spd.bernoulli_policy import fit_width
from recipe.spd.client import Completer, VllmEngineServer, preferred_first, server_urls
from recipe.spd.dataset import SPDInputData, resolve_sep_token_id
from recipe.spd.decoder import end_ids
from recipe.spd.hybrid import action_log_probs, sample_actions, uniform_draws
from recipe.spd.rounds import FurtherRounds
from recipe.spd.samples import (
    Completions,
    CompletionStatus,
    GradedBlock,
    JudgedBlock,
    LostCompletionsError,
    RankTotals,
    batch_metrics,
    extended_blocks,
    grade_blocks,
    judged_block,
    wanted_contexts,
)
from recipe.spd.server import LOCAL_VARIABLE, LocalVllmServer, RunningServer, server_of
from recipe.spd.settings import SPDSettings
from recipe.spd.store import CompletionStore
from verl.protocol import DataProto
from verl.utils.fingerprint import model_dir_fingerprint
from verl.utils.model import get_generation_config
from verl.workers.rollout.base import BaseRollout, register_rollout

__all__ = ["LostCompletionsError", "SPDRollout", "VllmEngineServer"]

LOST, MASKED = "__lost__", "masked"
SCORER_KEYS = ("input_ids", "attention_mask", "position_ids", "spd_layout")


@register_rollout("spd", "sync")
class SPDRollout(BaseRollout):
    """One forward of the scorer per prompt, n Bernoulli samples of it, and the target's completion of each distinct
    hybrid context, requested from a vLLM server once in the whole training.

    `rollout.temperature` is the T of sampling, of the recorded log-probs and of the update. `rollout.custom` holds the
    recipe's group `spd`. Without servers the first rank of each node starts one on its machine.
    """

    keeps_weights = True  # they are the actor's own

    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.settings = SPDSettings.from_custom(config.custom)
        self.tokenizer = model_config.tokenizer
        self.engine: Any = None
        self.policy: Any = None
        self.local_server: LocalVllmServer | None = None
        self._resources = ExitStack()
        generation = get_generation_config(self.settings.target_path)
        self.eos = end_ids(self.tokenizer.eos_token_id) | end_ids(generation.eos_token_id if generation else None)
        self._urls = server_urls(self.settings.rollout.servers)
        if not self._urls and LOCAL_VARIABLE not in os.environ and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            # Loading vLLM takes half a minute, during which the actor is built.
            self.local_server = server_of(self.settings, config.prompt_length, config.response_length)
            self._resources.callback(self.local_server.stop)

    def bind_actor(self, engine: Any, policy: Any) -> None:
        self.engine = engine
        self.policy = policy

    def close(self) -> None:
        """Close connections and store, end the local server."""
        self._resources.close()

    @cached_property
    def completer(self) -> Completer:
        """Client and store of completions. Every rank must use it first at the same time: they share local servers."""
        options, target = self.settings.rollout, self.settings.target_path
        server = None if self._urls else self._shared_server()
        client = VllmEngineServer(
            preferred_first(self._urls or [server.url], dist.get_rank() if dist.is_initialized() else 0), target,
            max_tokens=options.max_tokens, eos_token_ids=sorted(self.eos), settings=options.client(),
            served_model=options.served_model,
        )  # fmt: skip
        self._resources.callback(client.close)
        if server is None:
            client.check_model()
        if Path(target).expanduser().is_dir():
            fingerprint = model_dir_fingerprint(target)
        else:  # a hub name: the servers hold the weights
            fingerprint = hashlib.sha256(f"{target}@{options.served_model}".encode()).hexdigest()[:32]
        sampling = {"temperature": 0.0, "max_tokens": options.max_tokens, "eos": sorted(self.eos)}
        store = CompletionStore(options.store_path, fingerprint, sampling)
        self._resources.callback(store.close)
        return Completer(store, client, server and partial(server.wait_ready, options.start_timeout_s))

    def _shared_server(self) -> RunningServer:
        """The local server that the run's entry started, else the one of this node's first rank."""
        if LOCAL_VARIABLE in os.environ:
            return RunningServer.from_handle(os.environ[LOCAL_VARIABLE])
        shared = _gather((socket.gethostname(), self.local_server and self.local_server.handle()))
        return RunningServer.from_handle(next(h for host, h in shared if h and host == socket.gethostname()))

    @cached_property
    def _further_rounds(self) -> FurtherRounds:
        """Decodes the blocks after the first; loads draft and target onto this rank."""
        from transformers import AutoModelForCausalLM

        options = self.settings.rollout
        target, draft = (
            AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval().to(self.engine.device)
            for path in (self.settings.target_path, options.draft_path)
        )
        return FurtherRounds(
            target, draft, blocks=options.rounds - 1, gamma=self.config.response_length, eos=self.eos,
            sep_token_id=resolve_sep_token_id(self.tokenizer), gather=_gather,
            rows_per_forward=self.config.log_prob_micro_batch_size_per_gpu or 256,
        )  # fmt: skip

    @torch.no_grad()
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Judge each block `meta_info["n"]` times; greedily where `validate` is set or do_sample is off.

        prompts: input_ids, attention_mask, position_ids [B, P], spd_layout [B, 5], sample_index [B] int64; extra_info
        with context_ids, draft_ids, target_ids, is_correct_baseline, ground_truth. Returns [B*n] rows: prompts,
        input_ids [., P], responses (actions 0/1, padding 0), response_mask (1 = counts in the loss), rollout_log_probs
        (float32) [., R], attention_mask and position_ids [., P+R], spd_layout, sample_index; extra_info (with
        effective_len, is_correct_hybrid, ...), spd_text, __lost__ ("", "lost" or "masked"). R is
        data.max_response_length. Raises LostCompletionsError, and RuntimeError where a rank failed.
        """
        if self.engine is None:
            raise RuntimeError("SPDRollout has no scorer to judge with; call bind_actor(engine, policy) first.")
        meta = prompts.meta_info
        validate = bool(meta["validate"]) if "validate" in meta else False
        greedy = validate or ("do_sample" in meta and not meta["do_sample"])
        n = int(meta["n"]) if "n" in meta else 1
        step = int(meta["global_steps"]) if "global_steps" in meta else 0
        infos = list(prompts.non_tensor_batch["extra_info"])

        z = self._scores(prompts)  # [B, R]
        actions = self._actions(z, prompts, infos, n, step, greedy)  # [B, n, R]
        log_probs = action_log_probs(z[:, None], actions, self.config.temperature)  # [B, n, R]
        keys = [(b, tuple(row)) for b, rows in enumerate(actions.tolist()) for row in rows]
        distinct = list(dict.fromkeys(keys))
        rounds = self.settings.rollout.rounds
        blocks = self._extended([judged_block(infos[b], row, self.eos, rounds) for b, row in distinct])
        with_baseline = self.settings.reward.length_penalty > 0
        completions, status = self._completed(wanted_contexts(blocks, with_baseline))
        graded = dict(zip(distinct, grade_blocks(blocks, completions, self.tokenizer, with_baseline), strict=True))
        samples = [graded[key] for key in keys]
        metrics = batch_metrics(_gather(RankTotals.of(samples, status)), self.settings.rollout.lost_share_max)
        output = self._output(prompts, samples, actions, log_probs, drop_zero=not validate)
        output.meta_info["metrics"] = metrics
        return output

    def _scores(self, prompts: DataProto) -> torch.Tensor:
        """z [B, R] float32 on the CPU, one forward per prompt; the same number of forwards on every rank."""
        size = self.config.log_prob_micro_batch_size_per_gpu or len(prompts)
        parts = []
        with self.engine.eval_mode(), self.engine.autocast():
            for first in range(0, len(prompts), size):
                rows = [prompts.batch[key][first : first + size].to(self.engine.device) for key in SCORER_KEYS]
                z = self._forward(SPDInputData(*rows)).float().cpu()
                parts.append(fit_width(z, self.config.response_length))
        return torch.cat(parts)

    def _forward(self, blocks: SPDInputData) -> torch.Tensor:
        """z [B, g], g the longest draft of the blocks."""
        return self.policy.scores(self.engine.module, TensorDict(blocks.as_kwargs(), batch_size=len(blocks.input_ids)))

    def _actions(
        self, z: torch.Tensor, prompts: DataProto, infos: list[dict], n: int, step: int, greedy: bool
    ) -> torch.Tensor:
        """Actions 0/1 int64 [B, n, R] from z [B, R]; 1 at matches, 0 at padding."""
        lengths = [len(info["draft_ids"]) for info in infos]
        draws = None
        if not greedy:
            draws = uniform_draws(self.settings.seed, step, _sample_index(prompts).tolist(), lengths, n, z.shape[1])
        matches, drafted = np.zeros((2, *z.shape), dtype=bool)
        for b, (info, length) in enumerate(zip(infos, lengths, strict=True)):
            matches[b, :length] = np.equal(info["draft_ids"], info["target_ids"][:length])
            drafted[b, :length] = True
        actions = sample_actions(z, draws, self.config.temperature).expand(-1, n, -1)
        return (actions | torch.from_numpy(matches)[:, None]) * torch.from_numpy(drafted)[:, None]

    def _extended(self, blocks: Sequence[JudgedBlock]) -> Sequence[JudgedBlock]:
        """The blocks after the further rounds of spd.rollout.rounds."""
        if self.settings.rollout.rounds == 1:
            return blocks
        contexts = [block.unfinished for block in blocks if block.unfinished is not None]
        with self.engine.eval_mode(), self.engine.autocast():
            return extended_blocks(blocks, self._further_rounds.extend(contexts, self._forward))

    def _completed(self, contexts: Sequence[tuple[int, ...]]) -> tuple[Completions, CompletionStatus]:
        """Completions of the contexts; a failure is recorded, since the ranks must still exchange their totals."""
        try:
            completions, counts = self.completer.complete(contexts)
        except Exception as error:
            logger.exception("the completions of this batch failed")
            return {}, CompletionStatus(failure=f"{type(error).__name__}: {error}")
        client = self.completer.client
        last_error = client.last_error if counts.failed else ""
        return completions, CompletionStatus(counts, self.completer.store.size, client.urls, last_error)

    def _output(
        self, prompts: DataProto, samples: list[GradedBlock], actions: torch.Tensor, log_probs: torch.Tensor,
        drop_zero: bool,
    ) -> DataProto:  # fmt: skip
        """The [B*n] rows that `generate_sequences` returns; actions and log_probs are [B, n, R]."""
        _, n, width = actions.shape
        drop_zero &= self.settings.reward.zero_length == "mask"
        tensors = {key: prompts.batch[key].cpu().repeat_interleave(n, 0) for key in SCORER_KEYS}
        distinct = {id(sample): sample for sample in samples}  # samples share their graded block
        masks = {key: sample.masks(width, self.settings.loss_positions) for key, sample in distinct.items()}
        texts = {key: sample.segments(self.tokenizer) for key, sample in distinct.items()}
        counted, drafted = (torch.tensor([masks[id(sample)][kind] for sample in samples]) for kind in (0, 1))
        columns = {name: np.empty(len(samples), dtype=object) for name in ("extra_info", "spd_text", LOST)}
        columns["spd_text"][:] = [texts[id(sample)] for sample in samples]
        columns["extra_info"][:] = [sample.extra_info() for sample in samples]
        columns[LOST][:] = ""
        columns[LOST][[drop_zero and s.block.hybrid.effective_len == 0 for s in samples]] = MASKED
        columns[LOST][[s.correct is None for s in samples]] = "lost"
        positions = tensors["position_ids"]
        after = positions[:, -1:] + torch.arange(1, width + 1)
        tensors.update(
            prompts=tensors["input_ids"], attention_mask=torch.cat([tensors["attention_mask"], drafted], dim=1),
            position_ids=torch.cat([positions, after], dim=1), responses=actions.reshape(-1, width),
            response_mask=counted, rollout_log_probs=log_probs.reshape(-1, width) * drafted,
        )  # fmt: skip
        if "sample_index" in prompts.batch:
            tensors["sample_index"] = _sample_index(prompts).repeat_interleave(n)
        return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def _sample_index(prompts: DataProto) -> torch.Tensor:
    """[B] int64, the prompts' positions in the data set; a tensor or a non-tensor column."""
    values = prompts.batch if "sample_index" in prompts.batch else prompts.non_tensor_batch
    return torch.as_tensor(np.asarray(values["sample_index"], dtype=np.int64))


def _gather(mine: Any) -> list[Any]:
    """One object of every rank, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
