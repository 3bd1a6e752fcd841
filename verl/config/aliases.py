"""Names of settings in later versions of verl, and those of this project: one table for each tree, read at composition.

So a resolved config has one name for one thing, and everything behind it reads that name.
"""

import copy
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loguru import logger
from omegaconf import DictConfig, OmegaConf, open_dict

from verl.config.asynchronous import AsyncTrainingConfig, RolloutPoolConfig
from verl.config.compose import CHOICE, MEGATRON_HINT, to_plain
from verl.config.ppo import PPOConfig
from verl.utils.problems import ConfigError, wrong

ABSENT = object()
MODE = "trainer.v1.trainer_mode"
NO_EFFECT = "accepted without effect"

#: From a value to what is set: {key: value}. Raises ValueError for a value that has no counterpart.
Rule = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Alias:
    """`old`, a key or section of verl since `since`, is `new` here, with the same value unless `rule` says otherwise.

    `text` describes the rule in docs/migrating.md; `new` is empty where no setting here corresponds.
    """

    old: str
    new: str
    since: str
    text: str = "the same value"
    rule: Rule | None = None

    def settings(self, value: Any) -> Mapping[str, Any]:
        """The settings here of a value that is no section."""
        return {self.new: value} if self.rule is None else self.rule(value)


def _only(*accepted: Any, hint: str) -> Rule:
    """Nothing is set for one of these values; any other is refused with the hint."""

    def rule(value: Any) -> dict[str, Any]:
        if value not in accepted:
            raise ValueError(hint)
        return {}

    return rule


def _no_effect(old: str, since: str, why: str) -> Alias:
    return Alias(old, "", since, f"{NO_EFFECT}: {why}", lambda value: {})


def _refused(old: str, since: str, accepted: Sequence[Any], hint: str) -> Alias:
    shown = " or ".join("null" if value is None else str(value).lower() for value in accepted)
    return Alias(old, "", since, f"{shown or 'nothing'} is accepted; otherwise: {hint}", _only(*accepted, hint=hint))


_MODEL, _ACTOR, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))
_SYNC = "the modes here are sync and separate_async. Leave trainer.v1 out; rollout.mode=async serves agent loops."
_OPD = (
    "distillation of the policy's own samples from a teacher is algorithm.adv_estimator=opd with "
    "actor_rollout_ref.ref.model_path=<teacher> here, on the trainer's ranks. Leave distillation out."
)
_SHARED = (
    "the rollout shares the trainer's ranks (trainer.nnodes x trainer.n_gpus_per_node), except in "
    "trainer.v1.trainer_mode=separate_async. Leave the key out."
)
_LOADED = "weights go to the engines of the same processes. Leave checkpoint_engine.backend out."
_STORED = "the first generation is stored and used in every later step (action=repeat). Leave steps out."
_PACKED = "batches are packed without padding. Leave the key out."
_LORA = "only rank, alpha, merge, target_modules, exclude_modules and adapter_path are known."


def _engine(value: Any) -> dict[str, Any]:
    if value != "dp":
        raise ValueError(f"FSDP2 (dp) is the only engine. {MEGATRON_HINT}")
    return {}


def _merged(value: Any) -> dict[str, Any]:
    return {f"{_ROLLOUT}.lora_as_adapter": not value}


def _manager(value: Any) -> dict[str, Any]:
    return {"reward_manager.name": "naive" if value == "gdpo" else value}


def _filter_metric(value: Any) -> dict[str, Any]:
    return {"algorithm.filter_groups.metric": "seq_reward" if value == "reward" else value}


def _profiles() -> Iterator[Alias]:
    """torch.profiler's schedule of each role."""
    for role in (f"{_ACTOR}.profiler", f"{_ROLLOUT}.profiler", "actor_rollout_ref.ref.profiler", "critic.profiler"):
        torch = f"{role}.tool_config.torch"

        def rule(schedule: Any, torch: str = torch) -> dict[str, Any]:
            counts = {"skip_first": 0, "wait": 0, "warmup": 0, "active": 0, "repeat": 0, **schedule}
            if counts["repeat"] > 1:
                raise ValueError("one range of updates is recorded in each profiled step. Set repeat to 0 or 1.")
            start = counts["skip_first"] + counts["wait"] + counts["warmup"]
            end = start + counts["active"] if counts["active"] else None
            return {f"{torch}.step_start": start, f"{torch}.step_end": end}

        span = "step_start = skip_first + wait + warmup, step_end = step_start + active; repeat at most 1"
        yield Alias(f"{torch}.schedule", f"{torch}.step_start", "0.8", span, rule)
        yield _no_effect(f"{torch}.contents", "0.8", "calls, shapes and memory are always recorded")
        yield _refused(f"{torch}.discrete", "0.8", (False, None), "a trace covers one step. Set it to false.")


