"""Files and the stand-in for skyrl-gym, whose adapter these tests use."""

import json
from pathlib import Path

import pytest

SKYRL_GYM = "examples.environments.skyrl_gym_adapter.SkyRLGym"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Eight rows in SkyRL's format for each split, of the environments that tests/agents/environments/stub has."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stub"))
    rows = [{"prompt": [{"role": "user", "content": f"{i} ?"}], "env_class": "count"} for i in range(8)]
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {split: [str(tmp_path / f"{split}.jsonl")] for split in ("train", "val")}
