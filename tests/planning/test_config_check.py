"""Misspelt keys, values out of range, names of parts, batch sizes: each is reported by name, with a fix."""

import functools
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from tests.helpers.configs import CONFIG_DIR, SOUND, compose_ppo
from verl.config.batch_sizes import batch_problems, plan_batches, steps_in_all
from verl.config.compose import forced_override
from verl.planning.config_check import find_problems
from verl.utils.config import validate_config
from verl.utils.problems import ConfigError

KNOWN = compose_ppo()
VLLM = "actor_rollout_ref.rollout.name=vllm"


def problems(*overrides):
    return find_problems(compose_ppo(*SOUND, *overrides), known=KNOWN)


def only(*overrides):
    reported = problems(*overrides)
    assert len(reported) == 1, [p.message for p in reported]
    return reported[0]


def test_a_sound_config_has_no_problem():
    assert problems() == []


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("+data.max_promt_length=3", "data.max_prompt_length"),
        ("+actor_rollout_ref.actor.lr=1", "actor_rollout_ref.actor.optim.lr"),
        ("+trainer.dryrun=true", "trainer.dry_run"),
        ("+trainer.total_step=1", "trainer.total_training_steps"),
        ("+algoritm.gamma=1", "algorithm"),
        ("+actor_rollout_ref.rollout.val_kwarg.n=2", "actor_rollout_ref.rollout.val_kwargs"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(override, nearest):
    reported = only(override)
    assert reported.kind == "wrong"
    assert f"did you mean {nearest}?" in reported.message


@pytest.mark.parametrize(
    "override",
    [
        "+actor_rollout_ref.model.override_config.attention_dropout=0.1",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4",
        "+actor_rollout_ref.rollout.custom.a.b=1",
        "+data.apply_chat_template_kwargs.enable_thinking=false",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
        "+custom_reward_function.reward_kwargs.alpha=0.1",
        "+ray_kwargs.ray_init.runtime_env.working_dir=x",
        "+actor_rollout_ref.model.loader.kwargs.backbone=own",
        "+actor_rollout_ref.model.policy.kwargs.share=true",
        "actor_rollout_ref.actor.optim.override_optimizer_config={eps:1e-6}",
        "+actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=[A]",
        "+trainer.wandb_proxy=http://x",
        "data.train_files=[a.parquet,b.parquet]",
        "trainer.logger=console",
    ],
)
def test_open_mappings_take_any_key(override):
    assert problems(override) == []


def test_a_served_reward_model_and_the_rollout_share_a_gpu():
    given = [VLLM, "reward_model.enable=true", "reward_model.rollout.name=vllm", "trainer.device=cuda"]
    key = "rollout.gpu_memory_utilization=0.5"
    assert f"reward_model.{key} and actor_rollout_ref.{key} are shares of the same GPU" in only(*given).message
    assert problems(*given, "reward_model.rollout.gpu_memory_utilization=0.3") == []
    assert problems(*given, "reward_model.enable_resource_pool=true", "reward_model.nnodes=1") == []
    assert problems(*given[:-1], "trainer.device=cpu") == []


def test_a_removed_key_is_reported():
    assert "trainer.report was removed" in only("~trainer.report").message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.truncation=lft", "did you mean 'left'"),
        ("actor_rollout_ref.actor.loss_agg_mode=token_mean", "did you mean 'token-mean'"),
        ("actor_rollout_ref.actor.clip_ratio=-0.1", "use 0 or more"),
        ("actor_rollout_ref.actor.clip_ratio_c=1", "above 1"),
        ("algorithm.gamma=1.5", "use 1 or less"),
        ("algorithm.kl_ctrl.type=adaptiv", "did you mean 'adaptive'"),
        ("actor_rollout_ref.actor.strategy=megatron", "Megatron is not supported"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "two numbers"),
        ("actor_rollout_ref.actor.optim.lr=fast", "is a str; expected float"),
        ("actor_rollout_ref.actor.calculate_entropy=1", "expected bool"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[models]", "did you mean 'model'"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanila", "did you mean 'vanilla'"),
        ("algorithm.rollout_correction.bypass_mode=true", "rollout.calculate_log_probs=true"),
        ("algorithm.adv_estimator=optimal_token_baseline", "Set actor_rollout_ref.actor.calculate_sum_pi_squared=true"),
        ("actor_rollout_ref.actor.use_rollout_log_probs=true", "rollout.calculate_log_probs=true"),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "greedy samples"),
        ("trainer.resume_mode=resume_path", "global_step_N"),
        ("reward_manager.source=importlib", "reward_manager.module.path"),
        ("actor_rollout_ref.model.external_lib=no_such_module_here", "its folder must be on PYTHONPATH"),
        ("actor_rollout_ref.model.external_lib=parts/mine.py", "name the module, external_lib=mine"),
        ("reward_model.sandbox.seconds=300", "must be below reward_model.item_timeout=300"),
        ("reward_model.item_timeout=10", "reward_model.sandbox.seconds=10 must be below reward_model.item_timeout=10"),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(override, said):
    reported = only(override)
    key, _, value = override.partition("=")
    assert key.rpartition(".")[2] in reported.message
    assert said in reported.message


