"""The rollout in which a scorer judges drafted blocks: actions, hybrid contexts, and whether the answer stays right."""

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict

from recipe.spd.data.blocks import SPDInputData, resolve_sep_token_id
from recipe.spd.rollout.client import SAMPLING, Completer, CompletionClient, Request, preferred_first, server_urls
from recipe.spd.rollout.hybrid import sample_actions, uniform_draws
from recipe.spd.rollout.rounds import FurtherRounds
from recipe.spd.rollout.samples import (
    Completions,
    CompletionStatus,
    JudgedBlock,
    LostCompletionsError,
    batch_metrics,
    grade_blocks,
    judged_block,
    rank_totals,
)
from recipe.spd.rollout.store import CompletionStore
from recipe.spd.scorer.auto import SCORERS
from recipe.spd.scorer.bernoulli_policy import MODEL_KEYS, action_log_probs, fit_width
from recipe.spd.settings import SPDSettings
from verl.data.fingerprint import model_dir_fingerprint
from verl.protocol import DataProto, object_array
from verl.reward.rows import LOST
from verl.rollout.base import BaseRollout
from verl.rollout.server_process import RunningServer
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer
from verl.trainer.ppo.batching import MASKED
from verl.trainer.run.ranks import all_gather_object
from verl.training.actor.batch_cuts import micro_batches
from verl.training.actor.optimizer_step import forward_in_order
from verl.utils.tokenizer import stop_ids

__all__ = ["LostCompletionsError", "SPDRollout", "CompletionClient"]
LOCAL_VARIABLE = "SPD_LOCAL_SERVER"  # handle of the server that the run's entry started, for its other processes


