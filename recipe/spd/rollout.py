"""The rollout that lets a scorer judge drafted blocks: actions, hybrid contexts, and whether the answer survives."""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger
from tensordict import TensorDict

from recipe.spd.answers import is_correct
from recipe.spd.client import VllmEngineServer, preferred_first, server_urls
from recipe.spd.completer import Completer, CompletionCounts
from recipe.spd.dataset import SPDInputData, resolve_sep_token_id
from recipe.spd.decoder import end_ids
from recipe.spd.hybrid import (
    Hybrid,
    action_log_probs,
    counted_positions,
    hybrid_of,
    sample_actions,
    uniform_draws,
)
from recipe.spd.reward import SCENARIOS, scenario_of
from recipe.spd.rounds import FurtherRounds
from recipe.spd.server import LOCAL_VARIABLE, LocalVllmServer, RunningServer, server_of
from recipe.spd.settings import SPDSettings
from recipe.spd.store import Completion, CompletionStore
from recipe.spd.text import spd_segments
from verl.protocol import DataProto
from verl.utils.fingerprint import model_dir_fingerprint
from verl.utils.model import get_generation_config
from verl.workers.rollout.base import BaseRollout, register_rollout

__all__ = ["LostCompletionsError", "SPDRollout", "VllmEngineServer"]

LOST, MASKED = "__lost__", "masked"
SCORER_KEYS = ("input_ids", "attention_mask", "position_ids", "spd_layout")


class LostCompletionsError(RuntimeError):
    """More completions were lost than spd.rollout.lost_share_max allows."""


@dataclass
class _Sample:
    """A judged block: all samples of one prompt with the same actions. Lengths count from the end of the context."""

    info: dict[str, Any]
    actions: tuple[int, ...]
    hybrid: Hybrid
    baseline: int | None  # tokens of the target's own answer, None where not known
    context: tuple[int, ...] | None = None  # H and further blocks, where a completion is needed
    further: tuple[int, ...] = ()  # what spd.rollout.rounds > 1 wrote behind H
    correct: bool | None = None  # S_h; None = its completion is lost
    length: int | None = None  # tokens of the hybrid answer, None where not known
    completion: Completion = Completion((), hit_limit=False)

    def follows_target(self, rounds: int) -> bool:
        """Whether the answer is the target's own: with L = 0 always; else further rounds may leave its path."""
        h = self.hybrid
        return h.on_target_path and (h.ended or rounds == 1 or h.effective_len == 0)


@dataclass
class _Totals:
    """Sums over this rank's samples that make the metrics of all ranks."""

    values: dict[str, float]
    longest: int
    store_bytes: int
    error: str  # why completions were lost; with a "!" in front: why the batch failed


