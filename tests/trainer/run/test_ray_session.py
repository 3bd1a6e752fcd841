"""What other users of the machine can reach of a Ray session: nothing."""

import os
import stat
import subprocess
import sys

import pytest

from verl.trainer.run.ray_session import keep_token_private

SESSION = """
import os, stat, sys, tempfile
from pathlib import Path
from omegaconf import OmegaConf
from verl.trainer.run.ray_session import TEMP_PREFIX, started_session
os.umask(0)
trainer = {"default_local_dir": sys.argv[1], "nnodes": 1, "n_gpus_per_node": 1}
with started_session(OmegaConf.create({"trainer": trainer, "ray_kwargs": {"ray_init": {"num_cpus": 1}}})):
    folder, = Path(tempfile.gettempdir()).glob(f"{TEMP_PREFIX}{os.getpid()}-*")
    session, = folder.glob("*/session_2*")
    print(oct(folder.stat().st_mode & 0o777), oct(session.stat().st_mode & 0o777))
print(folder.exists())
"""


@pytest.mark.process
def test_the_folder_of_a_session_is_closed_to_other_users_and_removed(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", SESSION, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-2:] == ["0o700 0o777", "False"], done.stdout + done.stderr
    token = tmp_path / "home" / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) == 64


def test_the_token_is_readable_by_its_user_alone_and_kept(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_token_private()
    file = tmp_path / ".ray" / "auth_token"
    written = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(written) == 64
    file.chmod(0o644)  # as Ray writes it
    keep_token_private()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.read_text() == written