#: Of the trees with a section actor_rollout_ref; a row for a key stands before the row of its section.
RL: tuple[Alias, ...] = (
    Alias("reward.reward_model.model_path", "reward_model.model.path", "0.7.1"),
    Alias("reward.reward_model.rollout", "reward_model.rollout", "0.7.1"),
    Alias("reward.reward_model", "reward_model", "0.7.1"),
    Alias("reward.custom_reward_function", "custom_reward_function", "0.7.1"),
    Alias("reward.reward_manager.name", "reward_manager.name", "0.7.1", "gdpo means naive, which keeps every value",
          _manager),
    Alias("reward.reward_manager", "reward_manager", "0.7.1"),
    Alias("reward.num_workers", "reward_model.num_workers", "0.7.1"),
    Alias("reward.reward_kwargs", "reward_model.reward_kwargs", "0.7.1"),
    Alias("reward.sandbox_fusion", "reward_model.sandbox_fusion", "0.7.1"),
    Alias("sandbox_fusion", "reward_model.sandbox_fusion", "0.7.1"),
    _no_effect("trainer.use_v1", "0.9", "there is one trainer"),
    Alias(MODE, "", "0.9", f"sync, or separate_async (the settings of fully_async_ppo_trainer); otherwise: {_SYNC}",
          _only("sync", hint=_SYNC)),
    _no_effect("trainer.v1.sync", "0.9", "it has no settings"),
    _no_effect("trainer.v1.colocate_async", "0.9", "read by that mode, which is refused"),
    _no_effect("trainer.v1.separate_async", "0.9", "mode separate_async reads parameter_sync_step only"),
    _no_effect("trainer.v1.sampler", "0.9", "mode separate_async reads max_off_policy_threshold and _strategy only"),
    Alias(
        f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", f"{_ROLLOUT}.update_weights_bucket_megabytes",
        "0.8",
    ),
    _refused(f"{_ROLLOUT}.checkpoint_engine.backend", "0.8", ("naive",), _LOADED),
    _refused(f"{_ROLLOUT}.checkpoint_engine.custom_backend_module", "0.9", (None,), _LOADED),
    _no_effect(f"{_ROLLOUT}.checkpoint_engine.engine_kwargs", "0.8", "settings of backends, which are refused"),
    Alias("algorithm.filter_groups.metric", "algorithm.filter_groups.metric", "0.9", "reward means seq_reward",
          _filter_metric),
    _refused("algorithm.filter_groups.max_inflight_gen_batches", "0.9", (1,),
             "one generation batch is drawn at a time. Leave the key out."),
    Alias("critic.fsdp", "critic.model.fsdp_config", "0.8"),
    Alias(f"{_ACTOR}.policy_loss.tau_pos", f"{_ACTOR}.tau_pos", "0.9"),
    Alias(f"{_ACTOR}.policy_loss.tau_neg", f"{_ACTOR}.tau_neg", "0.9"),
    *(
        _refused(f"{role}.megatron", "0.7", (), MEGATRON_HINT)
        for role in (_ACTOR, "actor_rollout_ref.ref", "critic", "reward_model")
    ),
    _refused("distillation.enabled", "0.8", (False,), _OPD),
    _no_effect("distillation", "0.8", "read with distillation.enabled=true, which is refused"),
    Alias(f"model_engine.{CHOICE}", "", "0.8", "dp is FSDP2, the only engine; others are refused", _engine),
    Alias("skip.rollout.enable", f"{_ROLLOUT}.skip_rollout", "0.9"),
    Alias("skip.rollout.dump_dir", f"{_ROLLOUT}.skip_dump_dir", "0.9"),
    _refused("skip.rollout.action", "0.9", ("repeat",), _STORED),
    Alias("skip.rollout.steps", "", "0.9", f"an empty list is accepted; otherwise: {_STORED}",
          _only([], None, hint=_STORED)),
    Alias(f"{_MODEL}.lora.rank", f"{_MODEL}.lora_rank", "0.8"),
    Alias(f"{_MODEL}.lora.alpha", f"{_MODEL}.lora_alpha", "0.8"),
    Alias(f"{_MODEL}.lora.merge", f"{_ROLLOUT}.lora_as_adapter", "0.8", "the opposite value", _merged),
    Alias(f"{_MODEL}.lora.adapter_path", f"{_MODEL}.lora_adapter_path", "0.8"),
    Alias(f"{_MODEL}.lora.target_modules", f"{_MODEL}.target_modules", "0.8"),
    Alias(f"{_MODEL}.lora.exclude_modules", f"{_MODEL}.exclude_modules", "0.8"),
    _refused(f"{_MODEL}.lora.type", "0.8", ("lora",), _LORA),
    _refused(f"{_MODEL}.lora.dropout", "0.8", (0,), _LORA),
    _refused(f"{_MODEL}.lora.dtype", "0.8", (None,), _LORA),
    Alias("critic.model.lora.rank", "critic.model.lora_rank", "0.8"),
    Alias("critic.model.lora.alpha", "critic.model.lora_alpha", "0.8"),
    Alias("critic.model.lora.target_modules", "critic.model.target_modules", "0.8"),
    _refused(f"{_ROLLOUT}.full_determinism", "0.9", (False,),
             "samples have seeds of their own (rollout.seed), and actor.fsdp_config.full_determinism makes training "
             "repeatable. Leave the key out."),
    _no_effect(f"{_ROLLOUT}.scheduling_policy", "0.8", "servers take requests in the order of their arrival"),
    _refused(f"{_ROLLOUT}.nnodes", "0.8", (0, None), _SHARED),
    _no_effect(f"{_ROLLOUT}.n_gpus_per_node", "0.8", "read with rollout.nnodes above 0, which is refused"),
    Alias(f"{_ACTOR}.entropy_from_logits_chunk_size", f"{_MODEL}.policy.kwargs.chunk_tokens", "0.8"),
    _no_effect("actor_rollout_ref.ref.entropy_from_logits_chunk_size", "0.8", "the actor's value counts"),
    _refused(f"{_ACTOR}.pad_to_length", "0.8", (False, None), _PACKED),
    _refused("actor_rollout_ref.ref.pad_to_length", "0.8", (False, None), _PACKED),
    *(
        _refused(f"{role}.optim.zero_indexed_step", "0.8", (True,), "schedules begin at step 0. Leave the key out.")
        for role in (_ACTOR, "critic")
    ),
    *_profiles(),
)  # fmt: skip

