"""Keys of later versions of verl become those of this project when a configuration is composed."""

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from verl.config.aliases import RL, SFT, current_names_or_exit, with_current_names
from verl.config.compose import CHOICE, forced_override
from verl.planning.config_check import known_tree, unknown_keys
from verl.utils.problems import ConfigError

NEEDED = ("actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=vllm")
MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))
BUCKET = "update_weights_bucket_megabytes"
TORCH = f"{ACTOR}.profiler.tool_config.torch"


def composed(*words, tree="ppo_trainer"):
    """The config of a command line under the names of this project."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        forced = [forced_override(word, groups="sft" not in tree) for word in words]
        config = compose(tree, forced)
        known = known_tree(tree, forced)
    config = with_current_names(config, {word.lstrip("+").partition("=")[0] for word in forced})
    raw, tree = (OmegaConf.to_container(c, resolve=False) for c in (config, known))
    assert unknown_keys(raw, tree) == []
    return config


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("reward.custom_reward_function.path=r.py", "custom_reward_function.path", "r.py"),
        ("reward.reward_manager.name=dapo", "reward_manager.name", "dapo"),
        ("reward.reward_manager.name=gdpo", "reward_manager.name", "naive"),
        ("reward.reward_manager.module.path=m.py", "reward_manager.module.path", "m.py"),
        ("reward.num_workers=8", "reward_model.num_workers", 8),
        ("+reward.reward_kwargs.max_resp_len=5", "reward_model.reward_kwargs.max_resp_len", 5),
        ("+reward.reward_kwargs.overlong_buffer_cfg.len=5", "reward_model.reward_kwargs.overlong_buffer_cfg.len", 5),
        (f"{ACTOR}.use_prefix_grouper=true", f"{ACTOR}.share_prompt_forward", True),
        ("reward.sandbox_fusion.url=http://s", "reward_model.sandbox_fusion.url", "http://s"),
        ("reward.reward_model.enable=True", "reward_model.enable", True),
        ("reward.reward_model.model_path=rm", "reward_model.model.path", "rm"),
        ("reward.reward_model.rollout.name=vllm", "reward_model.rollout.name", "vllm"),
        (f"{ROLLOUT}.checkpoint_engine.{BUCKET}=9", f"{ROLLOUT}.{BUCKET}", 9),
        ("algorithm.filter_groups.metric=reward", "algorithm.filter_groups.metric", "seq_reward"),
        ("critic.fsdp.param_offload=True", "critic.model.fsdp_config.param_offload", True),
        (f"{ACTOR}.policy_loss.tau_pos=2", f"{ACTOR}.tau_pos", 2),
        ("skip.rollout.enable=True", f"{ROLLOUT}.skip_rollout", True),
        ("skip.rollout.dump_dir=/d", f"{ROLLOUT}.skip_dump_dir", "/d"),
        (f"{MODEL}.lora.rank=4", f"{MODEL}.lora_rank", 4),
        (f"{MODEL}.lora.merge=False", f"{ROLLOUT}.lora_as_adapter", True),
        (f"{MODEL}.lora.merge=True", f"{ROLLOUT}.lora_as_adapter", False),
        (f"{MODEL}.lora.adapter_path=/a", f"{MODEL}.lora_adapter_path", "/a"),
        ("critic.model.lora.rank=4", "critic.model.lora_rank", 4),
        (f"{ROLLOUT}.seed=7", f"{ROLLOUT}.seed", 7),
        (f"{ACTOR}.entropy_from_logits_chunk_size=99", f"{MODEL}.policy.kwargs.chunk_tokens", 99),
        ("critic.loss_scale_factor=3", "critic.loss_scale_factor", 3),
        (f"{ACTOR}.loss_scale_factor=3", "critic.loss_scale_factor", 3),
        (f"{TORCH}.schedule={{skip_first:1,wait:1,warmup:1,active:2}}", f"{TORCH}.step_start", 3),
        (f"{TORCH}.schedule={{skip_first:1,wait:1,warmup:1,active:2}}", f"{TORCH}.step_end", 5),
    ],
)
def test_an_old_name_sets_the_new_one(word, key, value):
    assert OmegaConf.select(composed(*NEEDED, word), key) == value


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("model.path=m", "model.partial_pretrain", "m"),
        ("model.use_remove_padding=True", "use_remove_padding", True),
        ("engine.strategy=fsdp2", "model.strategy", "fsdp2"),
        ("engine.fsdp_size=2", "model.fsdp_config.fsdp_size", 2),
        ("engine.ulysses_sequence_parallel_size=2", "ulysses_sequence_parallel_size", 2),
        ("engine.param_offload=True", "model.fsdp_config.offload_params", True),
        ("optim.lr_scheduler_type=cosine", "optim.lr_scheduler", "cosine"),
        ("optim.min_lr_ratio=0.1", "optim.min_lr_ratio", 0.1),
        ("optim.clip_grad=2", "optim.clip_grad", 2),
        ("data.messages_key=chat", "data.multiturn.messages_key", "chat"),
        ("data.use_dynamic_bsz=False", "data.packing", False),
        ("data.pad_mode=no_padding", "data.packing", True),
        ("data.max_token_len_per_gpu=99", "data.max_token_len_per_gpu", 99),
        ("checkpoint.save_contents=[model]", "trainer.checkpoint.save_contents", ["model"]),
        ("trainer.test_freq=after_each_epoch", "trainer.test_freq", "after_each_epoch"),
        ("engine=fsdp", "model.strategy", "fsdp2"),
        ("optim=fsdp", "optim.lr", 1e-3),
    ],
)
def test_an_old_name_of_sft_sets_the_new_one(word, key, value):
    assert OmegaConf.select(composed(word, tree="sft_trainer_engine"), key) == value


@pytest.mark.parametrize(
    "words",
    [
        ("reward.num_workers=8", "reward_model.num_workers=4"),
        (f"{MODEL}.lora.rank=8", f"{MODEL}.lora_rank=4"),
        (f"{MODEL}.lora.merge=True", f"{ROLLOUT}.lora_as_adapter=True"),
    ],
)
def test_both_names_with_different_values_are_refused(words):
    with pytest.raises(ConfigError) as refused:
        composed(*NEEDED, *words)
    assert all(word.partition("=")[0] in str(refused.value) for word in words)


def test_both_names_with_one_value_are_fine():
    assert composed(*NEEDED, "reward.num_workers=8", "reward_model.num_workers=8").reward_model.num_workers == 8


def test_two_old_names_of_one_setting_must_agree():
    with pytest.raises(ConfigError, match="engine.optimizer_offload.* and engine.param_offload=true"):
        composed("engine.param_offload=True", "engine.optimizer_offload=False", tree="sft_trainer_engine")


@pytest.mark.parametrize(
    ("word", "works"),
    [
        ("trainer.v1.trainer_mode=colocate_async", "rollout.mode=async"),
        ("distillation.enabled=True", "algorithm.adv_estimator=opd"),
        ("model_engine=megatron", "fsdp_config.tensor_parallel_size"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=2", "Megatron is not supported: FSDP2 trains every model"),
        (f"{ROLLOUT}.checkpoint_engine.backend=nccl", "Leave checkpoint_engine.backend out"),
        (f"{ROLLOUT}.full_determinism=True", "rollout.seed"),
        (f"{ROLLOUT}.nnodes=2", "trainer.nnodes"),
        ("skip.rollout.action=cache", "action=repeat"),
        (f"{ACTOR}.pad_to_length=True", "packed"),
        (f"{ACTOR}.optim.zero_indexed_step=False", "step 0"),
        ("reward.nothing=1", "reward.nothing"),
        (f"{MODEL}.lora.dropout=0.1", "adapter_path"),
        (f"{TORCH}.schedule={{active:1,repeat:3}}", "repeat"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_what_works(word, works):
    with pytest.raises(ConfigError) as refused:
        composed(*NEEDED, word)
    assert works in str(refused.value)


@pytest.mark.parametrize(
    "word",
    [
        "data.continuous_token.model_family=qwen", f"{ACTOR}.profiler.relocate_results=true",
        "global_profiler.relocate_results=true", "trainer.use_v1=True", "trainer.use_v1=False",
        "trainer.v1.trainer_mode=sync", "model_engine=dp",
        f"{ROLLOUT}.checkpoint_engine.backend=naive", f"{ROLLOUT}.scheduling_policy=fcfs", "distillation.enabled=False",
        f"{ROLLOUT}.nnodes=0", f"{ACTOR}.optim.zero_indexed_step=True",
        "algorithm.filter_groups.max_inflight_gen_batches=1", "skip.rollout.steps=[]",
        f"{TORCH}.contents=[cpu]", f"{TORCH}.discrete=False",
    ],
)  # fmt: skip
def test_what_changes_nothing_is_accepted(word):
    assert composed(*NEEDED, word) == composed(*NEEDED)


def test_a_yaml_of_the_users_own_may_have_old_names(tmp_path):
    from hydra import initialize_config_dir

    search = "hydra:\n  searchpath: [pkg://verl.trainer.config]\n"
    text = f"{search}defaults: [ppo_trainer, _self_]\nreward:\n  num_workers: 3\n"
    (tmp_path / "mine.yaml").write_text(text)
    with initialize_config_dir(str(tmp_path), version_base=None):
        config, known = compose("mine"), known_tree("mine", [])
    config = with_current_names(config)
    assert config.reward_model.num_workers == 3 and "reward" not in config and "reward" not in known


def test_a_config_without_old_names_is_returned_as_it_is():
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer")
    assert with_current_names(config) is config


def test_log_probs_of_the_rollout_are_requested_explicitly():
    assert composed(*NEEDED).actor_rollout_ref.rollout.calculate_log_probs is False


def test_every_row_has_a_version_and_names_one_setting():
    for table in (RL, SFT):
        names = [row.old for row in table]
        assert len(names) == len(set(names))
        for number, row in enumerate(table):
            assert row.since in ("0.7", "0.7.1", "0.8", "0.9") and row.text
            before = names[:number]
            assert CHOICE in row.old or not any(row.old.startswith(f"{section}.") for section in before), row.old


@pytest.mark.parametrize("word", ["reward.num_worker=3", "skip.x=1", "model_engine.choice=x"])
def test_what_has_no_counterpart_is_named(word):
    with pytest.raises(ConfigError) as refused:
        composed(*NEEDED, word)
    assert f"{word.partition('=')[0]} has no counterpart here: check its spelling" in str(refused.value)


def test_an_override_that_cannot_be_resolved_is_left_to_the_checks(monkeypatch):
    app = OmegaConf.create({"overrides": {"task": ["data.seed=${data.nothing}"]}})
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    monkeypatch.setattr(HydraConfig, "get", lambda: app)
    config = OmegaConf.create({"data": {"seed": "${data.nothing}"}})
    assert current_names_or_exit(config) is config
