"""Checks of a composed config before anything starts."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.algos.names import READS_SQUARES
from verl.config.aliases import MODE, text, with_current_names
from verl.config.asynchronous import tree_type
from verl.config.batch_sizes import ROLLOUT, batch_problems, rank_count
from verl.config.common import RunConfig
from verl.config.compose import select, to_settings
from verl.config.defaults import resolved
from verl.config.fields import field_metadata, field_types, known_names, section_type, value_errors
from verl.config.ppo import PPOConfig
from verl.config.roles import LEARNS_VALUES, need_critic, reads_reference, serves_reward_model
from verl.config.rollout import ROLLOUTS_OF_THE_ACTOR, RolloutConfig
from verl.utils.import_utils import import_external_libs
from verl.utils.problems import UNUSED, Problem, wrong

# Below these any key is accepted: a name anywhere, or the end of a path.
OPEN = (
    "override_config", "override_optimizer_config", "engine_kwargs", "reward_kwargs", "apply_chat_template_kwargs",
    "pf_ppo", "fused_kernel_options", "wrap_policy", "mixed_precision", "rollout.custom", "data.custom",
    "loader.kwargs", "policy.kwargs", "ray_kwargs.ray_init", "environment.params", "environment.tasks",
    "actor.auxiliary_losses",
)  # fmt: skip
PROFILED = ("actor_rollout_ref.actor", ROLLOUT, "actor_rollout_ref.ref", "critic", "reward_model")
ADDABLE = {"trainer.wandb_proxy"}  # upstream's scripts add these with a +, which a key in the yaml would forbid

# Names whose wrong values would make the batch arithmetic, or the plan of a dry run, meaningless.
ARITHMETIC = {
    "train_batch_size", "gen_batch_size", "n", "nnodes", "n_gpus_per_node", "ppo_mini_batch_size", "fsdp_size",
    "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size", "use_dynamic_bsz",
    "log_prob_micro_batch_size_per_gpu", "micro_batch_size", "micro_batch_size_per_gpu", "tensor_model_parallel_size",
    "max_prompt_length", "max_response_length", "ppo_max_token_len_per_gpu", "ppo_epochs", "total_epochs", "dtype",
    "model_dtype", "lora_rank", "max_num_seqs",
}  # fmt: skip


def is_open(path: str) -> bool:
    """Whether any sub-key is accepted under this dotted path."""
    return f".{path}".endswith(tuple(f".{name}" for name in OPEN))


def find_problems(
    config: DictConfig,
    *,
    known: DictConfig | None = None,
    use_reference_policy: bool | None = None,
    use_critic: bool | None = None,
) -> list[Problem]:
    """All problems of an RL config: unknown keys, values, names of registered parts, batch arithmetic.

    `known` is the tree without overrides, composed here inside a Hydra application; without either, only the keys of
    PPOConfig are compared. The two roles follow from the config where they are not given.
    """
    problems, settings, _ = tree_problems(config, PPOConfig, known)
    if settings is None:
        return problems
    return problems + rl_problems(settings, problems, use_reference_policy, use_critic)


def rl_problems(
    settings: PPOConfig, problems: list[Problem], use_reference_policy: bool | None = None,
    use_critic: bool | None = None,
) -> list[Problem]:  # fmt: skip
    """Problems beyond keys and values: names of registered parts, batch arithmetic, rules between sections.

    `problems` are those that are known: batch sizes with a wrong value are not computed with.
    """
    more = registered_names(settings)
    roles = settings.actor_rollout_ref
    complete = all(isinstance(part, Mapping) for part in (roles.model, roles.actor, roles.ref, roles.rollout))
    if complete and not any(p.key.rpartition(".")[2] in ARITHMETIC for p in problems):
        reference = reads_reference(settings) if use_reference_policy is None else use_reference_policy
        critic = need_critic(settings) if use_critic is None else use_critic
        more += batch_problems(settings, use_reference_policy=reference, use_critic=critic)
        more += cross_problems(settings)
    return more


def tree_problems(
    config: DictConfig, config_type: type, known: DictConfig | None = None
) -> tuple[list[Problem], Any, list[Problem]]:
    """Unknown keys, missing values, types and ranges of any tree; the typed tree, None where there can be none; and
    `unused_settings`, which are no reason to refuse it.

    `config_type` is the dataclass of the tree; sections that it does not have, such as a recipe's, are not checked.
    A tree with problems has their values as they are.
    """
    known = known_tree() if known is None else known
    raw = OmegaConf.to_container(config, resolve=False)
    config_type = tree_type(config_type, raw)
    issues = [] if known is None else unknown_keys(raw, OmegaConf.to_container(known, resolve=False))
    missing: list[str] = []
    try:
        missing = sorted(k for k in OmegaConf.missing_keys(config) if not is_open(k.rpartition(".")[0]))
        issues += [wrong(k, f"{k} has no value; it must be given: {k}=...") for k in missing]
        plain = resolved(config)
    except OmegaConfBaseException as e:
        if not missing:
            issues.append(wrong(str(e.full_key), f"{e.full_key} cannot be resolved: {str(e.msg).splitlines()[0]}"))
        return issues, None, []
    reported = {p.key for p in issues}
    found = [p for p in value_problems(plain, "", config_type) if p.key not in reported]
    found += grading_problems(plain)
    # A key that only follows another one has that one's problem: the messages differ in the key before the "=".
    followers = {p.key for p in found if is_interpolation(select(raw, p.key, None))}
    given = {p.message.partition("=")[2] for p in found if p.key not in followers}
    issues += [p for p in found if p.key not in followers or p.message.partition("=")[2] not in given]
    sections = [name for name, hint in field_types(config_type).items() if section_type(hint) is not None]
    if not all(isinstance(plain.get(name), Mapping) for name in sections):
        return issues, None, []
    try:
        return issues, to_settings(plain, config_type, not issues), unused_settings(plain, raw, config_type)
    except (AttributeError, ImportError, ValueError) as e:  # of a class in _target_
        return [*issues, wrong("_target_", f"the config cannot be read: {e}")], None, []


def known_tree(config_name: str | None = None, overrides: Sequence[str] | None = None) -> DictConfig | None:
    """The tree `config_name` without `overrides`, choices of config groups and of verl 0.9's mode excepted.

    Needs an initialised Hydra. By default those of the running Hydra application; None outside of one.
    """
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if config_name is None:
        if not (HydraConfig.initialized() and GlobalHydra.instance().is_initialized()):
            return None
        app = HydraConfig.get()
        # Unresolved: an override may have an interpolation, which Hydra's own tree cannot resolve.
        config_name, overrides = app.job.config_name, OmegaConf.to_container(app.overrides.task, resolve=False)
    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    chosen = [o for o in parsed if loader.get_group_options(o.key_or_group) or o.key_or_group == MODE]
    tree = compose(config_name, [o.input_line for o in chosen])
    return with_current_names(tree)


def unknown_keys(settings: Mapping[str, Any], known: Mapping[str, Any]) -> list[Problem]:
    """Keys that the known tree does not have (with the nearest it has), sections turned into values, removed keys."""
    return list(_compare(settings, known, "", list(paths(known))))


def _compare(settings: Mapping, known: Mapping, path: str, names: list[str]) -> Iterator[Problem]:
    for key, value in settings.items():
        full = f"{path}.{key}" if path else str(key)
        if full in ADDABLE or is_open(full):
            continue
        if key not in known:
            yield wrong(full, f"{full} is not a known key{nearest_key(full, names)}")
        elif isinstance(known[key], dict) and isinstance(value, dict):
            yield from _compare(value, known[key], full, names)
        elif isinstance(value, dict):
            yield wrong(full, f"{full} is one value, not a section; it has no key {', '.join(map(str, value))}.")
        elif isinstance(known[key], dict) and not is_interpolation(value):
            yield wrong(full, f"{full}={value} is a section; set one of its keys: {', '.join(map(str, known[key]))}.")
    for full in (f"{path}.{key}" if path else str(key) for key in known if key not in settings):
        yield wrong(full, f"{full} was removed from the config; leave it in, and change its value.")


def nearest_key(full: str, names: list[str]) -> str:
    """'; did you mean x?': a sibling first, then the same name elsewhere, then the full path; else what there is."""
    parent, _, name = full.rpartition(".")
    siblings = {n.rpartition(".")[2]: n for n in names if n.rpartition(".")[0] == parent}
    namesakes = sorted(n for n in names if n.rpartition(".")[2] == name)
    words = name.split("_")
    close = [n for s, n in siblings.items() if all(any(part.startswith(w) for part in s.split("_")) for w in words)]
    close = close[:1] if len(words) > 1 else []  # total_step: total_training_steps rather than total_epochs
    close = close or [siblings[c] for c in difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)]
    close = close or difflib.get_close_matches(full, namesakes, n=1, cutoff=0.0)
    close = close or difflib.get_close_matches(full, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f". Keys of this section: {', '.join(siblings) or 'none'}."


def value_problems(plain: Mapping[str, Any], section: str, dataclass_type: type) -> list[Problem]:
    """Keys, types and ranges of one section with its sub-sections, then the rules between its keys."""
    node = select(plain, section, None) if section else plain
    if not isinstance(node, Mapping):
        return []
    start = f"{section}." if section else ""
    known = [f"{start}{name}" for name in known_names(dataclass_type)]
    issues = []
    for key in [f"{start}{name}" for name in node] if section else ():  # a recipe may add sections to the tree
        if key not in known and key not in ADDABLE:
            issues.append(wrong(key, f"{key} is not a known key{nearest_key(key, known)}"))
    issues += [wrong(f"{start}{name}", message) for name, message in value_errors(dataclass_type, node, section)]
    for name, hint in field_types(dataclass_type).items():
        nested = section_type(hint)
        if nested is not None and isinstance(node.get(name), Mapping):
            issues += value_problems(plain, f"{start}{name}", nested)
    if not issues:
        try:
            dataclass_type(**{k: v for k, v in node.items() if f"{start}{k}" in known})
        except ValueError as e:  # names keys by the section of the class, such as rollout.n
            text = re.sub(rf"(?<![\w.]){re.escape(dataclass_type.section)}\.", start, str(e)) if section else str(e)
            issues.append(wrong(section, text if start in text else f"{section}: {text}"))
    return issues


def unused_settings(plain: Mapping[str, Any], raw: Mapping[str, Any], config_type: type) -> list[Problem]:
    """A problem for each key that this run does not read (`verl.config.inert`) and whose value is not the default.

    `plain` and `raw` are the tree with and without values for its interpolations; keys that follow another key are left
    out: that one is reported.
    """
    rollout = select(plain, "actor_rollout_ref.rollout.name", select(plain, "rollout.name", None))
    mode = select(plain, "actor_rollout_ref.rollout.mode", select(plain, "rollout.mode", None))
    default, problems = config_type(), []
    for key in paths(plain):
        value = select(plain, key, None)
        if key.endswith("._target_") or isinstance(value, Mapping):
            continue
        if key == "rollout.dtype":  # of main_generation, which loads a module in this type for rollout hf
            continue
        reason = _unused_reason(config_type, key, (rollout, f"{rollout}/{mode}"))
        if reason and not is_interpolation(select(raw, key, None)) and value != select(default, key, None):
            problems.append(Problem(UNUSED, key, f"{key}={text(value)} has no effect in this version: {reason}."))
    return problems


def _unused_reason(owner: type | None, key: str, rollouts: tuple[str | None, ...]) -> str | None:
    """What happens instead of reading a key, or a section that it is in; None if the setting has its effect.

    A reason may depend on the rollout: then it is looked up by each of `rollouts`, "name" and "name/mode".
    """
    for name in key.split("."):
        if owner is None or name not in known_names(owner):
            return None
        reason = field_metadata(owner, name)["unused"]
        if isinstance(reason, Mapping):
            reason = next((reason[rollout] for rollout in rollouts if rollout in reason), None)
        if reason:
            return reason
        owner = section_type(field_types(owner).get(name))
    return None


def registered_names(settings: PPOConfig) -> list[Problem]:
    """Names that registries of this floor must know; external_lib is imported first, since it may add some."""
    from verl.algos.names import POLICY_LOSSES, AdvantageEstimator

    issues = []
    key = "actor_rollout_ref.model.external_lib"
    if module := select(settings, key, None):
        try:
            import_external_libs(module)
        except ImportError as e:
            issues.append(wrong(key, f"{key}={module} cannot be imported: {e}."))
    built_in = {
        "algorithm.adv_estimator": tuple(AdvantageEstimator),
        "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSSES,
    }
    others = {key: name for key, known in built_in.items() if (name := select(settings, key, MISSING)) not in known}
    if others:
        from verl.algos.advantage import get_adv_estimator_fn  # takes seconds
        from verl.algos.policy_loss import get_loss_fn

        look_up = dict(zip(built_in, (get_adv_estimator_fn, get_loss_fn), strict=True))
        for key, name in others.items():
            try:
                look_up[key](name)
            except ValueError as e:
                issues.append(wrong(key, str(e)))
    return issues


def cross_problems(settings: PPOConfig) -> Iterator[Problem]:
    """Rules between keys of different sections."""
    actor, rollout, trainer = settings.actor_rollout_ref.actor, settings.actor_rollout_ref.rollout, settings.trainer
    sampling, key = rollout.val_kwargs, "actor_rollout_ref.rollout.val_kwargs"
    yield from algorithm_problems(settings)
    ranks = rank_count(settings)
    if trainer.local and ranks > 1:
        rule = f"trainer.local=true runs one rank in this process, but {ranks} ranks are requested."
        yield wrong("trainer.local", f"{rule} Set trainer.nnodes=1 trainer.n_gpus_per_node=1.")
    if rollout.temperature == 0:
        reported = "actor_rollout_ref.rollout.temperature"
        rule = f"{reported}=0 makes all samples of a prompt the same, and their log-probs are those of no distribution."
        yield wrong(reported, f"{rule} Set it to 1, say; validation is greedy by val_kwargs.")
    if sampling.do_sample and sampling.temperature == 0:
        rule = f"{key}.do_sample=true cannot sample at {key}.temperature=0. Set it to 1, say."
        yield wrong(f"{key}.temperature", rule)
    if not sampling.do_sample and sampling.n > 1:
        rule = f"{key}.n={sampling.n} greedy samples would be all the same. Set {key}.do_sample=true"
        yield wrong(f"{key}.n", f"{rule} and a temperature.")
    correction = settings.algorithm.rollout_correction
    parts = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold", "bypass_mode")
    used = {f"algorithm.rollout_correction.{name}": correction[name] for name in parts if correction}
    used["actor_rollout_ref.actor.use_rollout_log_probs"] = actor.use_rollout_log_probs
    if not rollout.calculate_log_probs and (set_ones := {key: value for key, value in used.items() if value}):
        key, value = next(iter(set_ones.items()))
        rule = f"{key}={text(value)} needs the rollout's log-probs, which are not requested."
        yield wrong(key, f"{rule} Set actor_rollout_ref.rollout.calculate_log_probs=true.")
    split = actor.fsdp_config.tensor_parallel_size
    if split > 1 and rollout.name in ROLLOUTS_OF_THE_ACTOR:
        key = "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size"
        rule = f"{key}={split}: rollout.name={rollout.name} generates with the actor's own module, which it cannot do"
        yield wrong(key, f"{rule} while ranks split its layers. Set it to 1, or actor_rollout_ref.rollout.name=vllm.")
    if settings.algorithm.use_pf_ppo and actor.share_prompt_forward:
        rule = "algorithm.use_pf_ppo=true resamples rows, so that those of a prompt are no group any more."
        yield wrong("algorithm.use_pf_ppo", f"{rule} Set actor_rollout_ref.actor.share_prompt_forward=false.")
    reward = settings.reward_model
    if serves_reward_model(settings) and not reward.enable_resource_pool:
        key, other = ("reward_model.rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.gpu_memory_utilization")
        shares = [reward.rollout.gpu_memory_utilization, rollout.gpu_memory_utilization]
        engines = trainer.device == "cuda" and rollout.name not in ROLLOUTS_OF_THE_ACTOR
        if engines and round(sum(shares), 6) > 0.9:
            rule = f"{key}={shares[0]} and {other}={shares[1]} are shares of the same GPU, which also holds the actor."
            fix = "Lower them to 0.9 together, or set reward_model.enable_resource_pool=true and reward_model.nnodes=1."
            yield wrong(key, f"{rule} {fix}")
    yield from sampling_problems(rollout)
    yield from profiler_problems(settings)
    yield from resume_problems(trainer)


def algorithm_problems(settings: PPOConfig) -> Iterator[Problem]:
    """What an estimator, a KL term or n samples of a prompt need and the config does not give."""
    algorithm, roles = settings.algorithm, settings.actor_rollout_ref
    actor, sampling, rollout = roles.actor, roles.rollout, "actor_rollout_ref.rollout"
    kl_terms = {
        "algorithm.kl_penalty": algorithm.kl_penalty if algorithm.use_kl_in_reward else None,
        "actor_rollout_ref.actor.kl_loss_type": actor.kl_loss_type if actor.use_kl_loss else None,
    }
    for key, estimator in kl_terms.items():
        if estimator in ("full", "full+"):
            rule = f"{key}={estimator} needs the log-probs of the full vocabulary, which are never held here."
            yield wrong(key, f"{rule} Set it to low_var_kl, the low-variance estimate from sampled tokens.")
    if (estimator := algorithm.adv_estimator) in LEARNS_VALUES and not need_critic(settings):
        rule = f"critic.enable=false with algorithm.adv_estimator={estimator}, which rests on the critic's values."
        yield wrong("critic.enable", f"{rule} Leave critic.enable out, or take an estimator such as grpo.")
    n, key = sampling.n, f"{rollout}.n"
    if estimator in READS_SQUARES and not actor.calculate_sum_pi_squared:
        name = "actor_rollout_ref.actor.calculate_sum_pi_squared"
        rule = f"algorithm.adv_estimator={estimator} needs the sums of squared probabilities"
        yield wrong(name, f"{rule}, which are not requested. Set {name}=true.")
    if estimator == "grpo_passk" and n < 2:
        rule = f"{key}={n} with algorithm.adv_estimator=grpo_passk, which compares the best sample with the second."
        yield wrong(key, f"{rule} Set {key} to 2 or more.")
    if n > 1 and not sampling.do_sample:
        rule = f"{key}={n} samples of {rollout}.do_sample=false would be all the same."
        yield wrong(f"{rollout}.do_sample", f"{rule} Set {rollout}.do_sample=true, or {key}=1.")


def sampling_problems(rollout: RolloutConfig) -> Iterator[Problem]:
    """A warning where training samples are drawn with filters or a penalty of repeated tokens, and the trainer's
    log-probs will be those without.
    """
    if rollout.repetition_penalty != 1 and rollout.name in ("vllm", "sglang"):
        key = "actor_rollout_ref.rollout.repetition_penalty"
        what = f"{key}={rollout.repetition_penalty} biases every ratio: samples come from probabilities with it"
        yield Problem(UNUSED, key, f"{what}, the trainer's log-probs from those without. Set it to 1 in training.")
    filters = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0}
    name, engine = next((name for name, used in filters.items() if used), None), rollout.name
    if name is None or not rollout.do_sample or engine not in ("hf", "refine", "vllm", "sglang"):
        return
    missing = [] if rollout.record_sampling_mask else [f"{ROLLOUT}.record_sampling_mask=true"]
    if engine == "vllm":
        missing += [] if rollout.top_k > 0 else [f"{ROLLOUT}.top_k=100, say,"]
        processed = rollout.logprobs_mode == "processed_logprobs"
        missing += [] if processed else [f"{ROLLOUT}.logprobs_mode=processed_logprobs"]
        missing += [f"{ROLLOUT}.prompt_queue=false"] if rollout.prompt_queue else []
    if engine not in ("hf", "vllm"):
        other = f"Set {ROLLOUT}.top_p=1 and {ROLLOUT}.top_k=-1, or {ROLLOUT}.name=hf."
        remedy = f"rollout.name={engine} cannot record which tokens were kept. {other}"
    elif missing:
        remedy = f"Set {' and '.join(missing)} to record which were kept."
    else:
        return
    key = f"{ROLLOUT}.{name}"
    what = f"{key}={getattr(rollout, name)} biases every ratio: samples come from the kept tokens, the trainer's"
    yield Problem(UNUSED, key, f"{what} log-probs from all. {remedy}")


def grading_problems(plain: Mapping[str, Any]) -> Iterator[Problem]:
    """Whether a program that hangs is stopped before the process that grades it; nothing in a tree without rewards."""
    key, above = "reward_model.sandbox.seconds", "reward_model.item_timeout"
    seconds, limit = select(plain, key, None), select(plain, above, None)
    if isinstance(seconds, int | float) and isinstance(limit, int | float) and seconds >= limit:
        rule = f"{key}={seconds:g} must be below {above}={limit:g}, or a program that hangs costs its row"
        yield wrong(key, f"{rule} instead of failing a test case. Lower the one or raise the other.")
    if select(plain, key := "reward_model.launch_reward_fn_async", False):
        needed = {"algorithm.filter_groups.enable": "groups are filtered by their scores before old log-probs",
                  "reward_model.enable": "the reward model runs on the ranks that compute the log-probs"}  # fmt: skip
        for other, why in needed.items():
            if select(plain, other, False):
                yield wrong(key, f"{key}=true does not work with {other}=true: {why}. Set {key}=false.")


def profiler_problems(settings: PPOConfig) -> Iterator[Problem]:
    """Whether global_profiler.steps records anything: a tool for this device, and a role with profiler.enable=true."""
    if not settings.global_profiler.steps:
        return
    tool = settings.global_profiler.tool
    if tool is None:
        yield wrong("global_profiler.tool", "global_profiler.steps is set without a tool. Set it to torch.")
    elif tool != "torch" and settings.trainer.device == "cpu":
        rule = f"global_profiler.tool={tool} records CUDA only, and trainer.device=cpu. Set global_profiler.tool=torch."
        yield wrong("global_profiler.tool", rule)
    if not any(select(settings, f"{role}.profiler.enable", False) for role in PROFILED):
        rule, part = "global_profiler.steps names steps, but no role is profiled.", "actor_rollout_ref.actor.profiler"
        yield wrong("global_profiler.steps", f"{rule} Set {part}.enable=true and {part}.all_ranks=true.")


def resume_problems(run: RunConfig) -> Iterator[Problem]:
    """Whether trainer.resume_mode=resume_path has a path."""
    key, path = "trainer.resume_from_path", run.resume_from_path
    if run.resume_mode == "resume_path" and not re.fullmatch(r"global_step_\d+", Path(path or "").name):
        yield wrong(key, f"{key}={path} must name a folder global_step_N, since trainer.resume_mode=resume_path.")


def paths(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted paths of all keys, sections too."""
    for key, value in node.items():
        full = f"{prefix}.{key}" if prefix else str(key)
        yield full
        if isinstance(value, Mapping):
            yield from paths(value, full)


def is_interpolation(value: Any) -> bool:
    """Whether a raw value only follows another key."""
    return isinstance(value, str) and value.startswith("${")
