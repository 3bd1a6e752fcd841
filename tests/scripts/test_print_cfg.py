"""scripts/print_cfg.py prints the composed tree."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.process
def test_overrides_are_in_the_printed_tree(tmp_path):
    script, overrides = ROOT / "scripts" / "print_cfg.py", ["trainer.seed=3", "actor_rollout_ref.rollout.name=vllm"]
    command = [sys.executable, script, *overrides]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    config = OmegaConf.create(run.stdout)
    assert config.trainer.seed == 3 and config.actor_rollout_ref.rollout.name == "vllm"
    assert config.data.seed == 3  # it follows trainer.seed
    assert not list(tmp_path.iterdir())