@register_rollout("spd", "sync")
class SPDRollout(BaseRollout):
    """One forward of the scorer per prompt, n Bernoulli samples of it, and the target's completion of each distinct
    hybrid context, asked of a vLLM server once in the whole training.

    `rollout.temperature` is the T of sampling, of the recorded log-probs and of the update. `rollout.custom` holds the
    recipe's group `spd`. Without servers one is started on this machine by the first rank of each node.
    """

    keeps_weights = True  # they are the actor's own

    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.settings = SPDSettings.from_custom(config.custom)
        self.tokenizer = model_config.tokenizer
        self.engine: Any = None
        self.policy: Any = None
        self.local_server: LocalVllmServer | None = None
        self._completer: Completer | None = None
        self._further: FurtherRounds | None = None
        target = self.settings.target_path
        generation = get_generation_config(target)
        self.eos = end_ids(self.tokenizer.eos_token_id) | end_ids(generation.eos_token_id if generation else None)
        self._urls = server_urls(self.settings.rollout.servers)
        starts = not self._urls and LOCAL_VARIABLE not in os.environ and int(os.environ.get("LOCAL_RANK", "0")) == 0
        if starts:  # loading vLLM takes half a minute: it goes on while the actor is built
            self.local_server = server_of(self.settings, config.prompt_length, config.response_length)

    def bind_actor(self, engine: Any, policy: Any) -> None:
        self.engine = engine
        self.policy = policy

    def close(self) -> None:
        """Close connections and store, end the local server."""
        if self._completer is not None:
            self._completer.client.close()
            self._completer.store.close()
        if self.local_server is not None:
            self.local_server.stop()

    # ---- servers --------------------------------------------------------------------------------------------------

    def _completions(self) -> Completer:
        """The completer, built at the first use; every rank takes part, since a rank's server is shared."""
        if self._completer is not None:
            return self._completer
        options, target = self.settings.rollout, self.settings.target_path
        server = None if self._urls else self._shared_server()
        client = VllmEngineServer(
            preferred_first(self._urls or [server.url], _rank()), target, max_tokens=options.max_tokens,
            eos_token_ids=sorted(self.eos), settings=options.client(), served_model=options.served_model,
        )  # fmt: skip
        if server is None:
            client.check_model()
        if Path(target).expanduser().is_dir():
            fingerprint = model_dir_fingerprint(target)
        else:  # a hub name: the servers hold the weights
            fingerprint = hashlib.sha256(f"{target}@{options.served_model}".encode()).hexdigest()[:32]
        sampling = {"temperature": 0.0, "max_tokens": options.max_tokens, "eos": sorted(self.eos)}
        store = CompletionStore(options.store_path, fingerprint, sampling)
        self._completer = Completer(store, client, server and partial(server.wait_ready, options.start_timeout_s))
        return self._completer

    def _shared_server(self) -> RunningServer:
        """The local server that the run's entry started, else the one of this node's first rank."""
        if LOCAL_VARIABLE in os.environ:
            return RunningServer.from_handle(os.environ[LOCAL_VARIABLE])
        shared = _gather((socket.gethostname(), self.local_server and self.local_server.handle()))
        return RunningServer.from_handle(next(h for host, h in shared if h and host == socket.gethostname()))

    # ---- one batch ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Judge each block `meta_info["n"]` times; greedily where `validate` is set or do_sample is off.

        prompts: input_ids, attention_mask, position_ids [B, P], spd_layout [B, 5], sample_index [B]; extra_info with
        context_ids, draft_ids, target_ids, is_correct_baseline, ground_truth. Gives [B*n] rows: prompts, input_ids
        [., P], responses (actions 0/1, padding 0), response_mask, rollout_log_probs [., R], attention_mask and
        position_ids [., P+R], spd_layout, sample_index; extra_info (with effective_len, is_correct_hybrid, ...),
        spd_text, __lost__ ("", "lost" or "masked"). R is data.max_response_length.
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
        distinct: dict[tuple[int, tuple[int, ...]], _Sample] = {}
        keys = [(b, tuple(row)) for b, rows in enumerate(actions.tolist()) for row in rows]
        for b, row in dict.fromkeys(keys):
            info = infos[b]
            hybrid = hybrid_of(info["draft_ids"], info["target_ids"], row, self.eos)
            distinct[b, row] = _Sample(info, row, hybrid, info.get("baseline_length"))
        counts, error = self._settle(list(distinct.values()))
        samples = [distinct[key] for key in keys]
        metrics = self._metrics(samples, counts, error)
        output = self._output(prompts, samples, actions, log_probs, drop_zero=not validate)
        output.meta_info["metrics"] = metrics
        return output

    def _scores(self, prompts: DataProto) -> torch.Tensor:
        """z [B, R] on the CPU, one forward per prompt; the same number of forwards on every rank."""
        width = self.config.response_length
        size = self.config.log_prob_micro_batch_size_per_gpu or len(prompts)
        device = self.engine.device
        parts = []
        with self.engine.eval_mode(), self.engine.autocast():
            for first in range(0, len(prompts), size):
                rows = [prompts.batch[key][first : first + size].to(device) for key in SCORER_KEYS]
                z = self._forward(SPDInputData(*rows))
                if z.shape[1] > width:
                    raise ValueError(
                        f"a draft has {z.shape[1]} tokens, data.max_response_length={width}. Raise it to {z.shape[1]}."
                    )
                # Padding like matches: accepted for certain.
                parts.append(torch.nn.functional.pad(z.float().cpu(), (0, width - z.shape[1]), value=50.0))
        return torch.cat(parts)

    def _forward(self, blocks: SPDInputData) -> torch.Tensor:
        """z [B, g], g the longest draft of the blocks."""
        return self.policy.scores(self.engine.module, TensorDict(blocks.as_kwargs(), batch_size=len(blocks.input_ids)))

    def _actions(
        self, z: torch.Tensor, prompts: DataProto, infos: list[dict], n: int, step: int, greedy: bool
    ) -> torch.Tensor:
        """Actions 0/1 int64 [B, n, R]; 1 at matches, 0 at padding."""
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

    def _settle(self, samples: list[_Sample]) -> tuple[CompletionCounts, str]:
        """Fill in what became of distinct samples; gives the counts and why some completions are lost."""
        self._go_on(samples)
        wanted = [sample.context for sample in samples if sample.context is not None]
        needs_baseline = self.settings.reward.length_penalty > 0
        if needs_baseline:
            wanted += [tuple(sample.info["context_ids"]) for sample in samples if sample.baseline is None]
        done: dict[tuple[int, ...], Completion] = {}
        counts, error = CompletionCounts(), ""
        try:
            completer = self._completions()
            done, counts = completer.complete(wanted)
            error = completer.client.last_error if counts.failed else ""
        except Exception as failure:  # re-raised on every rank by _metrics, after the ranks have met
            logger.exception("the completions of this batch could not be made")
            error = f"!{type(failure).__name__}: {failure}"
        verdicts: dict[tuple[tuple[int, ...], str], bool] = {}
        for sample in samples:
            if needs_baseline and sample.baseline is None:
                own = done.get(tuple(sample.info["context_ids"]))
                if own is None:
                    continue
                sample.baseline = len(own.token_ids)
            if sample.context is None or sample.context in done:
                self._read(sample, done, verdicts)
        return counts, error

    def _go_on(self, samples: list[_Sample]) -> None:
        """Set the context that each sample wants completed: its hybrid, and what further rounds write behind it."""
        rounds = self.settings.rollout.rounds
        for sample in samples:
            if not (sample.hybrid.ended or sample.follows_target(rounds)):
                sample.context = (*sample.info["context_ids"], *sample.hybrid.tokens)
        if rounds == 1:
            return
        self._further = self._further or self._further_rounds()
        with self.engine.eval_mode(), self.engine.autocast():
            added = self._further.extend([s.context for s in samples if s.context is not None], self._forward)
        for sample in samples:
            if sample.context is not None:
                sample.further = added[sample.context].tokens
                sample.context = None if added[sample.context].ended else (*sample.context, *sample.further)

    def _further_rounds(self) -> FurtherRounds:
        """Draft and target, loaded on this rank."""
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

    def _read(
        self, sample: _Sample, done: dict[tuple[int, ...], Completion],
        verdicts: dict[tuple[tuple[int, ...], str], bool],
    ) -> None:  # fmt: skip
        """Whether the sample's answer is right, and how long it is; `verdicts` keeps what was checked in this batch.

        The question, where its length is known, is not read: worked examples in it hold answers too.
        """
        info, hybrid = sample.info, sample.hybrid
        if sample.follows_target(self.settings.rollout.rounds):
            sample.correct, sample.length = bool(info["is_correct_baseline"]), sample.baseline
            return
        if sample.context is not None:
            sample.completion = done[sample.context]
        tail = (*hybrid.tokens, *sample.further, *sample.completion.token_ids)
        sample.length = len(tail)
        answer = (*info["context_ids"][info.get("question_len") or 0 :], *tail)
        key = (answer, str(info["ground_truth"]))
        if key not in verdicts:
            text = self.tokenizer.decode(list(answer), skip_special_tokens=True)
            verdicts[key] = is_correct(text, info["ground_truth"])
        sample.correct = verdicts[key] and not sample.completion.hit_limit

    def _metrics(self, samples: list[_Sample], counts: CompletionCounts, error: str) -> dict[str, float]:
        """spd/* over all ranks, the same on each; raises on each when something failed or too much was lost."""
        kept = [sample for sample in samples if sample.correct is not None]
        lengths = [sample.hybrid.effective_len for sample in kept]
        ratios = [s.length / s.baseline for s in kept if s.baseline and s.length is not None]
        scenarios = Counter(
            scenario_of(length, s.correct, bool(s.info["is_correct_baseline"]))
            for s, length in zip(kept, lengths, strict=True)
        )
        values = {
            "samples": len(samples), "kept": len(kept), "accepted": sum(lengths), "ratios": len(ratios),
            "ratio_sum": sum(ratios), "limit": sum(s.completion.hit_limit for s in kept),
            **{f"completions/{name}": value for name, value in asdict(counts).items()},
            **{f"scenario/{name}": scenarios[name] for name in SCENARIOS},
        }  # fmt: skip
        size = self._completer.store.size if self._completer is not None else 0
        mine = _Totals({k: float(v) for k, v in values.items()}, max(lengths, default=0), size, error)
        return self._summary(_gather(mine))

    def _summary(self, ranks: Sequence[_Totals]) -> dict[str, float]:
        total = {name: sum(rank.values[name] for rank in ranks) for name in ranks[0].values}
        if failed := [rank.error for rank in ranks if rank.error.startswith("!")]:
            raise RuntimeError(f"spd rollout: {failed[0][1:]}")
        lost = total["samples"] - total["kept"]
        if lost > self.settings.rollout.lost_share_max * total["samples"]:
            why = next((rank.error for rank in ranks if rank.error), "no completion came")
            raise LostCompletionsError(
                f"{lost:.0f} of {total['samples']:.0f} samples have no completion from the servers "
                f"{', '.join(self._completions().client.urls)} (last error: {why}); spd.rollout.lost_share_max="
                f"{self.settings.rollout.lost_share_max} allows fewer. Check the servers, then start the run again: it "
                "resumes, and completions made so far are kept."
            )
        kept = max(1.0, total["kept"])
        metrics = {f"spd/completions/{name}": total[f"completions/{name}"] for name in asdict(CompletionCounts())}
        if total["completions/requested"]:
            metrics["spd/completions/hit_rate"] = total["completions/stored"] / total["completions/requested"]
        metrics["spd/store/mib"] = max(rank.store_bytes for rank in ranks) / 2**20
        metrics |= {
            "spd/dropped_samples": lost, "spd/accepted_len/mean": total["accepted"] / kept,
            "spd/accepted_len/max": float(max(rank.longest for rank in ranks)), "spd/hit_limit": total["limit"] / kept,
        }  # fmt: skip
        metrics.update({f"spd/scenario/{name}": total[f"scenario/{name}"] / kept for name in SCENARIOS})
        if total["ratios"]:
            metrics["spd/output_length_ratio"] = total["ratio_sum"] / total["ratios"]
        return metrics

    def _output(
        self, prompts: DataProto, samples: list[_Sample], actions: torch.Tensor, log_probs: torch.Tensor,
        drop_zero: bool,
    ) -> DataProto:  # fmt: skip
        """The [B*n] rows that the trainer goes on with; actions and log_probs are [B, n, R]."""
        _, n, width = actions.shape
        drop_zero &= self.settings.reward.zero_length == "mask"
        described: dict[int, tuple] = {}
        for sample in samples:
            if id(sample) not in described:
                described[id(sample)] = self._describe(sample, width)
        counted, drafted, extras, texts = zip(*(described[id(sample)] for sample in samples), strict=True)
        columns = {name: np.empty(len(samples), dtype=object) for name in ("extra_info", "spd_text")}
        columns["extra_info"][:] = [dict(extra) for extra in extras]
        columns["spd_text"][:] = texts
        lost = np.full(len(samples), "", dtype=object)
        lost[[drop_zero and s.hybrid.effective_len == 0 for s in samples]] = MASKED
        lost[[s.correct is None for s in samples]] = "lost"
        tensors = {key: prompts.batch[key].cpu().repeat_interleave(n, 0) for key in SCORER_KEYS}
        positions, is_drafted = tensors["position_ids"], torch.tensor(drafted)
        after = positions[:, -1:] + torch.arange(1, width + 1)
        tensors.update(
            prompts=tensors["input_ids"], attention_mask=torch.cat([tensors["attention_mask"], is_drafted], dim=1),
            position_ids=torch.cat([positions, after], dim=1), responses=actions.reshape(-1, width),
            response_mask=torch.tensor(counted), rollout_log_probs=log_probs.reshape(-1, width) * is_drafted,
        )  # fmt: skip
        if "sample_index" in prompts.batch:
            tensors["sample_index"] = _sample_index(prompts).repeat_interleave(n)
        return DataProto.from_dict(tensors=tensors, non_tensors={**columns, LOST: lost})

    def _describe(self, sample: _Sample, width: int) -> tuple[list[int], list[int], dict[str, Any], list]:
        """1 where a position counts [R], 1 where it is drafted [R], extra_info, and the coloured text of one sample."""
        info, hybrid = sample.info, sample.hybrid
        draft, target = info["draft_ids"], info["target_ids"]
        padding = [0] * (width - len(draft))
        counted = counted_positions(draft, target, hybrid.reached, self.settings.loss_positions)
        extra = {
            **info, "effective_len": hybrid.effective_len,
            "is_correct_hybrid": None if sample.correct is None else int(sample.correct),
            "hybrid_length": sample.length, "baseline_length": sample.baseline,
            "hit_limit": sample.completion.hit_limit, "asked": sample.context is not None,
        }  # fmt: skip
        written = (*sample.further, *sample.completion.token_ids)
        text = spd_segments(self.tokenizer, draft, target, sample.actions, hybrid, written)
        return counted + padding, [1] * len(draft) + padding, extra, text


def _sample_index(prompts: DataProto) -> torch.Tensor:
    """[B] int64, the prompts' places in the data set, whether among the tensors or among the other columns."""
    values = prompts.batch if "sample_index" in prompts.batch else prompts.non_tensor_batch
    return torch.as_tensor(np.asarray(values["sample_index"], dtype=np.int64))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gather(mine: Any) -> list[Any]:
    """What every rank gave, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
