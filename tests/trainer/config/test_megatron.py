"""ppo_megatron_trainer: its keys become those of FSDP2, or are refused by name; it trains as ppo_trainer does."""

import pytest

from tests.helpers.configs import SOUND, compose_ppo
from tests.helpers.engines import leave_group, make_actor, make_engine, rl_batch
from tests.helpers.rl_run import compose_run, metrics_rows
from verl.config.compose import omega_conf_to_dataclass, to_settings
from verl.config.ppo import PPOConfig
from verl.planning.config_check import find_problems
from verl.planning.config_effect import unused_settings
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.worker_groups import classes
from verl.trainer.run.ray_session import run_here
from verl.workers.config import McoreActorConfig, McoreEngineConfig, McoreOptimizerConfig, VeOmniEngineConfig

TREE = "ppo_megatron_trainer"
ACTOR = "actor_rollout_ref.actor"


def composed(*overrides):
    return compose_ppo(*SOUND, *overrides, config_name=TREE)


def test_keys_of_megatron_become_those_of_fsdp2():
    config = composed(
        f"{ACTOR}.megatron.param_offload=true", f"{ACTOR}.megatron.optimizer_offload=true",
        f"{ACTOR}.megatron.dtype=float32", f"{ACTOR}.megatron.seed=7", f"{ACTOR}.megatron.use_remove_padding=false",
        f"{ACTOR}.optim.lr=1e-4", f"{ACTOR}.optim.lr_decay_style=cosine", f"{ACTOR}.optim.min_lr=1e-5",
        f"{ACTOR}.optim.clip_grad=0.5", f"{ACTOR}.optim.optimizer=sgd", "critic.megatron.dtype=float32",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2", "critic.megatron.tensor_model_parallel_size=4",
    )  # fmt: skip
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor, McoreActorConfig) and actor.strategy == "megatron" and not actor.use_remove_padding
    engine, optim = actor.fsdp_config, actor.optim
    assert (engine.param_offload, engine.optimizer_offload, engine.dtype, engine.seed) == (True, True, "float32", 7)
    assert (optim.optimizer, optim.lr_scheduler_type, actor.grad_clip) == ("SGD", "cosine", 0.5)
    assert optim.lr_wsd_decay_style == "exponential" and optim.min_lr_ratio == pytest.approx(0.1)
    ref = config.actor_rollout_ref.ref
    assert ref.fsdp_config.param_offload and ref.fsdp_config.dtype == "float32" and ref.megatron.seed == 7
    split = [section.fsdp_config.tensor_parallel_size for section in (actor, ref, config.critic.model)]
    assert split == [2, 2, 4]
    assert engine.sequence_parallel and ref.fsdp_config.sequence_parallel  # Megatron's default
    assert config.critic.model.fsdp_config.dtype == "float32" and not config.critic.model.fsdp_config.param_offload
    assert unused_settings(config, PPOConfig) == []


def test_schedules_and_optimizers_have_other_names():
    styles = {style: McoreOptimizerConfig(lr_decay_style=style).lr_scheduler_type for style in ("constant", "WSD")}
    assert styles == {"constant": "constant", "WSD": "wsd"} and McoreOptimizerConfig().optimizer == "AdamW"
    assert McoreEngineConfig().use_distributed_optimizer and VeOmniEngineConfig().data_parallel_mode == "fsdp"


