"""SIGKILL of a refinement job in the middle, then the same command, or a run from one of its checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from omegaconf import OmegaConf

from tests.dllm_reasoning import runs
from tests.dllm_reasoning.test_trainer import rows_of
from tests.helpers.configs import compose_ppo
from tests.helpers.watched_runs import family, wait_until
from verl.utils.checkpoint.publish import published_steps

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVED = 30, 4  # an epoch is 5 steps: the first checkpoint lies within one, and the run crosses several


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    runs.leave_group()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Model and data; the model's forward draws random numbers, so that a resume must restore them."""
    folder = tmp_path_factory.mktemp("dllm")
    model = Path(runs.save_model(folder / "model"))
    config = json.loads((model / "config.json").read_text()) | {"attention_dropout": 0.1}
    (model / "config.json").write_text(json.dumps(config))
    return str(model), runs.save_rows(folder / "train.parquet", runs.sums(40))


def settings(place, folder, *more):
    model, train = place
    return (
        f"model.partial_pretrain={model}", f"data.train_files={train}", f"data.val_files={train}",
        f"trainer.default_local_dir={folder}", "model.fsdp_config.dtype=float32", "data.max_length=24",
        "data.train_batch_size=8", "data.micro_batch_size_per_gpu=4", "trainer.device=cpu",
        "trainer.n_gpus_per_node=1", "trainer.logger=[]", "trainer.report=false", "trainer.test_freq=7",
        f"trainer.total_training_steps={STEPS}", f"trainer.save_checkpoint_steps={SAVED}", "optim.lr=1e-2",
        "iterative.noise_pattern=packed", "iterative.num_iterations=2", "iterative.ar_loss_weight=1",
        "iterative.block_length=4", "iterative.windows_per_sample=3", "trainer.seed=3", "iterative.noise_seed=5", *more,
    )  # fmt: skip


def started(place, folder):
    """The job as a user starts it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc_per_node=1"]
    folder.mkdir(exist_ok=True)
    with open(folder / "told", "w") as told:
        return subprocess.Popen(
            [*launcher, "-m", "dllm_reasoning.train_iterative_refine", *settings(place, folder)], cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=told, stderr=subprocess.STDOUT,
        )  # fmt: skip


def trainer_in(place, folder, *more):
    """The same run in this process."""
    config = compose_ppo(*settings(place, folder, *more), config_dir=runs.CONFIG_DIR, config_name="iterative_refine")
    OmegaConf.resolve(config)
    return runs.trainer_of(config)


@pytest.mark.slow
def test_a_killed_job_goes_on_bit_for_bit_by_itself_and_by_path(place, tmp_path):
    cut = tmp_path / "cut"
    job = started(place, cut)
    wait_until(lambda: SAVED in published_steps(cut), job, cut / "told")
    processes = family(job.pid)
    for process in processes:
        process.kill()
    job.wait()
    assert psutil.wait_procs(processes[1:], timeout=10)[1] == []
    assert rows_of(cut)[-1][0] < STEPS
    job = started(place, cut)
    assert job.wait(timeout=300) == 0, (cut / "told").read_text()[-3000:]

    alone = trainer_in(place, tmp_path / "alone")
    alone.fit()
    wanted, rows = runs.weights(alone), rows_of(tmp_path / "alone")
    assert len(rows) == STEPS and rows_of(cut) == rows
    runs.leave_group()
    for step, folder in ((STEPS, cut), (SAVED, tmp_path / "path")):  # what the job left; and trained on from there
        by_path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={cut / f'global_step_{step}'}")
        again = trainer_in(place, folder, *by_path)
        again.fit()
        assert again.global_steps == STEPS
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in runs.weights(again).items())
        runs.leave_group()
    assert rows_of(tmp_path / "path") == rows[SAVED:]
