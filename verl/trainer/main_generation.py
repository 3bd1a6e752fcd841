"""Entry of offline generation: `python -m verl.trainer.main_generation model.path=... data.path=... key=value ...`.

Under torchrun the ranks take prompts from one queue.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from loguru import logger
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.device_mesh import DeviceMesh

from verl.config.common import CheckpointConfig
from verl.config.compose import hydra_main
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.offline import GenerationConfig, GenerationDataConfig, GenerationTrainerConfig
from verl.config.rollout import ROLLOUTS_OF_THE_ACTOR, RolloutConfig
from verl.data.chat_template import answer_text
from verl.data.generation import GenerationPrompts, PartialAnswers, own_keys
from verl.data.rl_dataset import collate_fn
from verl.planning.offline import generation_entry
from verl.protocol import DataProto
from verl.rollout.base import BaseRollout, engine_group, get_rollout_class
from verl.rollout.request_queue import RequestQueue
from verl.trainer.run.ranks import from_first_rank
from verl.training.engine import FSDPEngine
from verl.training.parallel.sharding import create_device_mesh
from verl.training.policy import get_policy
from verl.utils.distributed import (
    destroy_global_process_group,
    ensure_process_group,
    initialize_global_process_group,
    shared_store,
)
from verl.utils.problems import SHARE_NAMED
from verl.utils.tokenizer import stop_ids


@hydra_main(config_path="config", config_name="generation")
def main(config: DictConfig) -> None:
    if config.trainer.dry_run:
        sys.exit(generation_entry().dry_run(config))
    try:
        run_generation(config)
    except (ValueError, OSError, OmegaConfBaseException) as error:
        sys.exit(own_keys(str(error)))


def run_generation(config: DictConfig) -> None:
    """Answers every prompt of data.path, then writes data.output_path; resumes where the same command was stopped.

    Raises one ConfigError with all problems of settings, model, prompts and machine before anything is loaded.
    """
    first = os.environ.get("RANK", "0") == "0"  # checks all prompts for all ranks
    settings = generation_entry(rows=None if first else 1).refuse_problems(config, warn=first)
    model = settings.model.load()
    prompts = GenerationPrompts(settings, model.tokenizer)
    partial = PartialAnswers(settings)
    rank = _join(settings.trainer)
    if rank == 0:
        partial.open()
    answered = from_first_rank(lambda: sorted(partial.read()))
    pending = sorted(set(range(len(prompts))).difference(answered))
    if rank == 0 and answered:
        logger.info(f"resumed: {len(answered):,} of {len(prompts):,} prompts were answered before")
    if pending:
        answer_pending(settings, model, prompts, pending, partial)
    if rank == 0:
        partial.finish(prompts.rows)
    destroy_global_process_group()


def answer_pending(
    settings: GenerationConfig, model: HFModelConfig, prompts: GenerationPrompts, pending: list[int],
    partial: PartialAnswers,
) -> None:  # fmt: skip
    """Answer this rank's share of the prompts with these numbers, and add the answers to `partial`."""
    data, config = settings.data, settings.rollout
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rollout = make_rollout(model, config, create_device_mesh(ranks, -1, settings.trainer.device))
    rollout.resume(["weights", "kv_cache"])
    if rank == 0:
        logger.info(
            f"model loaded; {len(pending):,} prompts, {data.n_samples} answers each, at most {data.batch_size} prompts "
            f"at a time on each of {ranks} ranks"
        )
    together = ranks if config.name in ROLLOUTS_OF_THE_ACTOR else config.tensor_model_parallel_size
    counts = shared_store()  # of all ranks
    started = time.perf_counter()
    for share in shares(len(pending), data.batch_size, together):
        numbers = [pending[i] for i in share]
        texts, cut = answers(rollout, [prompts[i] for i in numbers], data, model.tokenizer)
        partial.add(numbers, texts)
        counts.add("cut", cut)
        answered = counts.add("answered", len(share))
        line = progress(answered - len(share), answered, len(pending), time.perf_counter() - started)
        if line is not None:
            logger.info(line)
    if rank == 0:
        cut_share = counts.add("cut", 0) / (counts.add("answered", 0) * data.n_samples)
        if cut_share > SHARE_NAMED:
            logger.warning(
                f"{cut_share:.0%} of the answers were cut at a limit of tokens; raise rollout.response_length, or "
                "rollout.max_model_len if it is set."
            )
    rollout.close()  # vLLM ends the process group with its own


