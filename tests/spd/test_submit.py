"""A training of an SPD scorer as a job of a real Ray head that this file starts and stops.

Not covered: a cluster of several nodes, a GPU.
"""

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch

from spd_scorer import AutoModelForSPDScoring
from tests.helpers.models import save_tiny_llama
from tests.helpers.spd_run import write_blocks
from tests.helpers.watched_runs import wait_until
from tests.spd.test_client import FakeServer
from verl.utils.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).parent / "ray")
# Stands in for the training: waits for the signal that stops a job, then saves for longer than Ray's own 3 s.
STUB = """
import signal, time
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
print("waits", flush=True)
while not stopped:
    time.sleep(0.1)
time.sleep(4)
print("saved", flush=True)
"""


class Head:
    """A Ray head with a job server of its own, behind a token of its own."""

    def __init__(self, directory: Path):
        dashboard, self.port, agent, client = free_ports(4)
        self.address = f"http://127.0.0.1:{dashboard}"
        self.directory = directory
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MODEL_PATH"))}
        self.env.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16), OMP_NUM_THREADS="1")
        options = {
            "port": self.port, "dashboard-host": "127.0.0.1", "dashboard-port": dashboard,
            "dashboard-agent-listen-port": agent, "ray-client-server-port": client, "min-worker-port": 0,
            "max-worker-port": 0, "num-cpus": 4, "temp-dir": directory / "r", "include-dashboard": "true",
        }  # fmt: skip
        start = [RAY, "start", "--head", "--block", "--disable-usage-stats"]
        start += [f"--{name}={value}" for name, value in options.items()]
        self.log = directory / "head.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(start, env=self.env, stdout=log, stderr=log, start_new_session=True)
        wait_until(self.answers, self.process, self.log, 120)

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.address}/api/version", timeout=5)
        except urllib.error.HTTPError as error:
            return error.code == 401
        except OSError:
            return False
        raise AssertionError("the job server answers without the token")

    def processes(self) -> list[psutil.Process]:
        """Ours alone: their command lines name our folder, or their parents' do."""
        lines = [(p, " ".join(p.info["cmdline"] or ())) for p in psutil.process_iter(["cmdline"])]
        named = [process for process, line in lines if f"{self.directory}/r" in line]
        return list({p.pid: p for root in named for p in (root, *root.children(recursive=True))}.values())

    def stop(self) -> None:
        left = self.processes()
        self.process.terminate()
        self.process.wait(60)
        for process in psutil.wait_procs(left, timeout=20)[1]:
            process.kill()

    def submit(self, folder: Path, *words: str, **env: str) -> subprocess.Popen:
        """Start `python WORDS` in a copy of the folder as docs/clusters.md says; its log is on standard output."""
        given = {"RAY_JOB_STOP_WAIT_TIME_S": "600", "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1", **env}
        options = ("--working-dir", str(folder), "--runtime-env-json", json.dumps({"env_vars": given}))
        return self.job("submit", *options, "--", sys.executable, *words)

    def job(self, operation: str, *words: str) -> subprocess.Popen:
        """Start `ray job OPERATION`."""
        command = [RAY, "job", operation, "--address", self.address, *words]
        return subprocess.Popen(
            command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.directory
        )


def free_ports(count: int) -> set[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return ports


@pytest.fixture(scope="module")
def head():
    # A short path: Ray puts sockets below it.
    with tempfile.TemporaryDirectory(prefix="sub", ignore_cleanup_errors=True) as directory:
        made = Head(Path(directory))
        try:
            yield made
        finally:
            made.stop()
        assert made.processes() == []


@pytest.mark.slow
@pytest.mark.process
def test_a_job_that_is_stopped_saves_first(head, tmp_path):
    (tmp_path / "train.py").write_text(STUB)
    process, log = head.submit(tmp_path, "train.py"), []
    for line in process.stdout:
        log.append(line)
        if line.startswith("waits"):
            break
    name = re.search(r"raysubmit_\w+", "".join(log))[0]
    assert head.job("stop", name).wait(120) == 0
    out, _ = process.communicate(timeout=120)
    assert "saved" in out


class Words(FakeServer):
    """Completes every prompt with one word of the tiny model."""

    def complete(self, prompt):
        return [8, 2], "stop"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
def test_a_training_of_an_own_backbone_runs_on_the_cluster_that_the_job_is_on(head, tmp_path):
    """By LoRA; what it saves loads again, with other weights behind each step."""
    model = save_tiny_llama(tmp_path / "target")
    write_blocks(tmp_path)
    options = ["--blocks", str(tmp_path / "blocks.jsonl"), "--metadata", str(tmp_path / "meta.jsonl")]
    options += ["--output-dir", str(tmp_path / "run"), "trainer.total_training_steps=2", "spd.backbone=own"]
    options += ["actor_rollout_ref.model.lora_rank=4", "spd.head_inputs=pair", "actor_rollout_ref.actor.optim.lr=1e-3"]
    options += ["trainer.save_freq=1", "trainer.device=cpu", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=4"]
    options += ["spd.rollout.max_tokens=16", "trainer.logger=[]", "trainer.report=false"]
    with Words(model=model).running() as url:
        env = {"MODEL_PATH": model, "SPD_VLLM_URLS": url, "LOGURU_LEVEL": "DEBUG"}
        process = head.submit(ROOT, "train_spd_scorer.py", *options, **env)
        out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out[-3000:]
    assert "Connecting to existing Ray cluster" in out
    rows = [json.loads(line)["data"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/scored_samples"] for row in rows] == [8 * 4] * 2 and rows[0]["actor/grad_norm"] > 0
    assert not (tmp_path / "run" / "ray_session.json").exists()
    actors = [tmp_path / "run" / f"global_step_{step}" / "actor" for step in (1, 2)]
    first, second = (
        AutoModelForSPDScoring.from_pretrained(actor / "huggingface", base_model_path=model).state_dict()
        for actor in actors
    )
    changed = [name for name, value in second.items() if not torch.equal(value, first[name])]
    assert any(name.startswith("head.") for name in changed)
    assert any(name.startswith("backbone.") for name in changed)  # adapters, merged in there
    assert (actors[1] / "lora_adapter" / "adapter_model.safetensors").exists()
