"""Batch sizes: what a step is cut into on each rank, with the cuts that do not come out even."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.utils.problems import Problem, wrong


@dataclass(frozen=True)
class BatchPlan:
    """One training step in numbers; micro-batch counts are upper bounds where micro-batches are cut by tokens."""

    ranks: int
    prompts: int
    samples_per_prompt: int
    samples: int
    samples_per_rank: int
    mini_batches: int
    samples_per_mini_batch: int
    samples_per_mini_batch_and_rank: int
    micro_batch_size: int
    micro_batches_per_mini_batch: int
    epochs_per_batch: int
    optimizer_steps: int


def rank_count(config: Mapping[str, Any]) -> int:
    """Ranks of the run."""
    return config["trainer"]["nnodes"] * config["trainer"]["n_gpus_per_node"]


def plan_batches(config: Mapping[str, Any]) -> BatchPlan:
    """The plan of a config in which batch_problems finds nothing."""
    actor, n = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]["n"]
    ranks, prompts = rank_count(config), config["data"]["train_batch_size"]
    mini_samples = min(actor["ppo_mini_batch_size"], prompts) * n
    mini_per_rank = max(1, mini_samples // ranks)
    mini_batches = math.ceil(prompts / actor["ppo_mini_batch_size"])
    micro = min(micro_batch_size(actor, config, ranks), mini_per_rank)
    return BatchPlan(
        ranks=ranks,
        prompts=prompts,
        samples_per_prompt=n,
        samples=prompts * n,
        samples_per_rank=prompts * n // ranks,
        mini_batches=mini_batches,
        samples_per_mini_batch=mini_samples,
        samples_per_mini_batch_and_rank=mini_per_rank,
        micro_batch_size=micro,
        micro_batches_per_mini_batch=math.ceil(mini_per_rank / micro),
        epochs_per_batch=actor["ppo_epochs"],
        optimizer_steps=mini_batches * actor["ppo_epochs"],
    )


def micro_batch_size(actor: Mapping[str, Any], config: Mapping[str, Any], ranks: int) -> int:
    """Samples per forward on one rank; with dynamic batches, full-length samples that fit into the token limit."""
    if actor["use_dynamic_bsz"]:
        longest = config["data"]["max_prompt_length"] + config["data"]["max_response_length"]
        return max(1, actor["ppo_max_token_len_per_gpu"] // longest)
    if actor["ppo_micro_batch_size_per_gpu"] is not None:
        return actor["ppo_micro_batch_size_per_gpu"]
    return max(1, actor["ppo_micro_batch_size"] // ranks)


def batch_problems(config: Mapping[str, Any], *, use_reference_policy: bool, use_critic: bool) -> list[Problem]:
    """Every batch size that cannot be shared out, with numbers that can. `config`: the resolved tree as plain dicts."""
    roles, data = config["actor_rollout_ref"], config["data"]
    actor, rollout = roles["actor"], roles["rollout"]
    ranks, n = rank_count(config), rollout["n"]
    sizes = {"n_gpus": ranks, "train_batch_size": data["train_batch_size"], "rollout_n": n}
    found = actor_problems(actor, **sizes)
    found += one_of(
        rollout,
        "actor_rollout_ref.rollout",
        "log_prob_micro_batch_size",
        ranks,
        dynamic=rollout["log_prob_use_dynamic_bsz"],
    )
    if use_reference_policy and roles["model"]["lora_rank"] == 0 and roles["model"]["lora_adapter_path"] is None:
        ref = roles["ref"]
        dynamic = ref["log_prob_use_dynamic_bsz"]
        found += one_of(ref, "actor_rollout_ref.ref", "log_prob_micro_batch_size", ranks, dynamic=dynamic)
    if use_critic:
        told = {p.key.rpartition(".")[2] for p in found}
        found += [p for p in critic_problems(config["critic"], **sizes) if p.key.rpartition(".")[2] not in told]
    reward = config["reward_model"]
    if reward["enable"]:
        found += one_of(reward, "reward_model", "micro_batch_size", ranks, dynamic=reward["use_dynamic_bsz"])
    found += divides_ranks("actor_rollout_ref.rollout.tensor_model_parallel_size", rollout, ranks)
    found += divides_ranks("actor_rollout_ref.actor.fsdp_config.fsdp_size", actor["fsdp_config"], ranks)
    if data["gen_batch_size"] < data["train_batch_size"]:
        found.append(
            wrong(
                "data.gen_batch_size",
                f"data.gen_batch_size={data['gen_batch_size']} is smaller than data.train_batch_size="
                f"{data['train_batch_size']}, which one generation must be able to fill. Use at least as many.",
            )
        )
    return found


def actor_problems(
    actor: Mapping[str, Any],
    *,
    n_gpus: int,
    train_batch_size: int,
    rollout_n: int,
    prefix: str = "actor_rollout_ref.actor",
) -> list[Problem]:
    """Problems of the actor's batch sizes."""
    found = []
    grouped = actor["share_prompt_forward"]
    for key, prompts in (("data.train_batch_size", train_batch_size), _named(actor, prefix, "ppo_mini_batch_size")):
        if grouped and prompts % n_gpus:
            found.append(
                wrong(
                    key,
                    f"{key}={prompts} prompts cannot be shared evenly by {n_gpus} ranks, and {prefix}."
                    f"share_prompt_forward=true keeps the samples of a prompt on one rank. Use a multiple of "
                    f"{n_gpus}{_near(prompts, n_gpus)}.",
                )
            )
        elif prompts * rollout_n % n_gpus:
            step = n_gpus // math.gcd(rollout_n, n_gpus)
            found.append(
                wrong(
                    key,
                    f"{key}={prompts} x actor_rollout_ref.rollout.n={rollout_n} gives {prompts * rollout_n} samples, "
                    f"which {n_gpus} ranks cannot share evenly. Use a multiple of {step}{_near(prompts, step)}.",
                )
            )
    return found + _update_problems(actor, prefix, n_gpus, train_batch_size)


