"""Batch sizes of a step on each rank, and checks that the batches can be divided evenly."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.roles import serves_reward_model
from verl.utils.problems import UNUSED, Problem, wrong

ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class BatchPlan:
    """One training step in numbers; micro-batch counts are upper bounds where micro-batches are cut by tokens."""

    ranks: int
    prompts: int
    samples_per_prompt: int
    mini_batches: int
    samples_per_mini_batch: int
    micro_batch_size: int
    epochs: int

    @property
    def samples_per_rank(self) -> int:
        return self.prompts * self.samples_per_prompt // self.ranks

    def rows(self) -> dict[str, str]:
        """The plan as a table: name -> value."""
        prompts, n, minis = self.prompts, self.samples_per_prompt, self.mini_batches
        share = max(1, self.samples_per_mini_batch // self.ranks)
        micros = math.ceil(share / self.micro_batch_size)
        most = "at most " if share % self.micro_batch_size else ""
        return {
            "ranks": str(self.ranks),
            "prompts a step": f"{prompts:,}",
            "samples a step": f"{prompts * n:,} ({prompts:,} prompts x {n})",
            "samples a step and rank": f"{self.samples_per_rank:,}",
            "mini-batches a step": f"{minis:,} of {self.samples_per_mini_batch:,} samples",
            "samples a mini-batch and rank": f"{share:,}",
            "micro-batches a mini-batch and rank": f"{micros:,} of {most}{self.micro_batch_size:,} samples",
            "optimizer steps a step": f"{minis * self.epochs:,} ({minis:,} mini-batches x {self.epochs} epochs)",
        }


def rank_count(config: Mapping[str, Any]) -> int:
    """Ranks of the run."""
    return _pool_ranks(config["trainer"])


def _pool_ranks(section: Mapping[str, Any]) -> int:
    """Ranks of the pool that a section such as trainer describes."""
    return section["nnodes"] * section["n_gpus_per_node"]


def fills_from_several(config: Mapping[str, Any]) -> bool:
    """Whether a step's batch is filled with the groups that pass a filter (DAPO), of as many draws as that takes."""
    algorithm = config["algorithm"]
    filters = algorithm["filter_groups"] if "filter_groups" in algorithm else None
    return bool(filters and filters["enable"])


def prompts_a_step(config: Mapping[str, Any]) -> tuple[str, int]:
    """(key, its value) that says how many prompts a step trains on: all that are drawn, where none is filtered."""
    data = config["data"]
    drawn, wanted = (f"data.{name}" for name in ("gen_batch_size", "train_batch_size"))
    if fills_from_several(config) or data["gen_batch_size"] <= data["train_batch_size"]:  # fewer are refused
        return wanted, data["train_batch_size"]
    return drawn, data["gen_batch_size"]