def test_an_unknown_estimator_has_the_nearest():
    assert "'grop' is unknown; did you mean 'grpo'?" in only("algorithm.adv_estimator=grop").message


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.actor.fsdp_config.dtype=float16", "actor_rollout_ref.actor.optim.lr=nan",
    ],
)  # fmt: skip
def test_what_the_workers_would_refuse_is_wrong_in_the_plan(override):
    assert override.partition("=")[0] in only(override).message


def test_a_key_misspelt_in_a_yaml_of_the_users_own_is_unknown():
    """There the known tree, made from the same yaml, has it too."""
    config = compose_ppo(*SOUND, "+data.max_promt_length=3", "+actor_rollout_ref.rollout.val_kwargs.do_sampl=1")
    reported = [p.message for p in find_problems(config, known=config)]
    assert reported == [
        "data.max_promt_length is not a known key; did you mean data.max_prompt_length?",
        "actor_rollout_ref.rollout.val_kwargs.do_sampl is not a known key; did you mean "
        "actor_rollout_ref.rollout.val_kwargs.do_sample?",
    ]


def test_all_problems_come_at_once():
    reported = problems("data.truncation=lft", "+data.sed=1", "algorithm.gamma=2", "data.train_batch_size=60")
    assert {p.key for p in reported} >= {"data.truncation", "data.sed", "algorithm.gamma", "data.train_batch_size"}


# 8 ranks. 60 x 5 = 300 is no multiple of 8; since 5 and 8 share no divisor, prompts must be a multiple of 8: 56, 64.
# 60 x 2 = 120 is a multiple of 8. 62 x 2 = 124 is not; 8 / gcd(2, 8) = 4, so a multiple of 4: 60 or 64.
def test_samples_that_ranks_cannot_share():
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=8"
    reported = only("data.train_batch_size=60", "actor_rollout_ref.rollout.n=5", mini)
    assert "data.train_batch_size=60 x actor_rollout_ref.rollout.n=5 gives 300 samples" in reported.message
    assert "which 8 ranks cannot share evenly. Use a multiple of 8 (56 or 64)." in reported.message
    assert problems("data.train_batch_size=60", "actor_rollout_ref.rollout.n=2", mini) == []
    assert "multiple of 4 (60 or 64)" in only("data.train_batch_size=62", "actor_rollout_ref.rollout.n=2", mini).message


