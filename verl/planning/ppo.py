"""Plan and checks of an RL run: plug-ins, data, batch sizes, memory."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console

from verl.algos.names import COMPARES_SAMPLES, MEANS_OVER_SEQUENCES
from verl.config.asynchronous import AsyncPPOConfig, versions_allowed
from verl.config.batch_sizes import plan_batches, steps_in_all
from verl.config.compose import select
from verl.config.ppo import PPOConfig
from verl.config.roles import reads_reference
from verl.planning import checks
from verl.planning.config_check import ARITHMETIC, PROFILED, rl_problems
from verl.planning.dry_run import Entry, count_text, print_rows
from verl.planning.environments import check_environment, show_environment
from verl.planning.rollouts import check_agent_loops, check_cpu_heads, check_drafter, check_sglang
from verl.utils.problems import CHECKS, UNUSED, WRONG, ConfigError, Problem, absent, wrong

TENSOR_PARALLEL = "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size"
PROMPTS_MEASURED = 1000  # whose tokens a dry run counts


def rl_entry(create_dataset: Callable[..., Any]) -> Entry:
    """The checks of RL runs and their dry run.

    `create_dataset` has the arguments of the trainer's create_rl_dataset. Recipes add checks through
    `verl.utils.problems.register_check`.
    """

    def start_problems(config: PPOConfig) -> list[Problem]:
        """For a start on this machine. On a cluster (RAY_ADDRESS) nothing is checked: its nodes have the files."""
        if os.environ.get("RAY_ADDRESS") or config.ray_kwargs.ray_init.get("address"):
            return []
        findings = checks.Findings(to_start=True)
        check_input(config, findings, create_dataset, checks.ROWS_AT_START)
        return findings.problems

    def plan(console: Console, config: PPOConfig, problems: list[Problem]) -> list[Problem]:
        findings = checks.Findings()
        check_input(config, findings, create_dataset, checks.ROWS_CHECKED)
        wrong_sizes = any(p.kind == WRONG and p.key.rpartition(".")[2] in ARITHMETIC for p in problems)
        findings.problems += show_environment(console, config, findings)
        _print_plan(console, config, findings, wrong_sizes)
        return findings.problems

    return Entry(PPOConfig, rl_problems, plan, start_problems, plans_wrong_configs=True)


def check_input(config: PPOConfig, findings: checks.Findings, create_dataset: Callable[..., Any], rows: int) -> None:
    """Add the problems of model, plug-ins, data (its first `rows` rows), machine, rollout and registered checks."""
    problems, model, rollout = findings.problems, "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    checks.check_models(config.actor_rollout_ref.model, findings, trust_tokenizer=config.data.trust_remote_code)
    problems += checks.check_length(config.actor_rollout_ref.rollout, findings, rollout)
    problems += checks.check_tensor_parallel(config, findings, TENSOR_PARALLEL)
    of_reference = ["actor_rollout_ref.ref.fsdp_config.tensor_parallel_size"] if reads_reference(config) else []
    problems += checks.check_liger(config, model, TENSOR_PARALLEL, *of_reference)
    problems += check_plugins(config)
    check_data(config, findings, create_dataset, rows)
    if findings.to_start:
        problems += [*checks.check_gpus(config.trainer), *checks.check_outputs(config.trainer)]
    else:
        problems += checks.check_machine(config.trainer)
    problems += [*check_files_of_the_run(config), *check_group_size(config), *check_aggregation(config)]
    if isinstance(config, AsyncPPOConfig) and not findings.to_start:
        problems += check_generating_ranks(config)
    for check in (check_environment, check_cpu_heads, check_drafter, check_sglang, check_agent_loops, *CHECKS):
        problems += check(config, findings)


def check_files_of_the_run(config: PPOConfig) -> Iterator[Problem]:
    """Files and folders, beside those of every training, that the settings ask for and that cannot be written."""
    for name in ("rollout_data_dir", "validation_data_dir"):
        yield from checks.check_written(f"trainer.{name}", config.trainer[name])
    timeline = config.ray_kwargs.timeline_json_file
    yield from checks.check_written("ray_kwargs.timeline_json_file", timeline, is_folder=False)
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.skip_rollout:
        yield from checks.check_written(f"{key}.skip_dump_dir", rollout.skip_dump_dir)
    if rollout.prometheus.enable:
        yield from checks.check_written(f"{key}.prometheus.file", rollout.prometheus.file, is_folder=False)
    if config.global_profiler.steps:
        yield from checks.check_written("global_profiler.save_path", config.global_profiler.save_path)
        for role in PROFILED:
            own = select(config, f"{role}.profiler")
            if own is not None and own.enable and own.save_path != config.global_profiler.save_path:
                yield from checks.check_written(f"{role}.profiler.save_path", own.save_path)


def check_generating_ranks(config: AsyncPPOConfig) -> Iterator[Problem]:
    """Ranks that train and ranks that generate for which this machine, if it is the only one, has no room."""
    import torch

    trainer, pool = config.trainer, config.rollout
    if os.environ.get("RAY_ADDRESS") or config.ray_kwargs.ray_init.get("address"):
        return
    train, generate = (part.nnodes * part.n_gpus_per_node for part in (trainer, pool))
    if trainer.device == "cuda":
        here, kind = torch.cuda.device_count(), "GPUs"
    else:
        here, kind = config.ray_kwargs.ray_init.get("num_cpus") or os.cpu_count() or 1, "CPUs"
    if here < train + generate:
        yield absent("rollout.n_gpus_per_node", (
            f"the {train} ranks that train (trainer.nnodes x trainer.n_gpus_per_node) and the {generate} that generate "
            f"(rollout.nnodes x rollout.n_gpus_per_node) need {train + generate} {kind} with trainer.device="
            f"{trainer.device}: this machine has {here}. Lower one of them, or name a cluster (RAY_ADDRESS)."
        ))  # fmt: skip


def check_plugins(config: PPOConfig) -> Iterator[Problem]:
    """Names that the registries of the workers must know, and the user's reward function."""
    from verl.models.loading import get_model_loader
    from verl.reward import loading
    from verl.rollout.base import get_rollout_class
    from verl.training.actor.base import enabled_losses
    from verl.training.policy import get_policy

    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    look_ups: dict[str, Callable[[], Any]] = {
        "actor_rollout_ref.model.loader.name": lambda: get_model_loader(model.loader.name),
        "actor_rollout_ref.model.policy.name": lambda: get_policy(model.policy.name, **model.policy.kwargs),
        "actor_rollout_ref.actor.auxiliary_losses": lambda: enabled_losses(config.actor_rollout_ref.actor),
        "actor_rollout_ref.rollout.name": lambda: get_rollout_class(rollout.name, rollout.mode),
        "custom_reward_function.path": lambda: loading.get_custom_reward_fn(config),
        "reward_manager.name": lambda: loading.get_manager_class(config),
        # These need the function and the manager that are looked up above.
        "reward_model.reward_kwargs": lambda: loading.check_manager_arguments(config),
        "custom_reward_function.name": lambda: loading.check_reward_arguments(config),
    }
    known: set[str] = set()
    for key, look_up in look_ups.items():
        try:
            look_up()
        except (ImportError, ValueError, TypeError, AttributeError, OSError, RuntimeError) as e:
            if str(e) not in known and isinstance(e, ImportError):
                yield absent(key, f"{key}: a package is missing here: {e}")
            elif str(e) not in known:
                yield wrong(key, f"{key}: {e}" if key not in str(e) else str(e))
            known.add(str(e))