def progress(before: int, now: int, count: int, seconds: float) -> str | None:
    """A line about `now` of `count` prompts, answered in this time by all ranks; None for less than a further percent.

    `before` and `now` are the counts around one share of one rank: so one rank reports each percent.
    """
    before, now = min(before, count), min(now, count)  # ranks that step together fill up their last share
    if now * 100 // count == before * 100 // count:
        return None
    left = timedelta(seconds=round(seconds / now * (count - now)))
    return f"{now:,} of {count:,} prompts answered ({now / count:.0%}), {now / seconds:.3g} a second, {left} left"


def make_rollout(model: HFModelConfig, config: RolloutConfig, mesh: DeviceMesh) -> BaseRollout:
    """A rollout that holds the weights of model.path."""
    own_module = config.name in ROLLOUTS_OF_THE_ACTOR
    if not own_module:
        # An engine that slept has lost its weights. The ranks take prompts from the queue of `shares`.
        config = dataclasses.replace(config, enable_sleep_mode=False, free_cache_engine=False, prompt_queue=False)
    rollout = get_rollout_class(config.name, config.mode)(config, model, mesh)
    if own_module:
        settings = FSDPEngineConfig(forward_only=True, dtype=config.dtype, model_dtype=config.dtype)
        engine = FSDPEngine(model, settings, None, CheckpointConfig(), device=mesh.device_type)
        engine.initialize()
        rollout.bind_actor(engine, get_policy(model.policy.name, **model.policy.kwargs))
    return rollout


def shares(count: int, size: int, together: int) -> Iterator[list[int]]:
    """At most `size` of the numbers below `count` at a time for this rank, until all are taken on some rank.

    Groups of `together` neighbouring ranks, which step together, take from one queue, so that none waits for a slower
    one. The ranks of a group get equally many; numbers from the start fill up the last share.
    """
    queue, place = RequestQueue(engine_group(together)), dist.get_rank() % together
    queue.open(count)
    while taken := queue.take(size * together):
        padded = [*taken, *range(-len(taken) % together)]
        yield [i % count for i in padded[place::together]]
    dist.barrier()  # the queue lives on the first rank


def answers(
    rollout: BaseRollout, rows: list[Any], data: GenerationDataConfig, tokenizer: Any
) -> tuple[list[list[str]], int]:
    """data.n_samples texts for each prompt, and how many of all do not end with a stop token (0 with ignore_eos)."""
    n = data.n_samples
    batch = DataProto.from_single_dict(collate_fn(rows))
    ends = stop_ids(tokenizer, rollout.model_config.path, rollout.config.stop_token_ids)
    batch.meta_info |= {"n": n, "eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id}
    outputs = rollout.generate_sequences(batch).batch  # [prompts * n, T]
    responses = [
        ids[mask].tolist() for ids, mask in zip(outputs["responses"], outputs["response_mask"].bool(), strict=True)
    ]
    cut = 0 if rollout.config.ignore_eos else sum(ids[-1] not in ends for ids in responses if ids)
    texts = [answer_text(tokenizer, ids) for ids in responses]
    return [texts[i : i + n] for i in range(0, len(texts), n)], cut


def _join(trainer: GenerationTrainerConfig) -> int:
    """The rank in the torchrun job of this process, or in a group of its own.

    Without a job, but with trainer.n_gpus_per_node > 1, this process is replaced by torchrun.
    """
    if "RANK" in os.environ:
        return initialize_global_process_group()[1]
    if trainer.n_gpus_per_node > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={trainer.n_gpus_per_node}"]
        os.execv(sys.executable, [sys.executable, *torchrun, "-m", "verl.trainer.main_generation", *sys.argv[1:]])
    ensure_process_group(trainer.device)
    return 0


if __name__ == "__main__":
    main()