def test_shared_prompts_need_whole_groups_on_a_rank():
    reported = only(
        "data.train_batch_size=60", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.share_prompt_forward=true", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    )  # fmt: skip
    assert "60 prompts cannot be shared by 8 ranks evenly" in reported.message
    assert "multiple of 8 (56 or 64)" in reported.message


def test_a_mini_batch_larger_than_the_batch():
    assert "Use 128 or less" in only("data.train_batch_size=128").message


def test_a_mini_batch_that_ranks_cannot_share():
    reported = only("actor_rollout_ref.actor.ppo_mini_batch_size=12", "trainer.n_gpus_per_node=8")
    assert "gives 12 samples, which 8 ranks cannot share evenly. Use a multiple of 8 (8 or 16)." in reported.message


def test_without_a_filter_a_step_trains_on_all_that_is_drawn():
    minis = "actor_rollout_ref.actor.ppo_mini_batch_size"
    drawn = ("data.train_batch_size=32", "data.gen_batch_size=60", f"{minis}=8")
    reported = only(*drawn, "actor_rollout_ref.rollout.n=5")
    assert "data.gen_batch_size=60 x actor_rollout_ref.rollout.n=5 gives 300 samples" in reported.message
    assert problems("data.train_batch_size=32", "data.gen_batch_size=64", f"{minis}=64") == []
    reported = only("data.train_batch_size=32", "data.gen_batch_size=64", f"{minis}=128")
    assert "larger than data.gen_batch_size=64" in reported.message and "Use 64 or less" in reported.message
    plain = OmegaConf.to_container(compose_ppo(*SOUND, *drawn), resolve=True)
    assert (plan_batches(plain).prompts, plan_batches(plain).mini_batches) == (60, 8)


def test_only_where_groups_are_filtered_may_generations_be_smaller_than_the_batch():
    def dapo(*overrides):
        config = functools.partial(compose_ppo, config_dir=CONFIG_DIR.parents[2] / "recipe" / "dapo" / "config",
                                   config_name="dapo_trainer")  # fmt: skip
        sizes = ("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32")
        made = config(*SOUND, *sizes, *overrides)
        return [p.message for p in find_problems(made, known=config())], OmegaConf.to_container(made, resolve=True)

    filtered = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc")
    reported, plain = dapo("data.gen_batch_size=24", *filtered)
    assert reported == [] and plan_batches(plain).prompts == 64
    assert steps_in_all(100, plain) == 100 * 30 * 24 // 64  # 30 epochs of 100 draws, 64 prompts a step
    reported, plain = dapo("data.gen_batch_size=192", *filtered)
    assert reported == [] and plan_batches(plain).prompts == 64 and steps_in_all(100, plain) == 3000
    ((message,), _) = dapo("data.gen_batch_size=24")
    assert "data.gen_batch_size=24 is smaller than data.train_batch_size=64" in message
    assert "algorithm.filter_groups.enable=true" in message


REFERENCE = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (("algorithm.kl_penalty=full", "algorithm.use_kl_in_reward=true", REFERENCE), "algorithm.kl_penalty",
         "Set it to low_var_kl"),
        (("algorithm.kl_penalty=full+", "algorithm.use_kl_in_reward=true", REFERENCE), "algorithm.kl_penalty",
         "kl_penalty=full+ needs"),
        (("actor_rollout_ref.actor.kl_loss_type=full", "actor_rollout_ref.actor.use_kl_loss=true", REFERENCE),
         "actor_rollout_ref.actor.kl_loss_type", "Set it to low_var_kl"),
        (("algorithm.adv_estimator=gae", "critic.enable=false"), "critic.enable", "Leave critic.enable out"),
        (("algorithm.adv_estimator=grpo_passk",), "actor_rollout_ref.rollout.n", "rollout.n to 2 or more"),
        (("actor_rollout_ref.rollout.do_sample=false", "actor_rollout_ref.rollout.n=4"),
         "actor_rollout_ref.rollout.do_sample", "rollout.n=4 samples"),
    ],
)  # fmt: skip
def test_what_an_algorithm_cannot_do_without_is_asked_for(overrides, key, said):
    reported = only(*overrides)
    assert reported.key == key and said in reported.message


def test_what_is_not_used_is_not_asked_for():
    unused = ("algorithm.kl_penalty=full", "actor_rollout_ref.actor.kl_loss_type=full", "critic.enable=false")
    assert problems(*unused, "actor_rollout_ref.rollout.do_sample=false") == []
    assert problems("algorithm.adv_estimator=grpo_passk", "actor_rollout_ref.rollout.n=2") == []
    assert problems("algorithm.adv_estimator=gae", "critic.enable=true") == []


@pytest.mark.parametrize("key", ["actor.rollout_n", "rollout.multi_turn.num_repeat_rollouts"])
def test_a_second_name_of_the_number_of_samples_agrees_with_it(key):
    key, name = f"actor_rollout_ref.{key}", "actor_rollout_ref.rollout.n"
    reported = only(f"{key}=8", f"{name}=4")
    assert reported.key == key and f"{key}=8, but {name}=4" in reported.message
    assert problems(f"{key}=4", f"{name}=4") == []


@pytest.mark.parametrize(("size", "said"), [(1, None), (4, None), (2, "must be 1, or the ranks of an engine")])
def test_experts_are_split_over_the_ranks_of_an_engine(size, said):
    values = (VLLM, "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
              f"actor_rollout_ref.rollout.expert_parallel_size={size}")  # fmt: skip
    assert problems(*values) == [] if said is None else said in only(*values).message


def test_exactly_one_micro_batch_size():
    both = only("actor_rollout_ref.actor.ppo_micro_batch_size=16")
    assert "are both set" in both.message
    neither = only("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null")
    assert neither.key == "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    dynamic = ("actor_rollout_ref.actor.use_dynamic_bsz=true",)
    assert problems("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null", *dynamic) == []


def test_the_old_micro_batch_size_is_shared_by_the_ranks():
    one = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null"
    assert problems(one, "actor_rollout_ref.actor.ppo_micro_batch_size=16") == []
    reported = only(one, "actor_rollout_ref.actor.ppo_micro_batch_size=20")
    assert "multiple of 8 (16 or 24), or set actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2" in reported.message


def test_the_reference_needs_its_micro_batch_size_when_there_is_one():
    key = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    assert only("actor_rollout_ref.actor.use_kl_loss=true").key == key
    assert problems("actor_rollout_ref.actor.use_kl_loss=true", f"{key}=4") == []
    assert problems("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.model.lora_rank=8") == []