def critic_problems(
    critic: Mapping[str, Any], *, n_gpus: int, train_batch_size: int, rollout_n: int, prefix: str = "critic"
) -> list[Problem]:
    """Problems of the critic's batch sizes."""
    found = []
    key, prompts = _named(critic, prefix, "ppo_mini_batch_size")
    if prompts * rollout_n % n_gpus:
        step = n_gpus // math.gcd(rollout_n, n_gpus)
        found.append(
            wrong(
                key,
                f"{key}={prompts} x actor_rollout_ref.rollout.n={rollout_n} gives {prompts * rollout_n} samples, "
                f"which {n_gpus} ranks cannot share evenly. Use a multiple of {step}{_near(prompts, step)}.",
            )
        )
    return found + _update_problems(critic, prefix, n_gpus, train_batch_size)


def _update_problems(role: Mapping[str, Any], prefix: str, ranks: int, train_batch_size: int) -> list[Problem]:
    found = []
    mini = role["ppo_mini_batch_size"]
    if mini > train_batch_size:
        key = f"{prefix}.ppo_mini_batch_size"
        found.append(
            wrong(
                key,
                f"{key}={mini} is larger than data.train_batch_size={train_batch_size}, so no step could fill it. "
                f"Use {train_batch_size} or less.",
            )
        )
    return found + one_of(role, prefix, "ppo_micro_batch_size", ranks, dynamic=role["use_dynamic_bsz"])


def one_of(role: Mapping[str, Any], prefix: str, name: str, ranks: int, *, dynamic: bool) -> list[Problem]:
    """Exactly one of `name` (all ranks together, the old way) and `name`_per_gpu, unless batches are cut by tokens."""
    if dynamic:
        return []
    key = f"{prefix}.{name}"
    together, each = role[name], role[f"{name}_per_gpu"]
    if together is None and each is None:
        token_switch = "log_prob_use_dynamic_bsz" if name.startswith("log_prob") else "use_dynamic_bsz"
        return [
            wrong(
                f"{key}_per_gpu",
                f"{key}_per_gpu is not set. Set it to the samples that one rank can hold in a forward, "
                f"or set {prefix}.{token_switch}=true.",
            )
        ]
    if together is not None and each is not None:
        return [
            wrong(
                key,
                f"{key}={together} and {key}_per_gpu={each} are both set. Keep {key}_per_gpu; {name} is the old name.",
            )
        ]
    if together is not None and together % ranks:
        return [
            wrong(
                key,
                f"{key}={together} cannot be shared evenly by {ranks} ranks. Use a multiple of {ranks}"
                f"{_near(together, ranks)}, or set {key}_per_gpu={max(1, together // ranks)} in its place.",
            )
        ]
    return []


def divides_ranks(key: str, section: Mapping[str, Any], ranks: int) -> list[Problem]:
    """The value of `key` must divide the ranks (-1 stands for all of them)."""
    value = section[key.rpartition(".")[2]]
    if value < 1 or ranks % value == 0:
        return []
    fitting = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
    return [wrong(key, f"{key}={value} does not divide the {ranks} ranks. Use one of {fitting}.")]


def _named(role: Mapping[str, Any], prefix: str, name: str) -> tuple[str, int]:
    return f"{prefix}.{name}", role[name]


def _near(value: int, step: int) -> str:
    """The multiples of `step` around a value, as text: ' (56 or 64)'."""
    below = value // step * step
    return f" ({below} or {below + step})" if below else f" ({step})"