_FSDP = "model.fsdp_config"
_FREE = "the engine decides"


def _packing(pad_mode: Any) -> dict[str, Any]:
    return {"data.packing": pad_mode == "no_padding"}


def _of_sft_engine(value: Any) -> dict[str, Any]:
    if value != "fsdp":
        raise ValueError("FSDP2 is the only engine. Set it to fsdp, or leave it out.")
    return {}


#: Of the trees of supervised fine-tuning.
SFT: tuple[Alias, ...] = (
    Alias("model.path", "model.partial_pretrain", "0.7"),
    Alias("model.use_remove_padding", "use_remove_padding", "0.7"),
    _refused("model.tokenizer_path", "0.7", (None,), "the tokenizer is that of model.path. Leave the key out."),
    _no_effect("model.use_fused_kernels", "0.7", "logits are never held"),
    Alias("engine.strategy", "model.strategy", "0.7"),
    Alias("engine.fsdp_size", f"{_FSDP}.fsdp_size", "0.7"),
    Alias("engine.model_dtype", f"{_FSDP}.model_dtype", "0.7"),
    Alias("engine.dtype", f"{_FSDP}.dtype", "0.7"),
    Alias("engine.wrap_policy", f"{_FSDP}.wrap_policy", "0.7"),
    Alias("engine.offload_policy", f"{_FSDP}.cpu_offload", "0.7"),
    Alias("engine.param_offload", f"{_FSDP}.offload_params", "0.7", "with the optimizer's state"),
    Alias("engine.optimizer_offload", f"{_FSDP}.offload_params", "0.7", "with the weights"),
    Alias("engine.full_determinism", f"{_FSDP}.full_determinism", "0.7"),
    Alias("engine.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size", "0.7"),
    Alias("engine.seed", "trainer.seed", "0.7"),
    *(
        _no_effect(f"engine.{name}", "0.7", _FREE)
        for name in ("reshard_after_forward", "forward_prefetch", "use_orig_params", "use_torch_compile",
                     "entropy_from_logits_with_chunking", "entropy_checkpointing", "forward_only")
    ),
    Alias(f"engine.{CHOICE}", "", "0.7", "fsdp is the only engine", _of_sft_engine),
    Alias(f"optim.{CHOICE}", "", "0.7", "fsdp is the only engine", _of_sft_engine),
    _no_effect(f"profiler.{CHOICE}", "0.7", "SFT runs are not profiled"),
    Alias("optim.lr_scheduler_type", "optim.lr_scheduler", "0.7"),
    Alias("optim.warmup_style", "optim.lr_scheduler", "0.7"),
    _refused("optim.zero_indexed_step", "0.8", (True,), "schedules begin at step 0. Leave the key out."),
    Alias("data.messages_key", "data.multiturn.messages_key", "0.7"),
    Alias("data.tools_key", "data.multiturn.tools_key", "0.7"),
    Alias("data.enable_thinking_key", "data.multiturn.enable_thinking_key", "0.7"),
    _refused("data.enable_thinking_default", "0.8", ("none", None), "thinking is set by the rows' own column."),
    Alias("data.use_dynamic_bsz", "data.packing", "0.7"),
    Alias("data.pad_mode", "data.packing", "0.7", "no_padding is true, others are false", _packing),
    Alias("data.num_workers", "data.dataloader_num_workers", "0.7"),
    _no_effect("data.ignore_input_ids_mismatch", "0.7", "a template that rewrites earlier turns is always refused"),
    Alias("checkpoint.save_contents", "trainer.checkpoint.save_contents", "0.7"),
    Alias("checkpoint.load_contents", "trainer.checkpoint.load_contents", "0.7"),
    _no_effect("trainer.balance_batch", "0.8", "each rank gets as many samples of a batch"),
    _no_effect("trainer.profile_interval", "0.7", "SFT runs are not profiled"),
)  # fmt: skip

