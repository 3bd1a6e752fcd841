"""Misspelt keys, values out of range, names of parts, batch sizes: each is reported by name, with a fix."""

import functools
import re
from http.client import BadStatusLine
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from tests.helpers.configs import CONFIG_DIR, SOUND, compose_ppo
from verl.config.batch_sizes import plan_batches, steps_in_all
from verl.config.compose import to_settings
from verl.config.ppo import PPOConfig
from verl.planning.checks import check_url
from verl.planning.config_check import find_problems
from verl.planning.ppo import check_plugins
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


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("+data.max_promt_length=3", "data.max_prompt_length"),
        ("+actor_rollout_ref.actor.lr=1", "actor_rollout_ref.actor.optim.lr"),
        ("+trainer.total_step=1", "trainer.total_training_steps"),
        ("+algoritm.gamma=1", "algorithm"),
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
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
        "+actor_rollout_ref.model.loader.kwargs.backbone=own",
        "actor_rollout_ref.actor.optim.override_optimizer_config={eps:1e-6}",
        "+actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=[A]",
        "+trainer.wandb_proxy=http://x",
        "data.train_files=[a.parquet,b.parquet]",
    ],
)
def test_open_mappings_take_any_key(override):
    assert problems(override) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.truncation=lft", "did you mean 'left'"),
        ("actor_rollout_ref.actor.clip_ratio=-0.1", "use 0 or more"),
        ("actor_rollout_ref.actor.clip_ratio_c=1", "above 1"),
        ("algorithm.gamma=1.5", "use 1 or less"),
        ("actor_rollout_ref.actor.strategy=megatron", "Megatron is not supported"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "two numbers"),
        ("actor_rollout_ref.actor.optim.lr=fast", "is a str; expected float"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[models]", "did you mean 'model'"),
        ("algorithm.rollout_correction.bypass_mode=true", "rollout.calculate_log_probs=true"),
        ("algorithm.adv_estimator=optimal_token_baseline", "Set actor_rollout_ref.actor.calculate_sum_pi_squared=true"),
        ("actor_rollout_ref.actor.use_rollout_log_probs=true", "rollout.calculate_log_probs=true"),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "greedy samples"),
        ("trainer.resume_mode=resume_path", "global_step_N"),
        ("reward_manager.source=importlib", "reward_manager.module.path"),
        ("actor_rollout_ref.model.external_lib=no_such_module_here", "its folder must be on PYTHONPATH"),
        ("actor_rollout_ref.model.external_lib=parts/mine.py", "name the module, external_lib=mine"),
        ("algorithm.adv_estimator=grop", "'grop' is unknown; did you mean 'grpo'?"),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is"),
        ("actor_rollout_ref.actor.fsdp_config.dtype=float16", "actor_rollout_ref.actor.fsdp_config.dtype"),
        ("actor_rollout_ref.actor.optim.lr=nan", "actor_rollout_ref.actor.optim.lr"),
        ("~trainer.report", "trainer.report was removed"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=0", "fsdp_size=0 is not a group size; use -1 for all ranks"),
        ("actor_rollout_ref.rollout.speculative.method=draft_model", "rollout.speculative.draft_path=None"),
        ("+reward_model.overlong_buffer.enabel=true", "did you mean reward_model.overlong_buffer.enable?"),
        ("reward_model.item_timeout=10", "reward_model.sandbox.seconds=10 must be below reward_model.item_timeout=10"),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(override, said):
    reported = only(override)
    assert override.partition("=")[0].lstrip("+~") in reported.message
    assert said in reported.message
    assert_advice_mends([override], reported)


def assert_advice_mends(given, reported):
    """Each alternative of `Set KEY=VALUE and KEY=VALUE, or KEY=VALUE` ends the problem; returns their number."""
    advice = "".join(re.split(r"\b[Ss]et (?=it to [\w.+]*\w\b|[\w.]+=)", reported.message)[1:])
    advice = re.sub(r"^it to (?!the )", f"{reported.key}=", advice)
    alternatives = [re.findall(r"([a-z]\w*\.[\w.]+)=([\w.+-]*\w)", part) for part in advice.split(", or ")]
    for settings in filter(None, alternatives):
        changed = dict(word.split("=", 1) for word in given if "=" in word)
        changed |= dict(settings)
        after = problems(*(f"{key}={value}" for key, value in changed.items()))
        assert reported.message not in [p.message for p in after], settings
    return len([part for part in alternatives if part])


def test_a_key_misspelt_in_a_yaml_of_the_users_own_is_unknown():
    """There the known tree, made from the same yaml, has it too."""
    config = compose_ppo(*SOUND, "+data.max_promt_length=3", "+actor_rollout_ref.rollout.val_kwargs.do_sampl=1")
    assert [p.message for p in find_problems(config, known=config)] == [
        "data.max_promt_length is not a known key; did you mean data.max_prompt_length?",
        "actor_rollout_ref.rollout.val_kwargs.do_sampl is not a known key; did you mean "
        "actor_rollout_ref.rollout.val_kwargs.do_sample?",
    ]


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


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
MINI, MICRO = f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
SPLIT, SEQUENCES = f"{ACTOR}.fsdp_config.tensor_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size"
REWARD_SPLIT = "reward_model.model.fsdp_config.tensor_parallel_size"
REWARD_SEQUENCES = "reward_model.ulysses_sequence_parallel_size"
REWARD = "reward_model.enable=true reward_model.micro_batch_size_per_gpu=2"
SERVED = f"{VLLM} reward_model.enable=true reward_model.rollout.name=vllm trainer.device"
PRODUCT = "x ulysses_sequence_parallel_size=4 does not divide the 8 ranks"
GPU_SHARE = "rollout.gpu_memory_utilization"


# 8 ranks. 60 x 5 = 300 is no multiple of 8; since 5 and 8 share no divisor, prompts must be a multiple of 8: 56, 64.
@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (f"algorithm.kl_penalty=full algorithm.use_kl_in_reward=true {REFERENCE}=4", "algorithm.kl_penalty",
         "Set it to low_var_kl"),
        (f"{ACTOR}.kl_loss_type=full {ACTOR}.use_kl_loss=true {REFERENCE}=4", f"{ACTOR}.kl_loss_type",
         "Set it to low_var_kl"),
        (f"{ACTOR}.use_kl_loss=true", REFERENCE, REFERENCE),
        ("algorithm.adv_estimator=gae critic.enable=false", "critic.enable", "Leave critic.enable out"),
        ("algorithm.adv_estimator=gae critic.ppo_mini_batch_size=2000", "critic.ppo_mini_batch_size", "2000"),
        ("algorithm.adv_estimator=grpo_passk", f"{ROLLOUT}.n", "rollout.n to 2 or more"),
        (f"algorithm.use_pf_ppo=true {ACTOR}.share_prompt_forward=true", "algorithm.use_pf_ppo", "use_pf_ppo"),
        (f"{ROLLOUT}.do_sample=false {ROLLOUT}.n=4", f"{ROLLOUT}.do_sample", "rollout.n=4 samples"),
        (f"{ACTOR}.rollout_n=8 {ROLLOUT}.n=4", f"{ACTOR}.rollout_n", f"rollout_n=8, but {ROLLOUT}.n=4"),
        (f"{ROLLOUT}.multi_turn.num_repeat_rollouts=8 {ROLLOUT}.n=4", f"{ROLLOUT}.multi_turn.num_repeat_rollouts",
         f"num_repeat_rollouts=8, but {ROLLOUT}.n=4"),
        (f"data.train_batch_size=60 {ROLLOUT}.n=5 {MINI}=8", None,
         f"data.train_batch_size=60 x {ROLLOUT}.n=5 gives 300 samples, which 8 ranks cannot share evenly. "
         "Use a multiple of 8 (56 or 64)."),
        (f"data.train_batch_size=60 {ROLLOUT}.n=8 {MINI}=8 {MICRO}=8 {ACTOR}.share_prompt_forward=true", None,
         "60 prompts cannot be shared by 8 ranks evenly. Use a multiple of 8 (56 or 64)"),
        ("data.train_batch_size=128", None, "Use 128 or less"),
        (f"{MINI}=12 trainer.n_gpus_per_node=8", None,
         "gives 12 samples, which 8 ranks cannot share evenly. Use a multiple of 8 (8 or 16)."),
        (f"{ACTOR}.ppo_micro_batch_size=16", None, "are both set"),
        (f"{MICRO}=null", MICRO, MICRO),
        (f"{MICRO}=null {ACTOR}.ppo_micro_batch_size=20", None, f"multiple of 8 (16 or 24), or set {MICRO}=2"),
        ("reward_model.enable=true", "reward_model.micro_batch_size_per_gpu", "reward_model"),
        (f"{REWARD} reward_model.enable_resource_pool=true", "reward_model.nnodes", "Set both to 1 or more"),
        (f"{SERVED}=cuda", None,
         f"reward_model.{GPU_SHARE}=0.5 and actor_rollout_ref.{GPU_SHARE}=0.5 are shares of the same GPU"),
        *((f"{key}=3 {VLLM}", None, "Use one of 1, 2, 4, 8.")
          for key in (f"{ROLLOUT}.tensor_model_parallel_size", f"{ACTOR}.fsdp_config.fsdp_size", SPLIT)),
        (f"{VLLM} {ROLLOUT}.tensor_model_parallel_size=4 {ROLLOUT}.expert_parallel_size=2", None,
         "must be 1, or the ranks of an engine"),
        (f"{SPLIT}=4 {SEQUENCES}=4 {VLLM}", None, PRODUCT),
        (f"{REWARD} {REWARD_SPLIT}=4 {REWARD_SEQUENCES}=4", None, PRODUCT),
        (f"{SPLIT}=4 {ACTOR}.fsdp_config.fsdp_size=2 {VLLM}", SPLIT, SPLIT),
        (f"{SPLIT}=2", None, "rollout.name=hf generates with the actor's own module"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_each_other_are_named(settings, key, said):
    reported = only(*settings.split())
    assert key in (None, reported.key) and said in reported.message
    assert_advice_mends(settings.split(), reported)


@pytest.mark.parametrize(
    "settings",
    [
        f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.val_kwargs.do_sample=true",
        "trainer.local=true trainer.n_gpus_per_node=2",
        "trainer.device=cpu global_profiler.steps=[1] global_profiler.tool=nsys "
        f"{ACTOR}.profiler.enable=true", f"{REWARD} reward_model.launch_reward_fn_async=true",
        f"{VLLM} {ROLLOUT}.top_p=0.9", f"{VLLM} {ROLLOUT}.top_k=20 {ROLLOUT}.logprobs_mode=raw_logprobs",
        f"{VLLM} {ROLLOUT}.top_p=0.9 {ROLLOUT}.record_sampling_mask=false {ROLLOUT}.logprobs_mode=raw_logprobs",
        f"{VLLM} {ROLLOUT}.repetition_penalty=1.1", f"{ROLLOUT}.name=sglang {ROLLOUT}.top_k=20",
    ],
)  # fmt: skip
def test_the_advice_of_a_message_mends_what_it_names(settings):
    assert assert_advice_mends(settings.split(), only(*settings.split())) > 0


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        (f"{ROLLOUT}.expert_parallel_size=4 {ROLLOUT}.tensor_model_parallel_size=2 {VLLM}",
         f"{ROLLOUT}.expert_parallel_size=2"),
        (f"{ROLLOUT}.prompt_queue=true {VLLM} {ROLLOUT}.mode=async", f"{ROLLOUT}.mode=sync"),
        (f"{ROLLOUT}.logprobs_mode=raw_logprobs {ROLLOUT}.name=sglang", f"-{ROLLOUT}.logprobs_mode"),
        (f"{ROLLOUT}.lora_as_adapter=true {ROLLOUT}.name=sglang", f"{ROLLOUT}.lora_as_adapter=false"),
        (f"{ROLLOUT}.speculative.method=ngram {ROLLOUT}.name=sglang",
         f"-{ROLLOUT}.speculative.method +{ROLLOUT}.engine_kwargs.sglang.speculative_algorithm=NGRAM"),
        (f"{ROLLOUT}.speculative.refresh_every=2 {VLLM}", f"{ROLLOUT}.speculative.refresh_every=0"),
        (f"{ROLLOUT}.speculative.method=draft_model {VLLM}", f"{ROLLOUT}.speculative.draft_path=a/draft"),
        (f"{ACTOR}.fsdp_config.fsdp_size=0", f"{ACTOR}.fsdp_config.fsdp_size=-1"),
        (f"{ACTOR}.optim.betas=[0.9]", f"{ACTOR}.optim.betas=[0.9,0.999]"),
        (f"{ACTOR}.strategy=megatron", f"{ACTOR}.strategy=fsdp2"),
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"),
        ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]"),
        ("algorithm.gdpo_reward_keys=[a,b] algorithm.gdpo_reward_weights=[1]", "algorithm.gdpo_reward_weights=[1,2]"),
        (f"{ACTOR}.policy_loss.loss_mode=dro", f"{ACTOR}.policy_loss.dro_beta=0.05"),
        ("algorithm.pf_ppo.reweight_method=best", "algorithm.pf_ppo.reweight_method=pow"),
        ("algorithm.adv_estimator=gae critic.enable=false", "-critic.enable"),
        (f"{ROLLOUT}.calculate_log_probs=true algorithm.rollout_correction.rollout_rs=seq",
         "algorithm.rollout_correction.rollout_rs=sequence"),
        (f"{ROLLOUT}.calculate_log_probs=true algorithm.rollout_correction.rollout_is_threshold=0",
         "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0"),
        ("reward_manager.source=importlib", "reward_manager.module.path=a/file.py"),
        ("data.environment.name=gym", "data.environment.name=reasoning_gym data.environment.tasks=[chain_sum]"),
        ("data.environment.name=reasoning_gym data.environment.tasks=[a] data.environment.max_turns=3",
         "data.environment.max_turns=1"),
        ("data.environment.name=reasoning_gym data.environment.tasks=[a] data.environment.answer_pattern=a.*",
         "data.environment.answer_pattern='a(.*)'"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path=a/global_step_3"),
        ("reward_model.item_timeout=5", "reward_model.item_timeout=20"),
        (f"{SERVED}=cuda", f"reward_model.{GPU_SHARE}=0.4"),
        (f"{SERVED}=cuda", "reward_model.enable_resource_pool=true reward_model.nnodes=1"),
        (f"{REWARD} reward_model.enable_resource_pool=true", "reward_model.nnodes=1"),
        ("data.gen_batch_size=128", "data.gen_batch_size=1024"),
        (f"data.gen_batch_size=128 {MINI}=64",
         "algorithm.filter_groups.enable=true algorithm.filter_groups.metric=acc"),
        (f"{MICRO}=null", f"{ACTOR}.use_dynamic_bsz=true"),
        (f"{ACTOR}.ppo_micro_batch_size=16", f"-{ACTOR}.ppo_micro_batch_size"),
        (f"{SPLIT}=4 {SEQUENCES}=4 {VLLM}", f"{SPLIT}=2"),
        (f"{ACTOR}.rollout_n=8 {ROLLOUT}.n=4", f"-{ACTOR}.rollout_n"),
        (f"{ROLLOUT}.val_kwargs.n=4", f"{ROLLOUT}.val_kwargs.do_sample=true {ROLLOUT}.val_kwargs.temperature=1"),
        (f"algorithm.use_pf_ppo=true {ROLLOUT}.n=2 {ACTOR}.share_prompt_forward=true",
         f"{ACTOR}.share_prompt_forward=false"),
        ("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.hybrid_engine=true"),
        (f"{ROLLOUT}.pipeline_model_parallel_size=2", f"{ROLLOUT}.pipeline_model_parallel_size=1"),
    ],
)  # fmt: skip
def test_what_a_message_advises_is_accepted_without_another_problem(settings, advised):
    """`advised` is what the message says to set; a key with a - is left out."""
    assert problems(*settings.split())
    changed = dict(word.split("=", 1) for word in settings.split())
    for word in advised.split():
        key, _, value = word.partition("=")
        changed |= {key: value} if value else {}
        changed.pop(key[1:] if key[0] == "-" else "", None)
    assert [p.message for p in problems(*map("=".join, changed.items()))] == []


