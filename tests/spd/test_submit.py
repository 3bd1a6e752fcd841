"""Claims on scripts/submit_spd.sh: what is packed, and jobs on a real Ray head that this file starts and stops.

Not covered: a cluster of several nodes, a GPU.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from scripts import submit_spd as command
from spd_scorer import AutoModelForSPDScoring
from tests.helpers.models import save_tiny_llama
from tests.helpers.spd_run import write_blocks
from tests.helpers.watched_runs import wait_until
from tests.spd.test_client import FakeServer
from verl.utils.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
# Stands in for the training: says what it got; `code` ends it, `wait` waits for the signal that stops a job.
STUB = """
import os, signal, sys, time
print("arguments", sys.argv[1:], flush=True)
print("colour", open("data/colour.txt").read(), "secret", os.environ["WANDB_API_KEY"][::-1], flush=True)
print("cluster", os.environ["RAY_ADDRESS"], "alpha", os.environ["REWARD_ALPHA"], flush=True)
if "wait" in sys.argv:
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    print("waits", flush=True)
    while not stopped:
        time.sleep(0.1)
    time.sleep(4)  # longer than Ray's own patience
    print("saved", flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A repository in small, with what must not travel."""
    root = tmp_path / "repo"
    for name, text in {
        "train_spd_scorer.py": STUB, "data/colour.txt": "teal", ".git/config": "x", ".env": "KEY=x",
        "outputs/m/w": "x", "a/__pycache__/b.pyc": "x", "env/pyvenv.cfg": "x", "env/bin/python": "x",
        "a/.cache/c": "x", "p.egg-info/x": "x",
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "data" / "big.bin").write_bytes(bytes(21 * 2**20))
    for name in ("scripts/submit_spd.sh", "scripts/submit_spd.py", "verl/utils/redact.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    monkeypatch.setattr(command, "ROOT", root)
    return root


def test_hidden_generated_and_big_files_stay_at_home(tree, tmp_path):
    usual = ["data/colour.txt", "scripts/submit_spd.py", "scripts/submit_spd.sh", "train_spd_scorer.py"]
    usual += ["verl/utils/redact.py"]
    files, too_big = command.package_files([])
    assert [str(path.relative_to(tree)) for path in files] == usual
    assert too_big == ["data/big.bin (21 MiB)"]
    files, _ = command.package_files(["outputs/m", "data/big.bin"])
    assert {str(path.relative_to(tree)) for path in files} == {*usual, "outputs/m/w", "data/big.bin"}
    size = command.write_package(files, tmp_path / "p.zip")
    assert size == (tmp_path / "p.zip").stat().st_size
    with zipfile.ZipFile(tmp_path / "p.zip") as archive:
        assert sorted(archive.namelist()) == sorted(str(path.relative_to(tree)) for path in files)
    with pytest.raises(SystemExit, match="--pack ../x: the path does not exist"):
        command.package_files(["../x"])


def test_paths_the_job_would_not_find_or_would_lose_are_refused(tree):
    (tree.parent / "x").write_text("x")
    files, _ = command.package_files([])
    given = ["--blocks", "data/colour.txt", "--model=/shared/m", "--output-dir", "/shared/run"]
    absolute = command.check_paths(given, {"TOKENIZER_PATH": "/shared/t"}, files)
    assert absolute == ["/shared/m", "/shared/t", "/shared/run"]
    for training, environment, sentence in (
        (["--model", "outputs/m"], {}, "--model outputs/m: outputs/m/w is not packed; .*, or add --pack outputs/m"),
        ([], {"MODEL_PATH": "data"}, "--model data: data/big.bin is not packed"),
        (["--output-dir", "outputs/run"], {}, "--output-dir outputs/run: the job's working directory is deleted after"),
        (["--blocks", "../x"], {}, "--blocks ../x: ../x is not packed"),
        (["spd.rollout.store_path=s"], {}, "spd.rollout.store_path s: the job's working directory is deleted after it"),
    ):
        with pytest.raises(SystemExit, match=sentence):
            command.check_paths(training, environment, files)


def test_the_variables_of_the_training_travel_and_no_others(monkeypatch):
    monkeypatch.setattr(os, "environ", {"MODEL_PATH": "m", "REWARD_ALPHA": "1", "PATH": "p", "X": "y", "HF_TOKEN": "h"})
    ray = {"RAY_OVERRIDE_JOB_RUNTIME_ENV": "1", "RAY_JOB_STOP_WAIT_TIME_S": "600"}
    forwarded = {"MODEL_PATH": "m", "REWARD_ALPHA": "1", "HF_TOKEN": "h"}
    assert command.job_environment([]) == {**forwarded, **ray}
    assert command.job_environment(["X"]) == {**forwarded, **ray, "X": "y"}
    with pytest.raises(SystemExit, match="--env GONE: this variable is not set"):
        command.job_environment(["GONE"])


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("SUCCEEDED", 0, 0), ("FAILED", 7, 7), ("FAILED", -9, 137), ("FAILED", None, 1), ("STOPPED", None, 130)],
)
def test_exit_codes(status, code, expected):
    details = SimpleNamespace(status=status, driver_exit_code=code, message="no node")
    assert command.exit_code(details) == expected


def test_the_server_is_the_first_argument_or_ray_address(monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    args, training = command.parse(["https://head:8265/", "--python", "py", "--blocks", "b", "a.b=c"])
    assert (args.address, args.python, training) == ("https://head:8265", "py", ["--blocks", "b", "a.b=c"])
    monkeypatch.setenv("RAY_ADDRESS", "http://other:1")
    assert command.parse(["--blocks", "b"])[0].address == "http://other:1"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # the cluster's own port, not its job server
    with pytest.raises(SystemExit):
        command.parse([])
    assert "name the job server" in capsys.readouterr().err


class Head:
    """A Ray head with a job server of its own, behind a token of its own."""

    def __init__(self, directory: Path):
        dashboard, self.port, agent, client = free_ports(4)
        self.address = f"http://127.0.0.1:{dashboard}"
        self.directory = directory
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MODEL_PATH"))}
        self.env.update(
            RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16), OMP_NUM_THREADS="1", PYTHON=sys.executable
        )
        options = {
            "port": self.port, "dashboard-host": "127.0.0.1", "dashboard-port": dashboard,
            "dashboard-agent-listen-port": agent, "ray-client-server-port": client, "min-worker-port": 0,
            "max-worker-port": 0, "num-cpus": 4, "temp-dir": directory / "r", "include-dashboard": "true",
        }  # fmt: skip
        start = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
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

    def start(self, tree: Path, *more: str, **env: str) -> subprocess.Popen:
        script = [str(tree / "scripts" / "submit_spd.sh"), self.address, "--python", sys.executable, *more]
        return subprocess.Popen(
            script, env={**self.env, **env}, cwd=tree.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, tree: Path, *more: str, **env: str) -> tuple[int, str, str]:
        process = self.start(tree, *more, **env)
        out, err = process.communicate(timeout=400)
        return process.returncode, out, err


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


KEYS = {"WANDB_API_KEY": "key-98765", "REWARD_ALPHA": "0.25"}


@pytest.mark.slow
@pytest.mark.process
def test_logs_and_exit_codes_arrive_and_secrets_are_not_shown(head, tree):
    for code in (0, 7):
        returned, out, err = head.run(tree, str(code), "a b", "x.y='z'", **KEYS)
        assert returned == code, err
        assert f"arguments ['{code}', 'a b', \"x.y='z'\"]" in out
        assert "colour teal secret 56789-yek" in out
        assert "key-98765" not in out + err and "WANDB_API_KEY=<redacted>" in err
        assert f":{head.port} alpha 0.25" in out  # RAY_ADDRESS names the cluster that the job runs on
    assert "packed 5 files" in err and "data/big.bin (21 MiB)" in err
    returned, out, _ = head.run(tree, "0", "--no-wait", **KEYS)
    assert returned == 0 and out.startswith("raysubmit_") and out.count("\n") == 1


@pytest.mark.slow
@pytest.mark.process
def test_a_missing_token_is_one_message(head, tree):
    returned, _, err = head.run(tree, "0", **KEYS, RAY_AUTH_MODE="disabled")
    assert returned == 1 and "refuses the request without its token: set RAY_AUTH_MODE=token" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_stops_the_job_after_it_has_saved(head, tree):
    for again in (False, True):
        process = head.start(tree, "0", "wait", **KEYS)
        assert any(line.startswith("waits") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        if again:
            time.sleep(1)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130 and "the training finishes its step and saves" in err, err
        assert ("saved" in out, ": STOPPED" in err, "runs to its end" in err) == (not again, not again, again)


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
        returned, out, err = head.run(ROOT, *options, **env)
    assert returned == 0, out[-3000:] + err
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