class SPDRollout(BaseRollout):
    """One forward of the scorer per prompt, n Bernoulli samples of it, and the target's completion of each distinct
    hybrid context, requested from a vLLM server once in the entire training.

    `rollout.temperature` is the T of sampling, of the recorded log-probs and of the update. `rollout.custom` holds the
    recipe's group `spd`. Without servers the first rank of each node starts one on its machine. It is registered as
    ("spd", "sync") by an entry point, in setup.py.
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
        self.eos = frozenset(stop_ids(self.tokenizer, self.settings.target_path, config.stop_token_ids))
        self._urls = server_urls(self.settings.rollout.servers)
        # Ray's ranks on GPUs all have LOCAL_RANK 0 where each sees its own GPU alone.
        place = os.environ.get("RAY_LOCAL_RANK") or os.environ.get("LOCAL_RANK", "0")
        if not self._urls and LOCAL_VARIABLE not in os.environ and place == "0":
            # Loading vLLM takes half a minute, during which the actor is built.
            self.local_server = server_of(self.settings, config.prompt_length, config.response_length)
            self._resources.callback(self.local_server.stop)

    def bind_actor(self, engine: Any, policy: Any) -> None:
        self.engine = engine
        self.policy = policy

    def close(self) -> None:
        """Close the store, end the local server."""
        self._resources.close()

    @cached_property
    def completer(self) -> Completer:
        """Client and store of completions. Every rank must use it first at the same time: they share local servers."""
        options, target = self.settings.rollout, self.settings.target_path
        server = None if self._urls else self._shared_server()
        rank = dist.get_rank() if dist.is_initialized() else 0
        urls = preferred_first(self._urls or [server.url], rank)
        client = CompletionClient(urls, target, eos_token_ids=sorted(self.eos), settings=options)
        if server is None:
            client.check_model()
        if Path(target).expanduser().is_dir():
            fingerprint = model_dir_fingerprint(target)
        else:  # a hub name: the servers hold the weights
            fingerprint = hashlib.sha256(f"{target}@{options.served_model}".encode()).hexdigest()[:32]
        store = CompletionStore(options.store_path, fingerprint, {**SAMPLING, "eos": sorted(self.eos)})
        self._resources.callback(store.close)
        if server is None:
            return Completer(store, client)
        key = "spd.rollout.start_timeout_s"
        return Completer(store, client, before_asking=partial(server.wait_ready, options.start_timeout_s, key))

    def _shared_server(self) -> RunningServer:
        """The local server that the run's entry started, else this node's first rank; all ranks call it together."""
        handle = os.environ.get(LOCAL_VARIABLE)
        if handle is None:
            host = socket.gethostname()
            handles = all_gather_object((host, self.local_server and self.local_server.handle()))
            handle = next(handle for name, handle in handles if handle and name == host)
        return RunningServer.from_handle(handle)

    @cached_property
    def _further_rounds(self) -> FurtherRounds:
        """Decodes the blocks after the first; loads draft and target onto this rank."""
        from transformers import AutoModelForCausalLM

        options = self.settings.rollout
        target, draft = (
            AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval().to(self.engine.device)
            for path in (self.settings.target_path, options.draft_path)
        )
        reads_separator = SCORERS[self.settings.backbone].reads_separator
        return FurtherRounds(
            target, draft, blocks=options.rounds - 1, gamma=self.config.response_length, eos=self.eos,
            sep_token_id=resolve_sep_token_id(self.tokenizer, read=reads_separator), gather=all_gather_object,
            rows_per_forward=self.config.log_prob_micro_batch_size_per_gpu or 256,
        )  # fmt: skip

    @torch.no_grad()
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Judge each block `meta_info["n"]` times; greedily where `validate` is set or do_sample is off.

        prompts: input_ids, attention_mask, position_ids [B, P], spd_layout [B, 5], sample_index [B] int64; extra_info
        with context_ids, draft_ids, target_ids, ground_truth (question_len). Returns [B*n] rows: prompts,
        input_ids [., P], responses (actions 0/1, padding 0), response_mask (1 = counts in the loss), rollout_log_probs
        (float32) [., R], attention_mask and position_ids [., P+R], spd_layout, sample_index; extra_info (with
        effective_len, is_correct_hybrid, ...), response_text, __lost__ ("", "lost" or "masked"). R is
        data.max_response_length. Raises LostCompletionsError, and RuntimeError where a rank failed.
        """
        if self.engine is None:
            raise RuntimeError("SPDRollout has no scorer to judge with; call bind_actor(engine, policy) first.")
        validate = bool(prompts.meta_info.get("validate", False))
        n = int(prompts.meta_info.get("n", 1))
        infos = list(prompts.non_tensor_batch["extra_info"])

        z = self._scores(prompts)  # [B, R]
        actions = self._actions(prompts, z, n)  # [B, n, R]
        log_probs = action_log_probs(z[:, None], actions, self.config.temperature)  # [B, n, R]

        # Equal samples of a prompt are one block, which is completed and graded once.
        keys = [(b, tuple(row)) for b, rows in enumerate(actions.tolist()) for row in rows]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        which = [numbers[key] for key in keys]  # [B * n], the number of each sample's block among the distinct ones
        blocks = [judged_block(infos[b], row, self.eos, self.settings.rollout.rounds) for b, row in numbers]
        if self.settings.rollout.rounds > 1:
            self._extend(blocks)
        limit = self.settings.rollout.max_tokens
        completions, status = self._completed([request for block in blocks for request in block.requests(limit)])
        grade_blocks(blocks, completions, self.tokenizer, limit)
        samples = [blocks[number] for number in which]
        totals = all_gather_object((rank_totals(samples, status), status))
        metrics = batch_metrics(totals, self.settings.rollout.lost_share_max)

        width, positions = z.shape[1], self.settings.loss_positions
        counted, drafted = torch.tensor([block.masks(width, positions) for block in blocks])[which].unbind(1)
        texts = [block.segments(self.tokenizer) for block in blocks]
        columns = {
            "extra_info": object_array([sample.extra_info() for sample in samples]),
            "response_text": object_array([texts[number] for number in which]),
            LOST: object_array([self._why_dropped(sample, validate) for sample in samples]),
        }
        tensors = {key: prompts.batch[key].cpu().repeat_interleave(n, 0) for key in (*MODEL_KEYS, "sample_index")}
        after = tensors["position_ids"][:, -1:] + torch.arange(1, width + 1)
        tensors.update(
            prompts=tensors["input_ids"], attention_mask=torch.cat([tensors["attention_mask"], drafted], dim=1),
            position_ids=torch.cat([tensors["position_ids"], after], dim=1), responses=actions.reshape(-1, width),
            response_mask=counted, rollout_log_probs=log_probs.reshape(-1, width) * drafted,
        )  # fmt: skip
        return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info={"metrics": metrics})

    def _actions(self, prompts: DataProto, z: torch.Tensor, n: int) -> torch.Tensor:
        """Actions 0/1 int64 [B, n, R] by z [B, R]: 1 at matches, 0 after a draft's end."""
        meta, infos = prompts.meta_info, prompts.non_tensor_batch["extra_info"]
        lengths = [len(info["draft_ids"]) for info in infos]
        draws = None  # greedy
        if meta.get("do_sample", True) and not meta.get("validate", False):
            places, step = prompts.batch["sample_index"].tolist(), int(meta.get("global_steps", 0))
            draws = uniform_draws(self.settings.seed, step, places, lengths, n, z.shape[1])
        matches, inside = torch.zeros(2, *z.shape, dtype=torch.bool)
        for b, (info, length) in enumerate(zip(infos, lengths, strict=True)):
            matches[b, :length] = torch.tensor(info["draft_ids"]) == torch.tensor(info["target_ids"][:length])
            inside[b, :length] = True
        actions = sample_actions(z, draws, self.config.temperature).expand(-1, n, -1)
        return (actions | matches[:, None]) * inside[:, None]

    def _why_dropped(self, sample: JudgedBlock, validate: bool) -> str:
        """The value of __lost__: "lost", "masked", or empty for a sample that is kept."""
        if sample.correct is None:
            return "lost"
        zero = sample.hybrid.effective_len == 0 and self.settings.reward.zero_length == "mask" and not validate
        cut = sample.truncated and self.settings.truncated == "exclude"
        return MASKED if zero or cut else ""

    def _scores(self, prompts: DataProto) -> torch.Tensor:
        """z [B, R] float32 on the CPU, one forward per prompt; the same number of forwards on every rank."""
        config = self.config
        rows = config.log_prob_micro_batch_size_per_gpu or len(prompts)
        tokens = config.log_prob_max_token_len_per_gpu if config.log_prob_use_dynamic_bsz else None
        inputs = prompts.select(batch_keys=list(MODEL_KEYS), non_tensor_batch_keys=[])
        micros = micro_batches(inputs, rows=rows, tokens=tokens, whole_groups=False)

        def forward(batch: TensorDict) -> list[torch.Tensor]:
            return [fit_width(self.policy.scores(self.engine.module, batch), config.response_length)]

        return forward_in_order(self.engine, micros, forward)[0]

    def _forward(self, blocks: SPDInputData) -> torch.Tensor:
        """z [B, g], g the longest draft of the blocks."""
        return self.policy.scores(self.engine.module, TensorDict(blocks.as_kwargs(), batch_size=len(blocks.input_ids)))

    def _extend(self, blocks: Sequence[JudgedBlock]) -> None:
        """Add what spd.rollout.rounds > 1 decodes after the blocks' unfinished contexts."""
        unfinished = [block for block in blocks if block.unfinished is not None]
        with self.engine.eval_mode(), self.engine.autocast():
            added = self._further_rounds.extend([block.unfinished for block in unfinished], self._forward)
        for block in unfinished:
            block.further, ended = added[block.unfinished]
            block.unfinished = None if ended else (*block.unfinished, *block.further)

    def _completed(self, requests: Sequence[Request]) -> tuple[Completions, CompletionStatus]:
        """The completions; a failure is recorded, since the ranks must still exchange their totals."""
        try:
            completions, counts = self.completer.complete(requests)
        except Exception as error:
            logger.exception("the completions of this batch failed")
            return {}, CompletionStatus(failure=f"{type(error).__name__}: {error}")
        client = self.completer.client
        last_error = client.last_error if counts.failed else ""
        return completions, CompletionStatus(counts, self.completer.store.size, client.urls, last_error)


