"""Finds out whether the memory of an RL run's ranks suffices, else the nearest settings with which it does."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from verl.config.batch_sizes import BatchPlan, batch_problems, plan_batches
from verl.config.common import CheckpointConfig, TrainerConfig
from verl.config.compose import select
from verl.config.engine import FSDPEngineConfig
from verl.config.model import LOGITS_CHUNK
from verl.config.ppo import PPOConfig
from verl.config.roles import need_critic, reads_reference
from verl.config.rollout import CPU_CACHE_BYTES
from verl.planning import machine
from verl.planning.dry_run import memory_table
from verl.planning.machine import GIB
from verl.planning.memory_estimate import ACTIVATIONS, PROCESS_BYTES, ModelSize, estimate_memory, measure_loaded
from verl.planning.memory_trace import MicroBatch, trace_if_possible
from verl.utils.problems import WRONG, Problem

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "model", "rollout"))
GPU_GIB = 80.0  # planned for where neither trainer.gpu_memory_gib nor a GPU of this machine says it
USABLE = 0.95  # share of a GPU; the rest is the CUDA context, NCCL's buffers and what the allocator cannot use

Phases = dict[str, dict[str, int]]


def print_memory(console: Console, config: PPOConfig, hf_config: Any, steps: int | None = None) -> list[Problem]:
    """Print a rank's memory by part and phase; on GPUs also what does not fit, and settings that do.

    Returns the problems of this machine: memory of CPU ranks, and disk space for the checkpoints of `steps` steps.
    """
    size, exact = measure_loaded(hf_config, config)
    limit = _gpu_bytes(config.trainer)
    phases, traced, planned = _memory(config, size, hf_config, limit)
    table = memory_table(size, phases, traced)
    if not exact:
        loader = config.actor_rollout_ref.model.loader.name
        table.caption = f"The plain model; parts that loader {loader} adds or freezes are not seen here."
    console.print(table)
    contents = f"{ACTOR}.checkpoint.save_contents"
    one = sum(
        machine.checkpoint_bytes(model, engine, checkpoint.save_contents)
        for checkpoint, model, engine in _checkpoints(config, size)
    )
    problems = list(machine.check_disk(config.trainer, one, steps, "max_actor_ckpt_to_keep", contents))
    if limit is None:
        ranks = config.trainer.n_gpus_per_node
        peak = max(phases.values(), key=lambda parts: sum(parts.values()))
        needed = ranks * sum(peak.values()) + PROCESS_BYTES
        what = f"the driver and {ranks} rank{'s' * (ranks > 1)} (trainer.n_gpus_per_node)"
        return [*problems, *machine.check_memory(needed, what, memory_remedies(planned, ACTIVATIONS in peak))]
    over = {name: needed for name, parts in phases.items() if (needed := sum(parts.values())) > USABLE * limit}
    if not over:
        console.print(f"A GPU of {limit / GIB:.0f} GiB has this memory.")
        return problems
    for name, needed in over.items():
        console.print(f"{name} does not fit: {needed / GIB:.1f} GiB of {USABLE * limit / GIB:.1f} GiB usable.")
    if changes := _nearest(config, size, hf_config, limit):
        words = " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())
        console.print(f"The nearest settings that fit: {words}", highlight=False)
    else:
        console.print("No change of gradient checkpointing, offloading, batches, rollout.gpu_memory_utilization, "
                      "sequence parallel ranks or up to 8 times as many nodes makes it fit.")  # fmt: skip
    return problems


def memory_remedies(config: PPOConfig, activations: bool = True) -> dict[str, str]:
    """What lowers the memory of CPU ranks: key -> what to do with it; without `activations`, the peak has none."""
    roles, ranks = config.actor_rollout_ref, config.trainer.n_gpus_per_node
    actor, rollout, key = roles.actor, roles.rollout, f"{MODEL}.enable_gradient_checkpointing"
    remedies = {}
    if activations and not roles.model.enable_gradient_checkpointing:
        remedies[key] = f"set {key}=true"
    elif not activations and not roles.model.lora_rank:
        remedies[f"{MODEL}.lora_rank"] = f"train adapters ({MODEL}.lora_rank=32)"
    batch_key = "ppo_micro_batch_size" if actor.ppo_micro_batch_size else "ppo_micro_batch_size_per_gpu"
    batch_key = "ppo_max_token_len_per_gpu" if actor.use_dynamic_bsz else batch_key
    cache = (rollout.engine_kwargs.get("vllm") or {}).get("kv_cache_memory_bytes") or CPU_CACHE_BYTES
    now = {f"{ACTOR}.{batch_key}": actor[batch_key]} if activations else {}
    now |= {f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": cache} if rollout.name == "vllm" else {}
    now |= {"trainer.n_gpus_per_node": ranks} if ranks > 1 else {}
    remedies |= {key: f"lower {key} (now {value})" for key, value in now.items()}
    return remedies or {f"{MODEL}.path": f"use a smaller model ({MODEL}.path)"}


def _checkpoints(config: PPOConfig, size: ModelSize) -> Iterator[tuple[CheckpointConfig, ModelSize, FSDPEngineConfig]]:
    """(settings of checkpoints, size, engine) of the actor and, if there is one, of the critic, taken for its size."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    yield actor.checkpoint, size, actor.fsdp_config
    if need_critic(config):
        yield critic.checkpoint, dataclasses.replace(size, trainable=size.parameters), critic.model.fsdp_config


