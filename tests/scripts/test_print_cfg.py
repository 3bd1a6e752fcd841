"""scripts/print_cfg.py prints the resolved tree."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def printed(folder, *arguments):
    command = [sys.executable, ROOT / "scripts" / "print_cfg.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.process
def test_the_resolved_tree_is_printed_with_its_overrides_and_without_secrets(tmp_path):
    run = printed(
        tmp_path, "trainer.seed=3", "critic.ppo_epochs=${trainer.seed}", "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.use_prefix_grouper=true",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32", "ray_kwargs.ray_init.api_key=abc",
    )  # fmt: skip
    assert run.returncode == 0 and "${" not in run.stdout
    config = yaml.safe_load(run.stdout)
    assert config["trainer"]["seed"] == config["data"]["seed"] == 3  # data.seed follows trainer.seed
    assert config["critic"]["ppo_epochs"] == 3
    assert config["actor_rollout_ref"]["rollout"]["name"] == "vllm"
    assert config["actor_rollout_ref"]["actor"]["share_prompt_forward"] is True  # its name in verl 0.9 is given
    assert config["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]["block_size"] == 32
    assert config["actor_rollout_ref"]["model"]["path"] == "???"
    assert config["ray_kwargs"]["ray_init"]["api_key"] == "<redacted>"
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("trainer.sed=3", "trainer.sed is not a known key; did you mean trainer.seed?"),
        ("trainer.seed=${trainer.nothing}", "cannot be resolved: Interpolation key 'trainer.nothing' not found"),
    ],
)
def test_what_cannot_be_printed_is_named(tmp_path, argument, said):
    run = printed(tmp_path, argument)
    assert run.returncode == 1 and said in run.stderr and "Traceback" not in run.stderr and not run.stdout