def check_group_size(config: PPOConfig) -> Iterator[Problem]:
    """A warning of one sample per prompt for an estimator that compares those of a prompt."""
    estimator, key = config.algorithm.adv_estimator, "actor_rollout_ref.rollout.n"
    if config.actor_rollout_ref.rollout.n == 1 and estimator in COMPARES_SAMPLES:
        what = f"{key}=1 with algorithm.adv_estimator={estimator}, which compares the samples of a prompt: a single one"
        yield Problem(UNUSED, key, f"{what} has no baseline. Set {key}=2 or more, or another estimator.")


def check_aggregation(config: PPOConfig) -> Iterator[Problem]:
    """A warning of a loss_agg_mode that the policy loss does not read."""
    actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor.loss_agg_mode"
    loss, mode = actor.policy_loss.loss_mode, actor.loss_agg_mode
    if loss in MEANS_OVER_SEQUENCES and mode not in (type(actor)().loss_agg_mode, "seq-mean-token-mean"):
        what = f"{key}={mode} has no effect with policy_loss.loss_mode={loss}, a mean over sequences of token means"
        yield Problem(UNUSED, key, f"{what}. Leave the key out.")


def check_data(config: PPOConfig, findings: checks.Findings, create_dataset: Callable[..., Any], rows: int) -> None:
    """Files, columns and the first `rows` rows of both data sets, read by the data set class of the run."""
    from verl.data.rl_dataset import RLHFDataset, get_dataset_class, no_chat_template
    from verl.reward.rules import has_rule, truth_problem, unknown_source

    data = config.data

    def find_class() -> None:
        templated = issubclass(get_dataset_class(data), RLHFDataset)
        if templated and findings.tokenizer is not None and not findings.tokenizer.chat_template:
            key = "actor_rollout_ref.model.custom_chat_template"
            raise ConfigError([wrong(key, no_chat_template(findings.tokenizer))])

    def make(files: list[str], split: str) -> Any:
        most = data[f"{split}_max_samples"]
        return create_dataset(files, data, findings.tokenizer, findings.processor, split == "train", most)

    by_rule = (
        config.reward_manager.source == "register"
        and config.reward_manager.name in ("naive", "batch", "dapo", "prime")
        and not config.reward_model.enable
        and config.custom_reward_function.path is None
        and data.environment.name is None
        and not config.actor_rollout_ref.rollout.agent.reports_rewards
    )

    def lacks(row: Mapping[str, Any]) -> str | None:
        contents = {data.reward_fn_key: "the name of its reward",
                    "reward_model": "{'ground_truth': ...}, which the reward function gets"}  # fmt: skip
        missing = [f"{name} ({content})" for name, content in contents.items() if row.get(name) is None]
        source = row.get(data.reward_fn_key)
        if missing:
            hint = ", or set data.reward_fn_key" if source is None else ""
            return f"no column {' and no column '.join(missing)}. Add it when the data is prepared{hint}."
        return unknown_source(source) if by_rule and not has_rule(source) else None

    if not data.val_files and data.environment.name is None:
        shown = "null" if data.val_files is None else "[]"
        findings.problems.append(wrong("data.val_files", f"data.val_files={shown}: name the files to validate on."))
    checks.check_splits(data, findings, rows, find_class, make, lacks)
    for key, dataset in findings.datasets.items() if by_rule else ():
        for i, row in enumerate(dataset.rows if isinstance(dataset, RLHFDataset) else ()):
            reward = row.get("reward_model")
            if reward and (problem := truth_problem(row.get(data.reward_fn_key), reward.get("ground_truth"))):
                findings.problems.append(wrong(key, f"{key}: {dataset.error(i, problem)}."))
                break
    if not config.trainer.val_only:
        sizes = {"data.gen_batch_size": data.gen_batch_size} if data.gen_batch_size != data.train_batch_size else {}
        sizes["data.train_batch_size"] = data.train_batch_size
        sizes["actor_rollout_ref.actor.ppo_mini_batch_size"] = config.actor_rollout_ref.actor.ppo_mini_batch_size
        checks.check_fills_a_batch(findings, "prompts", sizes)


