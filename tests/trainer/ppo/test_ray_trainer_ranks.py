"""The full chain on real Ray ranks: FSDP over gloo, the hf rollout, a tiny Llama.

Not covered: CUDA ranks, other rollouts.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import load_file

from tests.helpers.rl_run import compose_run, metrics_rows, overrides
from tests.helpers.watched_runs import CANARY, SECRETS, family, files_with_secrets, listening, wait_until
from verl.trainer.run.ray_session import SESSION_FILE
from verl.trainer.run.stop_signals import SAME_STOP_S
from verl.training.checkpoint.publish import published_steps

pytestmark = [pytest.mark.process, pytest.mark.slow]
# Two mini-batches with a KL term: the old-log-prob pass and the reference engine take part.
SETTINGS = {
    "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
    "actor_rollout_ref__actor__use_kl_loss": "true",
    "actor_rollout_ref__actor__checkpoint__save_contents": "[model,optimizer,extra,hf_model]",
    "trainer__total_training_steps": 6,
    "trainer__save_freq": 2,
}


IN_BACKGROUND = {"actor_rollout_ref__actor__checkpoint__async_save": "true"}


def train(directory: Path, model: str, **more) -> None:
    from verl.trainer.main_ppo import TaskRunner
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    directory.mkdir(exist_ok=True)
    trainer = TaskRunner().build(RayPPOTrainer, compose_run(directory, model, **{**SETTINGS, **more}), None)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()


def final_weights(directory: Path) -> dict:
    (file,) = (directory / "out" / "global_step_6" / "actor" / "huggingface").glob("*.safetensors")
    return load_file(file)


def assert_same_to_the_bit(directory: Path, other: Path) -> None:
    """Metrics and final weights of two runs."""
    assert metrics_rows(directory) == metrics_rows(other)
    weights, others = final_weights(directory), final_weights(other)
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert tensor.equal(others[name]), name


@pytest.fixture(scope="module")
def one_rank(ray_cluster, tiny_llama, tmp_path_factory) -> Path:
    """A run of six steps on one rank, never interrupted."""
    directory = tmp_path_factory.mktemp("one_rank")
    train(directory, tiny_llama, trainer__report="true")
    return directory


def test_a_run_on_one_rank_leaves_metrics_checkpoints_and_report(one_rank):
    rows = metrics_rows(one_rank)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert [r["training/weights_version"] for r in rows] == [0, 1, 2, 3, 4, 5]
    for row in rows:
        assert row["actor/nonfinite_steps"] == 0
        assert row["actor/grad_norm"] > 0
        assert row["training/requested_samples"] == row["training/scored_samples"] == 32
    assert rows[0]["actor/kl_loss"] < rows[-1]["actor/kl_loss"]  # the reference stays where the actor began
    out = one_rank / "out"
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert (out / "report.html").is_file()
    state = json.loads((out / "global_step_6" / "trainer_state.json").read_text())
    assert state["counters"]["scored"] == 192


def test_a_local_run_equals_the_run_on_a_ray_rank_bit_for_bit(one_rank, tiny_llama, tmp_path):
    train(tmp_path, tiny_llama, trainer__local="true", trainer__save_freq=1, **IN_BACKGROUND)
    assert_same_to_the_bit(tmp_path, one_rank)


def test_two_ranks_give_the_losses_of_one(one_rank, ray_cluster, tiny_llama, tmp_path):
    train(tmp_path, tiny_llama, trainer__n_gpus_per_node=2, trainer__save_freq=1, **IN_BACKGROUND)
    assert published_steps(tmp_path / "out") == [1, 2, 3, 4, 5, 6]
    for name, tensor in final_weights(tmp_path).items():
        assert tensor.allclose(final_weights(one_rank)[name], atol=1e-4), name
    for one, two in zip(metrics_rows(one_rank), metrics_rows(tmp_path), strict=True):
        assert one.keys() == two.keys()
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
            assert two[name] == pytest.approx(one[name], abs=1e-5), (name, one["step"])


def start(directory: Path, model: str, environment: dict | None = None, **more) -> subprocess.Popen:
    """A run of `main_ppo` in a process of its own; what it writes is in `directory/stdout` and `stderr`."""
    directory.mkdir(exist_ok=True)
    with open(directory / "stderr", "a") as log, open(directory / "stdout", "a") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(directory, model, **more)],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "LOGURU_LEVEL": "INFO", **(environment or {})},
            stdout=out,
            stderr=log,
        )


def wait_for_rows(run: subprocess.Popen, directory: Path, rows: int) -> None:
    """Return once metrics.jsonl has that many rows."""
    metrics = directory / "out" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= rows, run, directory / "stderr", 400)


def processes_of(folder: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if any(folder in a for a in p.info["cmdline"] or ())]


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_run_killed_in_the_middle_ends_like_the_uninterrupted_one_bit_for_bit(one_rank, tiny_llama, tmp_path):
    first = start(tmp_path, tiny_llama, **SETTINGS)
    try:
        wait_for_rows(first, tmp_path, 3)  # step 2 is saved, step 3 is lost
    finally:
        first.kill()
        first.wait()
    assert not (tmp_path / "out" / "global_step_6").exists()
    left = json.loads((tmp_path / "out" / SESSION_FILE).read_text())
    assert left["pid"] == first.pid
    second = start(tmp_path, tiny_llama, **SETTINGS)
    try:
        assert second.wait(timeout=600) == 0, (tmp_path / "stderr").read_text()
    finally:
        second.kill()
    assert "resuming from" in (tmp_path / "stderr").read_text()
    assert_same_to_the_bit(tmp_path, one_rank)
    assert not Path(left["temp_dir"]).exists() and not processes_of(left["temp_dir"])
    assert not (tmp_path / "out" / SESSION_FILE).exists()


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_a_second_signal_ends_a_run_that_hangs_at_once(tiny_llama, tmp_path):
    """The task runner is in the driver's process: it has no actor next to the ranks."""
    run = start(tmp_path, tiny_llama, trainer__total_epochs=10000)
    try:
        wait_for_rows(run, tmp_path, 1)
        processes = family(run.pid)[1:]
        titles = {}
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                titles[process] = " ".join(process.cmdline())
        assert not any("TaskRunner" in title for title in titles.values())
        (rank,) = (p for p, title in titles.items() if "ActorRolloutRefWorker" in title)
        rank.suspend()
        run.send_signal(signal.SIGTERM)
        time.sleep(SAME_STOP_S + 0.5)  # within which signals are one
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=60) == 143
        left = psutil.wait_procs(processes, timeout=60)[1]
        assert not left, [titles.get(p, p) for p in left]
    finally:
        run.kill()