@pytest.mark.parametrize(("overrides", "seconds"), [
    ((), 600), (("actor_rollout_ref.nccl_timeout=60",), 60), (("critic.nccl_timeout=900",), 900),
    (("actor_rollout_ref.nccl_timeout=60", "critic.nccl_timeout=30"), 60),
])  # fmt: skip
def test_the_larger_timeout_of_the_roles_of_a_process_is_that_of_its_group(overrides, seconds):
    workers = {Role.ActorRollout: object, Role.Critic: object}
    parts = classes(to_settings(composed(*overrides), PPOConfig), workers, "cpu", steps=1)
    assert parts[Role.ActorRollout].kwargs["config"].nccl_timeout == seconds
    assert parts[Role.Critic].kwargs["nccl_timeout"] == seconds


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.megatron.expert_model_parallel_size=2", "FSDP2 shards every layer, with all its experts"),
        ("actor.megatron.pipeline_model_parallel_size=4", "Set it to 1"),
        ("rollout.pipeline_model_parallel_size=2", "the ranks of an engine split each layer"),
        ("ref.megatron.context_parallel_size=2", "each rank keeps full sequences"),
        ("actor.megatron.dist_checkpointing_path=/x", "weights come from the model's folder"),
        ("actor.megatron.override_ddp_config.overlap=true", "there is no DDP"),
        ("actor.load_weight=false", "weights come from the model's folder"),
        ("actor.optim.lr_decay_steps=10", "the decay covers all steps"),
        ("actor.optim.lr_decay_style=inverse-square-root", "Known: constant, linear, cosine, WSD"),
        ("actor.megatron.tensor_parallel=2", "is not a known key"),
        ("actor.megatron.override_transformer_config.moe_router_dtype=fp32", "is not a known key"),
        ("actor.megatron.override_transformer_config.attention_backend=unfused", "Known: flash, fused, auto. Set attn"),
        ("actor.megatron.override_transformer_config.recompute_method=block", "Known: uniform"),
        ("actor.megatron.override_transformer_config.recompute_num_layers=2", "Layers are recomputed one by one"),
        ("actor.megatron.override_transformer_config.recompute_modules=[mlp]", "Known: core_attn"),
    ],
)
def test_what_fsdp2_cannot_express_is_refused_by_name(override, message):
    override = f"actor_rollout_ref.{override}"
    key = override.partition("=")[0]
    added = "+" if "ddp" in key or key.endswith(("tensor_parallel", "moe_router_dtype")) else ""
    named = {p.key: p.message for p in find_problems(composed(f"{added}{override}"), known=composed())}
    messages = [text for at, text in named.items() if key.startswith(at)]
    assert any(message in text for text in messages), named


@pytest.mark.parametrize(("role", "model"), [(ACTOR, "actor_rollout_ref.model"), ("critic", "critic.model")])
def test_recomputation_is_that_of_the_model(role, model):
    asked, switch = f"{role}.megatron.override_transformer_config.recompute_", f"{model}.enable_gradient_checkpointing"
    full = (f"{asked}granularity=full", f"{asked}method=uniform", f"{asked}num_layers=1")
    for overrides in (full, (f"{asked}granularity=selective", f"{switch}=false"), (f"{switch}=false",)):
        assert find_problems(composed(*overrides), known=composed()) == []
    for value, given in (("full", "false"), ("selective", "true")):
        other = {"true": "false", "false": "true"}[given]
        (problem,) = find_problems(composed(f"{asked}granularity={value}", f"{switch}={given}"), known=composed())
        assert f"granularity={value} contradicts {switch}={given}. Set {switch}={other}." in problem.message


def test_gradients_take_no_memory_between_updates(tiny_llama):
    """So grad_offload holds whether it is set or not."""
    engine = make_engine(tiny_llama)
    make_actor(engine, mini=4).update_policy(rl_batch())
    assert [p.grad for p in engine.module.parameters() if p.grad is not None] == []
    leave_group()


def test_the_tree_has_no_problem_of_its_own():
    assert find_problems(composed(), known=composed()) == []


@pytest.mark.process
@pytest.mark.slow
def test_it_trains_as_ppo_trainer_does(tiny_llama, tmp_path, capfd):
    rows = []
    for name, tree, engine in (("fsdp", "ppo_trainer", "fsdp_config"), ("megatron", TREE, "megatron")):
        config = compose_run(
            tmp_path / name, tiny_llama, f"verl.trainer.config/{tree}", trainer__local="true",
            trainer__total_training_steps=2, reward_model__num_workers=0, trainer__save_freq=0,
            **{f"actor_rollout_ref__{role}__{engine}__dtype": "float32" for role in ("actor", "ref")},
        )  # fmt: skip
        assert run_here(TaskRunner(), config) == 0, capfd.readouterr().err
        rows.append(metrics_rows(tmp_path / name))
    assert len(rows[0]) == 2 and rows[0] == rows[1]