def _print_plan(console: Console, config: PPOConfig, findings: checks.Findings, wrong_sizes: bool) -> None:
    console.rule("Plan")
    prompts, drawn, wanted = findings.train_prompts, config.data.gen_batch_size, config.data.train_batch_size
    own, manager = config.custom_reward_function, config.reward_manager
    per_epoch = steps = None  # unknown
    if prompts is not None and isinstance(drawn, int) and isinstance(wanted, int) and 1 <= drawn <= prompts:
        per_epoch = prompts // max(drawn, wanted)
        steps = config.trainer.total_training_steps or steps_in_all(prompts // drawn, config)
    plan = None if wrong_sizes else plan_batches(config)
    rows = {
        "prompts for training": count_text(prompts),
        "prompts for validation": count_text(findings.val_prompts),
        **_longest_prompt(findings),
        **({"reward function": f"{own.name} of {os.path.basename(own.path)}"} if own.path else {}),
        **({"reward manager": manager.module.name or manager.name} if manager.source == "importlib" else {}),
        **({"agent loops": ", ".join(sorted(findings.agent_loops))} if findings.agent_loops else {}),
        **(plan.rows() if plan else {}),
        "steps per epoch": count_text(per_epoch),
        "steps in all": count_text(steps),
    }
    if isinstance(config, AsyncPPOConfig):
        oldest = versions_allowed(config.async_training)
        rows |= {
            "ranks that train": str(config.trainer.nnodes * config.trainer.n_gpus_per_node),
            "ranks that generate": str(config.rollout.nnodes * config.rollout.n_gpus_per_node),
            "oldest token of a trained sample": f"{oldest} update{'s' * (oldest != 1)} behind the trained weights",
        }
    print_rows(console, rows | {f"tool {name}": answer for name, answer in findings.tools.items()})
    if plan is not None and findings.hf_config is not None and not any(p.kind == WRONG for p in findings.problems):
        from verl.planning.ppo_memory import print_memory  # imports what a run's driver does not need

        findings.problems += print_memory(console, config, findings.hf_config, steps)
    else:
        console.print("No memory estimate: it needs the model's config, and settings and data without problems.")


def _longest_prompt(findings: checks.Findings) -> dict[str, str]:
    """A row about the first prompts as the chat template renders them; none for a data set of another kind."""
    from verl.data.chat_template import ChatTemplateError, render_chat
    from verl.data.rl_dataset import DatasetError, RLHFDataset

    prompts = findings.datasets.get("data.train_files")
    if not (isinstance(prompts, RLHFDataset) and len(prompts)):
        return {}
    first = range(min(len(prompts), PROMPTS_MEASURED))
    bare = {"add_generation_prompt": True, **prompts.template_kwargs, "tools": None}
    try:
        longest = max(len(prompts.prompt_ids(i)) for i in first)
        rendered = prompts.prompt_text(0) != render_chat(prompts.tokenizer, prompts.messages(0), **bare)
    except (DatasetError, ChatTemplateError):  # one of the problems
        return {}
    tools = ", with the schemas of the tools" if rendered else ""
    return {f"longest of the first {len(first)} prompts": f"{longest} tokens{tools}"}