def server_of(settings: SPDSettings, prompt_length: int, response_length: int) -> LocalVllmServer:
    """Start the server of a run, for context, rounds of blocks and completion unless max_model_len is set."""
    rollout = settings.rollout
    length = rollout.max_model_len or prompt_length + rollout.rounds * (response_length + 1) + rollout.max_tokens
    # Without the sampling defaults of the model's generation_config.json; its end tokens stay.
    arguments = ["--generation-config", "vllm", *rollout.server_args]
    return LocalVllmServer(settings.target_path, rollout.server_log, length, arguments)


@contextmanager
def local_server(config: DictConfig) -> Iterator[None]:
    """Run a server during a training; it loads while Ray and the ranks start, which find it by LOCAL_VARIABLE.

    Not where the config names servers, on a running cluster, or on several nodes.
    """
    if os.environ.get("RAY_ADDRESS") or config.trainer.nnodes > 1 or config.spd.rollout.servers:
        yield
        return
    settings = SPDSettings.from_custom(OmegaConf.to_container(config.spd, resolve=True))
    server = server_of(settings, config.data.max_prompt_length, config.data.max_response_length)
    os.environ[LOCAL_VARIABLE] = server.handle()
    try:
        yield
    finally:
        del os.environ[LOCAL_VARIABLE]
        server.stop()