def steps_in_all(draws: int, config: Mapping[str, Any]) -> int:
    """Steps of trainer.total_epochs of `draws` each: one draw per step, or as many as data.train_batch_size takes.

    Of asynchronous training, at most those of rollout.total_rollout_steps prompts.
    """
    drawn, wanted = (config["data"][name] for name in ("gen_batch_size", "train_batch_size"))
    steps = max(1, draws * config["trainer"]["total_epochs"] * drawn // max(drawn, wanted))
    prompts = config["rollout"]["total_rollout_steps"] if "rollout" in config else None
    return steps if prompts is None else min(steps, prompts // wanted)


def plan_batches(config: Mapping[str, Any]) -> BatchPlan:
    """The plan of a config in which batch_problems finds nothing."""
    actor, n = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]["n"]
    ranks, prompts, mini = rank_count(config), prompts_a_step(config)[1], actor["ppo_mini_batch_size"]
    samples = min(mini, prompts) * n
    micro = min(micro_batch_size(actor, config, ranks), max(1, samples // ranks))
    return BatchPlan(ranks, prompts, n, math.ceil(prompts / mini), samples, micro, actor["ppo_epochs"])


def micro_batch_size(actor: Mapping[str, Any], config: Mapping[str, Any], ranks: int) -> int:
    """Samples per forward on one rank; with dynamic batches, full-length samples that fit into the token limit.

    Samples that share their prompt's forward stay together, and the prompt's tokens count once.
    """
    if actor["use_dynamic_bsz"]:
        together = config["actor_rollout_ref"]["rollout"]["n"] if actor["share_prompt_forward"] else 1
        tokens = config["data"]["max_prompt_length"] + together * config["data"]["max_response_length"]
        return together * max(1, actor["ppo_max_token_len_per_gpu"] // tokens)
    return actor["ppo_micro_batch_size_per_gpu"] or max(1, actor["ppo_micro_batch_size"] // ranks)


def batch_problems(config: Mapping[str, Any], *, use_reference_policy: bool, use_critic: bool) -> list[Problem]:
    """Every batch size that cannot be shared out, with numbers that can. `config`: the resolved tree as plain dicts."""
    roles, data, reward = config["actor_rollout_ref"], config["data"], config["reward_model"]
    actor, rollout, ref, model = roles["actor"], roles["rollout"], roles["ref"], roles["model"]
    ranks, log_prob, (prompts_key, size) = rank_count(config), "log_prob_micro_batch_size", prompts_a_step(config)
    n = rollout["n"]
    sizes = {"n_gpus": ranks, "train_batch_size": size, "rollout_n": n, "prompts_key": prompts_key}
    issues = actor_problems(actor, **sizes)
    dynamic = rollout["log_prob_use_dynamic_bsz"]
    issues += check_exactly_one_batch_size(rollout, "actor_rollout_ref.rollout", log_prob, ranks, dynamic)
    if use_reference_policy and model["lora_rank"] == 0 and model["lora_adapter_path"] is None:
        dynamic = ref["log_prob_use_dynamic_bsz"]
        issues += check_exactly_one_batch_size(ref, "actor_rollout_ref.ref", log_prob, ranks, dynamic)
    if use_critic:
        known_keys = {p.key.rpartition(".")[2] for p in issues}
        more = update_problems(config["critic"], "critic", ranks, (prompts_key, size), n)
        issues += [p for p in more if p.key.rpartition(".")[2] not in known_keys]
    used = {"actor_rollout_ref.actor": True, "actor_rollout_ref.ref": use_reference_policy, "critic": use_critic}
    issues += _other_n(f"{ROLLOUT}.multi_turn.num_repeat_rollouts", rollout["multi_turn"].get("num_repeat_rollouts"), n)
    for (prefix, present), role in zip(used.items(), (actor, ref, config["critic"]), strict=True):
        if present:
            issues += _other_n(f"{prefix}.rollout_n", role.get("rollout_n"), n)
            owner, section = (f"{prefix}.model", role["model"]) if prefix == "critic" else (prefix, role)
            sequences = role["ulysses_sequence_parallel_size"]
            issues += divides_ranks(f"{prefix}.ulysses_sequence_parallel_size", role, ranks)
            issues += splits_ranks(f"{owner}.fsdp_config", section["fsdp_config"], ranks, sequences)
    own = _pool_ranks(reward) if reward["enable_resource_pool"] else ranks
    if reward["enable"] and not own:
        rule = "reward_model.enable_resource_pool=true: reward_model.nnodes x reward_model.n_gpus_per_node is 0 ranks."
        issues.append(wrong("reward_model.nnodes", f"{rule} Set both to 1 or more."))
    elif reward["enable"] and not serves_reward_model(config):  # servers make batches of their own
        dynamic = reward["use_dynamic_bsz"]
        issues += check_exactly_one_batch_size(reward, "reward_model", "micro_batch_size", own, dynamic)
        issues += divides_ranks("reward_model.ulysses_sequence_parallel_size", reward, own)
        sequences, engine = reward["ulysses_sequence_parallel_size"], reward["model"]["fsdp_config"]
        issues += splits_ranks("reward_model.model.fsdp_config", engine, own, sequences)
    generating = _pool_ranks(config["rollout"]) if "rollout" in config else ranks  # asynchronous runs: their own pool
    issues += divides_ranks("actor_rollout_ref.rollout.tensor_model_parallel_size", rollout, generating)
    issues += divides_ranks("actor_rollout_ref.actor.fsdp_config.fsdp_size", actor["fsdp_config"], ranks)
    if (drawn := data["gen_batch_size"]) < size and not fills_from_several(config):
        key = "data.gen_batch_size"
        rule = f"{key}={drawn} is smaller than data.train_batch_size={size}, which one generation must be able to fill."
        remedy = "Use at least as many, or DAPO with algorithm.filter_groups.enable=true, where several fill it."
        issues.append(wrong(key, f"{rule} {remedy}"))
    return issues


def _other_n(key: str, value: int | None, n: int) -> list[Problem]:
    """A second name of rollout.n (null follows it) with another value."""
    if value in (None, n):
        return []
    return [wrong(key, f"{key}={value}, but {ROLLOUT}.n={n}: both are the samples of a prompt. Set {ROLLOUT}.n only.")]


def actor_problems(
    actor: Mapping[str, Any], *, n_gpus: int, train_batch_size: int, rollout_n: int,
    prompts_key: str = "data.train_batch_size",
) -> list[Problem]:
    """Problems of the actor's batch sizes; `prompts_key` is the key that a step's prompts come from."""
    grouped, step = actor["share_prompt_forward"], (prompts_key, train_batch_size)
    issues = _uneven(*step, rollout_n, n_gpus, grouped)
    return issues + update_problems(actor, "actor_rollout_ref.actor", n_gpus, step, rollout_n, grouped)


def update_problems(
    role: Mapping[str, Any], prefix: str, ranks: int, step: tuple[str, int], n: int, grouped: bool = False
) -> list[Problem]:
    """Problems of a role's batch sizes in an update; `step`: the key that a step's prompts come from, their number.

    `grouped`: the samples of one prompt stay on one rank.
    """
    prompts_key, prompts = step
    key, mini = f"{prefix}.ppo_mini_batch_size", role["ppo_mini_batch_size"]
    issues = _uneven(key, mini, n, ranks, grouped)
    if mini > prompts:
        rule = f"{key}={mini} is larger than {prompts_key}={prompts}, so no step could fill it."
        issues.append(wrong(key, f"{rule} Use {prompts} or less."))
    return issues + check_exactly_one_batch_size(role, prefix, "ppo_micro_batch_size", ranks, role["use_dynamic_bsz"])


def _uneven(key: str, prompts: int, n: int, ranks: int, grouped: bool) -> list[Problem]:
    """Samples that ranks cannot share; `grouped`: those of one prompt stay on one rank."""
    step = ranks if grouped else ranks // math.gcd(n, ranks)
    if prompts % step == 0:
        return []
    samples = f"{key}={prompts} x actor_rollout_ref.rollout.n={n} gives {prompts * n} samples"
    rule = f"{samples}, which {ranks} ranks cannot share"
    if grouped:
        switch = "actor_rollout_ref.actor.share_prompt_forward=true keeps the samples of a prompt on one rank"
        rule = f"{switch}, and {key}={prompts} prompts cannot be shared by {ranks} ranks"
    return [wrong(key, f"{rule} evenly. Use a multiple of {step}{_near(prompts, step)}.")]


def check_exactly_one_batch_size(
    role: Mapping[str, Any], prefix: str, name: str, ranks: int, dynamic: bool
) -> list[Problem]:
    """Exactly one of `name` (deprecated: of all ranks) and `name`_per_gpu is set, unless batch sizes are dynamic."""
    key, together, each = f"{prefix}.{name}", role[name], role[f"{name}_per_gpu"]
    if dynamic:
        return []
    if together is None and each is None:
        switch = "log_prob_use_dynamic_bsz" if name.startswith("log_prob") else "use_dynamic_bsz"
        remedy = f"Set it to the samples that one rank can hold in a forward, or set {prefix}.{switch}=true."
        return [wrong(f"{key}_per_gpu", f"{key}_per_gpu is not set. {remedy}")]
    if together is not None and each is not None:
        rule = f"{key}={together} and {key}_per_gpu={each} are both set."
        return [wrong(key, f"{rule} Keep {key}_per_gpu; {name} is the old name.")]
    if together is not None and together % ranks:
        rule = f"{key}={together} cannot be shared evenly by {ranks} ranks. Use a multiple of {ranks}"
        own = f"set {key}_per_gpu={max(1, together // ranks)} in its place"
        return [wrong(key, f"{rule}{_near(together, ranks)}, or {own}.")]
    return []


def divides_ranks(key: str, section: Mapping[str, Any], ranks: int) -> list[Problem]:
    """The value of `key` must divide the ranks (-1 stands for all of them)."""
    value = section[key.rpartition(".")[2]]
    if value < 1 or ranks % value == 0:
        return []
    if ranks == 1:
        return [wrong(key, f"{key}={value}, but there is 1 rank. Set it to 1, or start more ranks.")]
    fitting = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
    return [wrong(key, f"{key}={value} does not divide the {ranks} ranks. Use one of {fitting}.")]


def sharding_ranks(engine: Mapping[str, Any], ranks: int) -> int:
    """Ranks that share one copy of the weights, of all `ranks`."""
    return ranks if engine["fsdp_size"] == -1 else min(engine["fsdp_size"], ranks)


def splits_ranks(prefix: str, engine: Mapping[str, Any], ranks: int, sequences: int) -> list[Problem]:
    """Tensor parallel ranks divide those that share one copy of the weights, and with `sequences` all `ranks`."""
    key, size = f"{prefix}.tensor_parallel_size", engine["tensor_parallel_size"]
    issues = divides_ranks(key, engine, sharding_ranks(engine, ranks))
    if not issues and sequences > 1 and ranks % sequences == 0 and ranks % (size * sequences):
        rule = f"{key}={size} x ulysses_sequence_parallel_size={sequences} does not divide the {ranks} ranks."
        issues.append(wrong(key, f"{rule} Lower one of them."))
    if engine["sequence_parallel"] and size == 1:
        what = f"{prefix}.sequence_parallel=True has no effect with {key}=1. Set {key} to the ranks that split a layer."
        issues.append(Problem(UNUSED, f"{prefix}.sequence_parallel", what))
    return issues


def _near(value: int, step: int) -> str:
    """The multiples of `step` around a value, as text: ' (56 or 64)'."""
    below = value // step * step
    return f" ({below} or {below + step})" if below else f" ({step})"
