"""Settings of verl 0.7.0's published command lines for FSDP text models, and our own scripts: all pass a dry run.

Model and data paths are ours; every other key stands as its users know it. Commands whose keys are in
tests/compat/commands or in our own scripts are not repeated; those of SFT are in tests/trainer/sft/test_sft_plan.py.
"""

import functools
import os
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_module

from verl.config.compose import forced_override
from verl.trainer.main_ppo import dry_run

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "scripts").glob("*.sh"))
ENTRIES = {  # what scripts start, and its tree
    "verl.trainer.main_ppo": ("verl.trainer.config", "ppo_trainer"),
    "recipe.dapo.main_dapo": ("recipe.dapo.config", "dapo_trainer"),
}

COMMON = """
data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error'
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 trainer.critic_warmup=0
trainer.logger=['console','wandb'] trainer.project_name=verl_example trainer.experiment_name=published
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.optim.lr=1e-6
"""
KL_LOSS = """
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
algorithm.use_kl_in_reward=False actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.ref.fsdp_config.param_offload=True
"""
MICRO = """
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
"""
DYNAMIC = """
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
"""
CRITIC = """
critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.model.path=MODEL
critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size_per_gpu=32
critic.model.fsdp_config.param_offload=False critic.model.fsdp_config.optimizer_offload=False
"""
COMMANDS = {
    "ppo_fused_kernels": COMMON + DYNAMIC + CRITIC + """algorithm.adv_estimator=gae
        actor_rollout_ref.model.use_fused_kernels=True actor_rollout_ref.model.use_liger=True
        actor_rollout_ref.rollout.free_cache_engine=True critic.ppo_max_token_len_per_gpu=98304""",
    "sequence_parallel": COMMON + DYNAMIC + CRITIC + """algorithm.adv_estimator=gae reward_model.enable=True
        actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.ref.ulysses_sequence_parallel_size=2
        critic.ulysses_sequence_parallel_size=2 +reward_model.ulysses_sequence_parallel_size=2
        reward_model.model.path=MODEL reward_model.use_dynamic_bsz=True
        reward_model.forward_max_token_len_per_gpu=98304""",
    "cispo": COMMON + KL_LOSS + MICRO + """algorithm.adv_estimator=grpo
        actor_rollout_ref.actor.policy_loss.loss_mode=cispo actor_rollout_ref.actor.clip_ratio_low=10
        actor_rollout_ref.actor.clip_ratio_high=0.2 actor_rollout_ref.rollout.n=5""",
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("published")
    rows = [
        {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1 + 1"}], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": i, "split": "train"}}
        for i in range(1600)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[:20]).to_parquet(folder / "val.parquet")
    return {"MODEL": tiny_llama, "TRAIN": str(folder / "train.parquet"), "VAL": str(folder / "val.parquet")}


@functools.cache
def without_overrides(module, name):
    with initialize_config_module(module, version_base=None):
        return compose(name)


def planned(module, name, settings, paths, capsys):
    data = [f"data.train_files={paths['TRAIN']}", f"data.val_files={paths['VAL']}",
            f"actor_rollout_ref.model.path={paths['MODEL']}"]  # fmt: skip
    given = [forced_override(s.replace("MODEL", paths["MODEL"])) for s in settings.split()]
    with initialize_config_module(module, version_base=None):
        config = compose(name, overrides=[*given, *data])
    code = dry_run(config, known=without_overrides(module, name))
    return code, capsys.readouterr().out.rpartition("Problems")[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_published_command_passes(name, paths, capsys):
    code, output = planned("verl.trainer.config", "ppo_trainer", COMMANDS[name], paths, capsys)
    assert code == 0, output
    assert "Wrong on every machine: 0" in output


@pytest.mark.process
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_of_ours_asks_for_passes(script, paths, tmp_path, capsys):
    """The shell runs the script with another `python`, and the words that it gets go to the dry run."""
    for name in ("python", "python3"):
        (tmp_path / name).write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, **paths, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([script, "trainer.dry_run=true"], env=environment, capture_output=True, text=True)
    first, module, *given = done.stdout.split("\0")[:-1]
    assert (done.returncode, first) == (0, "-m") and "trainer.dry_run=true" in given, done.stderr
    entry = ENTRIES[module]
    with initialize_config_module(entry[0], version_base=None):
        config = compose(entry[1], overrides=given)
    code = dry_run(config, known=without_overrides(*entry))
    output = capsys.readouterr().out.rpartition("Problems")[2]
    assert code == 0 and "Wrong on every machine: 0" in output, output


def test_every_script_stands_in_the_table():
    listed = re.findall(r"`(\w+\.sh)`", (ROOT / "examples" / "scripts" / "README.md").read_text())
    assert sorted(listed) == [script.name for script in SCRIPTS] and len(SCRIPTS) == 8