#: Sections that this project does not have; what is left in them is refused.
SECTIONS = {
    "RL": ("reward", "skip", "distillation", "trainer.v1", "critic.fsdp", f"{_ROLLOUT}.checkpoint_engine",
           "model_engine", f"{_MODEL}.lora", "critic.model.lora"),
    "SFT": ("engine", "checkpoint", "profiler"),
}  # fmt: skip


def with_current_names(config: DictConfig, given: Collection[str] = ()) -> DictConfig:
    """The config with the names of this project; itself where it has no other. `given`: keys that the user sets.

    Raises ConfigError where a value has no counterpart here, or both names are given with different values.
    """
    rl = "actor_rollout_ref" in config
    table, sections = (RL, SECTIONS["RL"]) if rl else (SFT, SECTIONS["SFT"])
    if not rl and not {"model", "optim"} <= config.keys():
        return config
    if _select(config, MODE) == "separate_async":
        config = _with_separate_ranks(config)
    present = [alias for alias in table if _select(config, alias.old) is not ABSENT]
    if not present:
        return config
    config, problems, origin = copy.deepcopy(config), [], {}
    defaults = PPOConfig() if rl else {}
    with open_dict(config):
        for alias in present:
            value = _take(config, alias.old)
            if alias.text.startswith(NO_EFFECT):
                logger.info("{}={} of verl {} is {}", alias.old, _text(value), alias.since, alias.text)
            for leaf, below in _leaves(alias, value):
                try:
                    settings = alias.settings(below) if not leaf else {f"{alias.new}.{leaf}": below}
                except ValueError as e:
                    problems.append(wrong(alias.old, f"{alias.old}={_text(below)}: {e}"))
                    continue
                old = f"{alias.old}.{leaf}" if leaf else alias.old
                for new, wanted in settings.items():
                    if other := _conflict(config, new, wanted, old, given, origin, defaults):
                        problems.append(wrong(new, f"{old}={_text(wanted)} and {other} are one setting. Give one."))
                    origin[new] = (old, wanted)
                    OmegaConf.update(config, new, wanted, force_add=True)
        for section in sections:
            rest = _select(config, section)
            if rest is ABSENT:
                continue
            names = [name for name in _paths(_take(config, section), section) if not name.endswith("_target_")]
            problems += [wrong(n, f"{n} of verl 0.9 has no counterpart here; leave it out.") for n in names]
    if problems:
        raise ConfigError(problems)
    return config