def _gpu_bytes(trainer: TrainerConfig) -> float | None:
    """Memory of a GPU, in bytes; None on CPU ranks."""
    if trainer.device != "cuda":
        return None
    if trainer.gpu_memory_gib is not None:
        return trainer.gpu_memory_gib * GIB
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else GPU_GIB * GIB


def _memory(config: PPOConfig, size: ModelSize, hf_config: Any, limit: float | None) -> tuple[Phases, bool, PPOConfig]:
    """(bytes by phase and part, whether the update was traced, the config); `limit`: a GPU's bytes, None on CPUs."""
    plan, on_gpu, update = plan_batches(config), limit is not None, None
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    # Other loaders and policies may compute what the trace does not know.
    if (model.loader.name, model.policy.name) == ("auto", "causal_lm"):
        micro = _traced_micro_batch(config, plan)
        if not on_gpu:
            tokens = micro.rows * micro.response + -(-micro.rows // micro.samples) * micro.prompt
            setting, ranks = model.enable_gradient_checkpointing, config.trainer.n_gpus_per_node
            checkpointed = machine.checkpoints_layers(setting, hf_config, tokens, actor.fsdp_config.dtype, ranks)
            config = _changed(config, {f"{MODEL}.enable_gradient_checkpointing": checkpointed})
        model = config.actor_rollout_ref.model
        update = trace_if_possible(hf_config, model, actor.fsdp_config, actor.optim, micro, plan.ranks, on_gpu)
    sizes = (plan.ranks, plan.micro_batch_size, plan.samples_per_rank)
    phases = estimate_memory(size, config, *sizes, update, limit)
    copied = sum(machine.copied_bytes(checkpoint, *parts) for checkpoint, *parts in _checkpoints(config, size))
    if copied and not on_gpu:
        for parts in phases.values():
            parts[machine.SAVE_COPIES] = copied // plan.ranks
    return phases, update is not None, config


def _traced_micro_batch(config: PPOConfig, plan: BatchPlan) -> MicroBatch:
    """The micro-batch of the actor's update that takes most memory."""
    roles, data = config.actor_rollout_ref, config.data
    actor, dynamic = roles.actor, roles.actor.use_dynamic_bsz
    samples = roles.rollout.n if actor.share_prompt_forward else 1  # of a prompt, in one forward
    rows, prompt, response = plan.micro_batch_size, data.max_prompt_length, data.max_response_length
    several = plan.samples_per_mini_batch > rows * plan.ranks
    if dynamic and several:
        # Samples below full length fill the token limit: one more prompt, with responses that just fit.
        fitting = (actor.ppo_max_token_len_per_gpu // (rows // samples + 1) - prompt) // samples
        rows, response = (rows + samples, fitting) if fitting > 0 else (rows, response)
    # The token limit is per rank: ranks that share sequences compute on as many times the rows.
    sharing = actor.fsdp_config.ulysses_sequence_parallel_size if dynamic else 1
    return MicroBatch(
        rows * sharing, prompt, response, samples, several,
        chunk_tokens=roles.model.policy.kwargs.get("chunk_tokens", LOGITS_CHUNK),
        with_entropy=actor.entropy_coeff != 0 or actor.calculate_entropy,
    )  # fmt: skip


def _nearest(config: PPOConfig, size: ModelSize, hf_config: Any, limit: float) -> dict[str, Any]:
    """Changes with which every phase fits, added from the cheapest on, less needless ones; empty if there are none."""

    def fits(changes: Mapping[str, Any]) -> bool:
        phases, *_ = _memory(_changed(config, changes), size, hf_config, limit)
        return all(sum(parts.values()) <= USABLE * limit for parts in phases.values())

    changes: dict[str, Any] = {}
    for key, value in _cheapest_first(config, hf_config):
        tried = changes | {key: value}
        if not _is_sound(_changed(config, tried)):
            continue
        changes = tried
        if fits(changes):
            for needless in list(changes):  # the last change may make earlier ones needless
                fewer = {k: v for k, v in changes.items() if k != needless}
                if fewer and _is_sound(_changed(config, fewer)) and fits(fewer):
                    changes = fewer
            return changes
    return {}


def _cheapest_first(config: PPOConfig, hf_config: Any) -> Iterator[tuple[str, Any]]:
    """(key, value) of changes that save memory, in the order of what they cost; results stay the same."""
    roles, data, trainer = config.actor_rollout_ref, config.data, config.trainer
    actor, engine = roles.actor, roles.actor.fsdp_config
    if not roles.model.enable_gradient_checkpointing:
        yield f"{MODEL}.enable_gradient_checkpointing", True
    for name in ("optimizer_offload", "param_offload"):
        if not engine[name]:
            yield f"{ACTOR}.fsdp_config.{name}", True
    if actor.use_dynamic_bsz:
        tokens = actor.ppo_max_token_len_per_gpu // 2
        while tokens >= data.max_prompt_length + data.max_response_length:
            yield f"{ACTOR}.ppo_max_token_len_per_gpu", tokens
            tokens //= 2
    else:
        rows = plan_batches(config).micro_batch_size // 2
        while rows >= 1:
            yield f"{ACTOR}.ppo_micro_batch_size_per_gpu", rows
            rows //= 2
    share = roles.rollout.gpu_memory_utilization
    for lower in (0.4, 0.3, 0.2):
        if lower < share:
            yield f"{ROLLOUT}.gpu_memory_utilization", lower
    heads = hf_config.get_text_config().num_attention_heads
    for ranks in (2, 4, 8):
        if heads % ranks == 0 and ranks > engine.ulysses_sequence_parallel_size:
            yield f"{ACTOR}.ulysses_sequence_parallel_size", ranks
    if not engine.offload_policy:
        yield f"{ACTOR}.fsdp_config.offload_policy", True
    for factor in (2, 4, 8):
        yield "trainer.nnodes", factor * trainer.nnodes


def _changed(config: PPOConfig, changes: Mapping[str, Any]) -> PPOConfig:
    """A copy with these values and those that are derived from them. It may be invalid: see `_is_sound`."""
    changed, values = copy.deepcopy(config), dict(changes)
    for key, value in changes.items():
        role, _, name = key.rpartition(".")
        if name == "ulysses_sequence_parallel_size":
            values[f"{role}.fsdp_config.{name}"] = value
        if name == "ppo_micro_batch_size_per_gpu":
            values[f"{role}.ppo_micro_batch_size"] = None
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        vars(select(changed, section))[name] = value  # not replace, which checks each change by itself
    return changed


def _is_sound(config: PPOConfig) -> bool:
    """Whether the ranks can share these batches."""
    problems = batch_problems(config, use_reference_policy=reads_reference(config), use_critic=need_critic(config))
    return not any(problem.kind == WRONG for problem in problems)
