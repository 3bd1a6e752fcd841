"""Entry of offline generation: `python -m verl.trainer.main_generation model.path=... data.path=... key=value ...`.

Under torchrun the ranks take prompts from one queue.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from loguru import logger
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.offline import GenerationDataConfig, GenerationTrainerConfig
from verl.config.rollout import ROLLOUTS_OF_THE_ACTOR
from verl.planning.checks import Findings
from verl.planning.problems import one_line
from verl.protocol import DataProto
from verl.trainer.offline_plan import check_inputs, generation_entry
from verl.utils.config import hydra_main, omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import DatasetError, RLHFDataset, collate_fn, read_rows
from verl.utils.distributed import (
    destroy_global_process_group,
    ensure_process_group,
    initialize_global_process_group,
    shared_store,
)
from verl.utils.fsdp_utils import create_device_mesh
from verl.utils.tokenizer import stop_ids
from verl.workers.config import CheckpointConfig, FSDPEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.engine import FSDPEngine
from verl.workers.policy import get_policy
from verl.workers.rollout.base import BaseRollout, get_rollout_class

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@hydra_main(config_path="config", config_name="generation")
def main(config: DictConfig) -> None:
    if config.trainer.dry_run:
        sys.exit(generation_entry(functools.partial(checked_prompts, config)).dry_run(config))
    try:
        run_generation(config)
    except (ValueError, OSError, OmegaConfBaseException) as error:
        sys.exit(str(error))


def run_generation(config: DictConfig) -> None:
    """Answers every prompt of data.path, then writes data.output_path.

    Raises one ConfigError with all problems of settings, model, prompts and machine before anything is loaded.
    """
    read = functools.partial(checked_prompts, config)
    generation_entry(read).refuse_problems(
        config, warn=os.environ.get("RANK", "0") == "0",
        inputs=lambda: check_inputs(config, read, Findings(to_start=True))[1],
    )  # fmt: skip
    trainer = omega_conf_to_dataclass(config.trainer, GenerationTrainerConfig)
    data = omega_conf_to_dataclass(config.data, GenerationDataConfig)
    rollout_config = omega_conf_to_dataclass(config.rollout, RolloutConfig)
    rows = read_rows(data.path)
    model = omega_conf_to_dataclass(config.model, HFModelConfig).load()
    prompts = read_prompts(config, model.tokenizer)
    rank, ranks = _join(trainer)
    rollout = make_rollout(model, rollout_config, create_device_mesh(ranks, -1, trainer.device))
    together = ranks if rollout_config.name in ROLLOUTS_OF_THE_ACTOR else rollout_config.tensor_model_parallel_size
    own: dict[int, list[str]] = {}
    rollout.resume(["weights", "kv_cache"])
    for numbers in shares(len(prompts), data.batch_size, together):
        own |= zip(numbers, answers(rollout, [prompts[i] for i in numbers], data, model.tokenizer), strict=True)
        logger.info("{} of {} prompts answered on this rank", len(own), len(prompts))
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, own)
    rollout.close()  # vLLM ends the process group with its own
    if rank == 0:
        in_order = dict(sorted(item for part in parts for item in part.items()))
        write_responses(rows, list(in_order.values()), Path(data.output_path).expanduser())
    destroy_global_process_group()


def read_prompts(config: DictConfig, tokenizer: Any) -> RLHFDataset:
    """The prompts of data.path; raises DatasetError where data.prompt_key is no column of prompts."""
    settings = {name: config.data[name] for name in ("prompt_key", "truncation", "apply_chat_template_kwargs")}
    settings |= {"filter_overlong_prompts": False, "max_prompt_length": config.rollout.prompt_length}
    prompts = RLHFDataset(config.data.path, tokenizer, OmegaConf.create(settings))
    if len(prompts) > 0:
        _ = prompts[0]
    return prompts


def checked_prompts(config: DictConfig, tokenizer: Any) -> RLHFDataset:
    """`read_prompts`; a column that cannot be written next to the answers raises DatasetError."""
    import pyarrow as pa

    prompts = read_prompts(config, tokenizer)
    try:
        write_table(prompts.rows, [[""]] * len(prompts), io.BytesIO())
    except (pa.ArrowException, UnicodeError) as error:
        text = "its columns cannot be written as parquet next to the answers"
        raise DatasetError(f"{config.data.path}: {text}: {one_line(error)}") from error
    return prompts


def make_rollout(model: HFModelConfig, config: RolloutConfig, mesh: DeviceMesh) -> BaseRollout:
    """A rollout that holds the weights of model.path."""
    own_module = config.name in ROLLOUTS_OF_THE_ACTOR
    if not own_module:
        # An engine that slept has lost its weights. The ranks take prompts from the queue of `shares`.
        config = dataclasses.replace(config, enable_sleep_mode=False, prompt_queue=False)
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
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(range(r, r + together), backend="gloo") for r in range(0, ranks, together)]
    group, place = groups[rank // together], rank % together
    queue = shared_store()
    while True:
        first = [queue.add("taken", size * together) - size * together if place == 0 else None]
        dist.broadcast_object_list(first, src=rank - place, group=group)
        if first[0] >= count:
            break
        taken = range(first[0], min(first[0] + size * together, count))
        padded = [*taken, *range(-len(taken) % together)]
        yield [i % count for i in padded[place::together]]
    dist.barrier()  # the queue lives on the first rank


def answers(rollout: BaseRollout, rows: list[Any], data: GenerationDataConfig, tokenizer: Any) -> list[list[str]]:
    """data.n_samples texts for each prompt."""
    batch = DataProto.from_single_dict(collate_fn(rows))
    ends = stop_ids(tokenizer, rollout.model_config.path, rollout.config.stop_token_ids)
    batch.meta_info |= {"n": data.n_samples, "eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id}
    outputs = rollout.generate_sequences(batch).batch
    kept = zip(outputs["responses"], outputs["response_mask"].bool(), strict=True)
    texts = tokenizer.batch_decode([ids[mask] for ids, mask in kept], skip_special_tokens=True)
    return [texts[i : i + data.n_samples] for i in range(0, len(texts), data.n_samples)]


def write_responses(rows: list[dict[str, Any]], responses: list[list[str]], path: Path) -> None:
    """Write the rows with a column `responses` as parquet, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    write_table(rows, responses, partial)
    os.replace(partial, path)
    logger.info("{} rows with {} answers each written to {}", len(rows), len(responses[0]), path)


def write_table(rows: Sequence[dict[str, Any]], responses: list[list[str]], target: Any) -> None:
    """Write parquet to a path or a file: a column for each name that some row has, and `responses`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    pq.write_table(pa.table({**columns, "responses": responses}), target)


def _join(trainer: GenerationTrainerConfig) -> tuple[int, int]:
    """(rank, ranks) in the torchrun job of this process, or in a group of its own.

    Without a job, but with trainer.n_gpus_per_node > 1, this process is replaced by torchrun.
    """
    if "RANK" in os.environ:
        return initialize_global_process_group()[1:]
    if trainer.n_gpus_per_node > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={trainer.n_gpus_per_node}"]
        os.execv(sys.executable, [sys.executable, *torchrun, "-m", "verl.trainer.main_generation", *sys.argv[1:]])
    ensure_process_group(trainer.device)
    return 0, 1


if __name__ == "__main__":
    main()