def _with_separate_ranks(config: DictConfig) -> DictConfig:
    """The config of trainer.v1.trainer_mode=separate_async as one of fully_async_ppo_trainer."""
    config = copy.deepcopy(config)
    training = to_plain(AsyncTrainingConfig(staleness_threshold=1.0, stale_samples="drop", max_staleness=8))
    given = {"trigger_parameter_sync_step": "trainer.v1.separate_async.parameter_sync_step",
             "max_staleness": "trainer.v1.sampler.max_off_policy_threshold",
             "stale_samples": "trainer.v1.sampler.max_off_policy_strategy"}  # fmt: skip
    pool = to_plain(RolloutPoolConfig(total_rollout_steps=None, n=1))
    with open_dict(config):
        training |= {name: _take(config, key) for name, key in given.items() if _select(config, key) is not ABSENT}
        for name in ("nnodes", "n_gpus_per_node"):
            if _select(config, f"{_ROLLOUT}.{name}") is not ABSENT:
                pool[name] = _take(config, f"{_ROLLOUT}.{name}")
        if _select(config, f"{_ROLLOUT}.checkpoint_engine.backend") is not ABSENT:
            _take(config, f"{_ROLLOUT}.checkpoint_engine.backend")
        pool["total_epochs"], pool["test_freq"] = "${trainer.total_epochs}", "${trainer.test_freq}"
        config.async_training, config.rollout = training, pool
        changes = {"actor_rollout_ref.hybrid_engine": False, f"{_ROLLOUT}.mode": "async",
                   f"{_ROLLOUT}.calculate_log_probs": True, f"{_ACTOR}.use_rollout_log_probs": True,
                   f"{_ROLLOUT}.agent.command_journal": False, "data.train_batch_size": 0, MODE: "sync"}  # fmt: skip
        for key, value in changes.items():
            OmegaConf.update(config, key, value)
    return config


def current_names_or_exit(config: DictConfig) -> DictConfig:
    """`with_current_names` of an entry's config; exits with the message where that is refused."""
    try:
        return with_current_names(config, given_keys())
    except ConfigError as e:
        sys.exit(str(e))


def given_keys() -> set[str]:
    """Keys on the command line of the running Hydra application; empty outside of one."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return set()
    return {override.lstrip("+").partition("=")[0] for override in HydraConfig.get().overrides.task}


def _leaves(alias: Alias, value: Any) -> Iterator[tuple[str, Any]]:
    """(path below the alias, value) of each key of a section that is renamed as a whole; else ("", value)."""
    if alias.rule is not None or not isinstance(value, Mapping):
        yield "", value
        return
    for name, below in value.items():
        if name != "_target_":
            yield from ((f"{name}.{rest}".rstrip("."), leaf) for rest, leaf in _leaves(alias, below))


def _conflict(
    config: DictConfig, new: str, wanted: Any, old: str, given: Collection[str], origin: Mapping[str, Any],
    defaults: Any,
) -> str:
    """The other name with its value, where that is given too and differs; else empty."""
    if new in origin:
        other, value = origin[new]
        return f"{other}={_text(value)}" if value != wanted else ""
    value = _select(config, new)
    if value is ABSENT or value == wanted or new == old or str(value).startswith("${"):
        return ""
    default = _select(defaults, new)
    return f"{new}={_text(value)}" if new in given or default is not ABSENT and value != default else ""


def _select(node: Any, path: str) -> Any:
    """The raw value at a dotted path, ABSENT where there is none."""
    for part in path.split("."):
        if not isinstance(node, Mapping | DictConfig) or part not in node:
            return ABSENT
        node = node._get_node(part) if isinstance(node, DictConfig) else node[part]
    if OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=False)
    return node._value() if hasattr(node, "_value") else node


def _take(config: DictConfig, path: str) -> Any:
    """The value at a path, which is removed."""
    value, (parent, _, name) = _select(config, path), path.rpartition(".")
    del (OmegaConf.select(config, parent) if parent else config)[name]
    return value


def _paths(value: Any, path: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [path]
    return [name for key, below in value.items() for name in _paths(below, f"{path}.{key}")]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