@pytest.mark.parametrize(
    "settings",
    [
        "",
        # what is not used
        f"algorithm.kl_penalty=full {ACTOR}.kl_loss_type=full critic.enable=false {ROLLOUT}.do_sample=false",
        f"algorithm.adv_estimator=grpo_passk {ROLLOUT}.n=2", "algorithm.adv_estimator=gae",
        "algorithm.adv_estimator=gae critic.enable=true",
        f"{ACTOR}.rollout_n=4 {ROLLOUT}.n=4", f"{ROLLOUT}.multi_turn.num_repeat_rollouts=4 {ROLLOUT}.n=4",
        f"data.train_batch_size=60 {ROLLOUT}.n=2 {MINI}=8",  # 120 samples on 8 ranks
        f"{MICRO}=null {ACTOR}.use_dynamic_bsz=true", f"{MICRO}=null {ACTOR}.ppo_micro_batch_size=16",
        f"{ACTOR}.use_kl_loss=true {REFERENCE}=4", f"{ACTOR}.use_kl_loss=true actor_rollout_ref.model.lora_rank=8",
        f"{SERVED}=cuda reward_model.{GPU_SHARE}=0.3", f"{SERVED}=cpu",
        f"{SERVED}=cuda reward_model.enable_resource_pool=true reward_model.nnodes=1",
        *(f"{VLLM} {ROLLOUT}.tensor_model_parallel_size=4 {ROLLOUT}.expert_parallel_size={n}" for n in (1, 4)),
        f"{SPLIT}=2 {SEQUENCES}=4 {VLLM}", f"{REWARD} {REWARD_SPLIT}=2 {REWARD_SEQUENCES}=4",
    ],
)  # fmt: skip
def test_settings_that_fit_each_other_are_no_problem(settings):
    assert problems(*settings.split()) == []