@pytest.fixture(scope="module")
def stopped(tiny_llama, tmp_path_factory):
    """A run with every output switched on and secrets around it, looked at while it runs, then stopped by SIGTERM."""
    directory = tmp_path_factory.mktemp("stopped")
    kept = {
        "trainer__rollout_data_dir": directory / "rollouts",
        "trainer__validation_data_dir": directory / "validations",
        "trainer__logger": "[console,file,tensorboard]",
        "trainer__report": "true",
        "trainer__test_freq": 1,
        "trainer__save_freq": 1,
        "trainer__max_actor_ckpt_to_keep": 2,
        "++trainer__wandb_proxy": f"http://user:{CANARY}@127.0.0.1:1",
        "++data__custom__api_key": CANARY,
    }
    places = {"TENSORBOARD_DIR": directory / "tensorboard", "VERL_FILE_LOGGER_ROOT": directory}
    secrets = SECRETS | {name: str(path) for name, path in places.items()}
    run = start(directory, tiny_llama, secrets, trainer__total_epochs=10000, **kept)
    try:
        wait_for_rows(run, directory, 1)
        ray_folder = json.loads((directory / "out" / SESSION_FILE).read_text())["temp_dir"]
        sockets = listening(family(run.pid))
        shutil.copytree(
            ray_folder, directory / "ray", ignore=no_sockets, copy_function=copy_if_there, ignore_dangling_symlinks=True
        )
        run.send_signal(signal.SIGTERM)
        run.wait(timeout=300)
    finally:
        run.kill()
    return SimpleNamespace(run=run, directory=directory, sockets=sockets)


def no_sockets(folder: str, names: list[str]) -> list[str]:
    return [n for n in names if not (Path(folder, n).is_file() or Path(folder, n).is_dir())]


def copy_if_there(source: str, target: str) -> None:
    """Ray moves and deletes files while it runs."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


def test_sigterm_finishes_the_step_saves_and_exits_with_143(stopped):
    run, directory = stopped.run, stopped.directory
    assert run.returncode == 143, (directory / "stderr").read_text()
    last = metrics_rows(directory)[-1]["step"]
    assert (directory / "out" / f"global_step_{last}" / "manifest.json").is_file()
    assert not list(Path(tempfile.gettempdir()).glob(f"verl-ray-{run.pid}-*"))


def test_no_secret_of_the_environment_or_the_config_is_in_any_file_of_a_run(stopped):
    files = [f for f in stopped.directory.rglob("*") if f.is_file()]
    names = {f.name for f in files}
    assert {"stderr", "stdout", "1.jsonl", "run_config.yaml", "report.html", "metrics.jsonl", "data.pt"} <= names
    assert any("tfevents" in n for n in names) and any("ray" in f.parts and f.suffix in (".log", ".out") for f in files)
    assert files_with_secrets(stopped.directory) == []


#: Ray's own services, which listen on every interface (README), and how many such sockets each other process may have:
#: the driver and the workers answer Ray's calls on one, and rank 0 lets the ranks meet on another
SERVICES = ("gcs_server", "raylet", "dashboard.py", "Agent", "agent")
WIDE_SOCKETS = {"ray::": 2, "python": 2}


def test_a_run_listens_where_the_readme_says_and_nowhere_else(stopped):
    wide = Counter(
        (name, process) for name, process, address, _ in stopped.sockets
        if address not in ("127.0.0.1", "::1") and not any(part in name for part in SERVICES)
    )  # fmt: skip
    assert wide and {"gcs_server", "raylet"} <= {name for name, *_ in stopped.sockets}
    for (name, process), count in wide.items():
        most = next((most for start, most in WIDE_SOCKETS.items() if name.startswith(start)), 0)
        assert count <= most, f"{name} ({process}) has {count} sockets beyond 127.0.0.1: {stopped.sockets}"