def test_the_critic_reports_only_what_the_actor_did_not():
    def arithmetic(*overrides):
        plain = OmegaConf.to_container(compose_ppo(*SOUND, *overrides), resolve=True)
        return [p.key for p in batch_problems(plain, use_reference_policy=False, use_critic=True)]

    assert arithmetic() == []
    assert arithmetic("critic.ppo_mini_batch_size=12") == ["critic.ppo_mini_batch_size"]
    actor = "actor_rollout_ref.actor.ppo_mini_batch_size"
    assert arithmetic(f"{actor}=12") == [actor]


@pytest.mark.parametrize("key", ["rollout.tensor_model_parallel_size", "actor.fsdp_config.fsdp_size",
                                 "actor.fsdp_config.tensor_parallel_size"])
def test_group_sizes_divide_the_ranks(key):
    assert "Use one of 1, 2, 4, 8." in only(f"actor_rollout_ref.{key}=3", VLLM).message


def test_ranks_that_split_layers_share_sequences_and_copies_evenly():
    split = "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size"
    sequences = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    product = "x ulysses_sequence_parallel_size=4 does not divide the 8 ranks"
    assert problems(f"{split}=2", f"{sequences}=4", VLLM) == []
    assert product in only(f"{split}=4", f"{sequences}=4", VLLM).message
    assert only(f"{split}=4", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2", VLLM).key == split
    assert "rollout.name=hf generates with the actor's own module" in only(f"{split}=2").message
    reward = ("reward_model.enable=true", "reward_model.micro_batch_size_per_gpu=2")
    split = "reward_model.model.fsdp_config.tensor_parallel_size"
    sequences = "reward_model.ulysses_sequence_parallel_size"
    assert problems(*reward, f"{split}=2", f"{sequences}=4") == []
    assert product in only(*reward, f"{split}=4", f"{sequences}=4").message


def test_validate_config_raises_one_error_with_all():
    config = compose_ppo(*SOUND, "data.truncation=lft", "algorithm.gamma=2")
    with pytest.raises(ConfigError, match="2 problems") as error:
        validate_config(config, use_reference_policy=False, use_critic=False)
    assert "data.truncation" in str(error.value) and "algorithm.gamma" in str(error.value)
    assert isinstance(error.value, ValueError)
    validate_config(compose_ppo(*SOUND), use_reference_policy=False, use_critic=False)


def test_a_critic_and_a_reward_model_bring_their_own_rules():
    assert problems("algorithm.adv_estimator=gae") == []
    assert only("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=2000").key == "critic.ppo_mini_batch_size"
    assert only("reward_model.enable=true").key == "reward_model.micro_batch_size_per_gpu"
    shared = "actor_rollout_ref.actor.share_prompt_forward=true"
    assert only("algorithm.use_pf_ppo=true", shared).key == "algorithm.use_pf_ppo"


@pytest.mark.parametrize(
    ("argument", "forced"),
    [
        ("a.b=1", "++a.b=1"), ("+a.b.c={x:1}", "++a.b.c={x:1}"), ("++a.b=x=y", "++a.b=x=y"), ("~a.b", "~a.b"),
        ("optim=fsdp", "optim=fsdp"), ("optim@a.optim=x", "optim@a.optim=x"), ("--config-name", "--config-name"),
        ("--config-path=/x/a.b", "--config-path=/x/a.b"), ("a/b=c", "a/b=c"),
    ],
)  # fmt: skip
def test_overrides_reach_the_check(argument, forced):
    assert forced_override(argument) == forced


RECIPE = """
defaults:
  - ppo_trainer
  - _self_
hydra:
  searchpath:
    - pkg://verl.trainer.config
spd:
  backbone: target
actor_rollout_ref:
  rollout:
    custom: ${spd}
    n: 4
"""

APP = """
import sys
from verl.config.compose import hydra_main
@hydra_main(config_path=sys.argv.pop(1), config_name="toy")
def main(config):
    from verl.planning.config_check import find_problems
    print(config.actor_rollout_ref.rollout.custom.backbone, config.actor_rollout_ref.rollout.n)
    print([p.message for p in find_problems(config)])
main()
"""


@pytest.mark.process
def test_a_recipe_extends_the_tree_and_its_own_group_is_known(tmp_path):
    (tmp_path / "toy.yaml").write_text(RECIPE)
    (tmp_path / "app.py").write_text(APP)
    run = subprocess.run(
        [sys.executable, str(tmp_path / "app.py"), str(tmp_path), *SOUND, "spd.backbone=own", "+spd.bakbone=x",
         "spd.backbon=y"],
        capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(CONFIG_DIR.parents[2]), "PATH": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    lines = run.stdout.splitlines()
    assert lines[0] == "own 4"
    unknown = [f"spd.{name} is not a known key; did you mean spd.backbone?" for name in ("bakbone", "backbon")]
    assert lines[1] == str(unknown)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["app.py", "toy.yaml"]  # Hydra left no folder