def test_validate_config_raises_one_error_with_all():
    config = compose_ppo(*SOUND, "data.truncation=lft", "algorithm.gamma=2", "data.train_batch_size=60")
    with pytest.raises(ConfigError, match="4 problems") as error:
        validate_config(config, use_reference_policy=False, use_critic=False)
    assert all(key in str(error.value) for key in ("data.truncation", "algorithm.gamma", "data.train_batch_size"))
    assert isinstance(error.value, ValueError)
    validate_config(compose_ppo(*SOUND), use_reference_policy=False, use_critic=False)


def test_an_interpolation_that_cannot_be_resolved_is_a_problem():
    reported = only("data.truncation=${data.nothing}")
    assert reported.kind == "wrong" and reported.key == "data.truncation"
    assert reported.message == "data.truncation cannot be resolved: Interpolation key 'data.nothing' not found"


def test_a_reward_function_that_cannot_be_loaded_is_one_problem(tmp_path):
    (tmp_path / "reward.txt").touch()
    of_a_package, of_a_file = (
        list(check_plugins(to_settings(compose_ppo(*SOUND, f"custom_reward_function.path={path}"), PPOConfig)))
        for path in ("pkg://no_such_module", tmp_path / "reward.txt")
    )
    assert [(p.kind, p.key) for p in of_a_package] == [("absent", "custom_reward_function.path")]
    assert [(p.kind, p.key) for p in of_a_file] == [("wrong", "custom_reward_function.path")]
    assert "its name must end in .py" in of_a_file[0].message


@pytest.mark.parametrize(
    ("url", "error", "kind"),
    [("http://host:80a", None, "wrong"), ("http://host:80", BadStatusLine("SSH-2.0"), "absent")],
)
def test_what_is_no_http_address_or_answers_otherwise_is_a_problem(monkeypatch, url, error, kind):
    if error is not None:
        monkeypatch.setattr("urllib.request.urlopen", Mock(side_effect=error))
    (problem,) = check_url("servers", url)
    assert problem.kind == kind and f"servers={url}" in problem.message
