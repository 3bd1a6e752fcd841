"""A refinement run that dies midway, then the same command, or a run from one of its checkpoints: bit for bit.

The run dies in this process here, and by SIGKILL of a torchrun job in `make chaos`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from dllm_reasoning.trainer.iterative_refine_trainer import IterativeRefineTrainer
from tests.dllm_reasoning import runs
from tests.dllm_reasoning.test_trainer import rows_of
from tests.helpers.watched_runs import family, wait_until
from verl.training.checkpoint.publish import published_steps

ROOT = Path(__file__).resolve().parents[2]
SAVED = 4  # an epoch is 5 steps: the first checkpoint lies within one, and the run crosses several


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Model and data; the model's forward draws random numbers, so that a resume must restore them."""
    folder = tmp_path_factory.mktemp("dllm")
    model = Path(runs.save_model(folder / "model"))
    config = json.loads((model / "config.json").read_text()) | {"attention_dropout": 0.1}
    (model / "config.json").write_text(json.dumps(config))
    return str(model), runs.save_rows(folder / "train.parquet", runs.sums(40))


def settings(assets, folder, steps, *more):
    return (
        *runs.small(*assets, folder), f"data.val_files={assets[1]}", "trainer.test_freq=7",
        f"trainer.total_training_steps={steps}", f"trainer.save_checkpoint_steps={SAVED}",
        "iterative.noise_pattern=packed", "iterative.num_iterations=2", "iterative.ar_loss_weight=1",
        "trainer.seed=3", "iterative.noise_seed=5", *more,
    )  # fmt: skip


def trainer_in(assets, folder, steps, *more, cls=IterativeRefineTrainer):
    return runs.trainer(*assets, folder, *settings(assets, folder, steps, *more), cls=cls)


def check_continues(assets, tmp_path, cut, steps, resume):
    """`resume()` completes the run in `cut`; its rows and weights, and those of a run from its first checkpoint, are
    those of an undisturbed run."""
    alone = trainer_in(assets, tmp_path / "alone", steps)
    alone.fit()
    expected, rows = runs.weights(alone), rows_of(tmp_path / "alone")
    resume()
    assert [row[0] for row in rows] == [*range(steps + 1)] and rows_of(cut) == rows
    for step, folder in ((steps, cut), (SAVED, tmp_path / "path")):  # the finished run; trained on from there
        by_path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={cut / f'global_step_{step}'}")
        again = trainer_in(assets, folder, steps, *by_path)
        again.fit()
        assert again.global_steps == steps
        assert all(torch.equal(tensor, expected[name]) for name, tensor in runs.weights(again).items())
    assert rows_of(tmp_path / "path") == rows[SAVED + 1 :]


class DiesAtTen(IterativeRefineTrainer):
    def step_inputs(self, batch):
        if self.global_steps == 10:
            raise RuntimeError("dies")
        return super().step_inputs(batch)


def test_a_run_that_died_continues_bit_for_bit(assets, tmp_path):
    cut = tmp_path / "cut"
    with pytest.raises(RuntimeError, match="dies"):
        trainer_in(assets, cut, 12, cls=DiesAtTen).fit()
    assert rows_of(cut)[-1][0] == 9 and published_steps(cut) == [4, 8]

    check_continues(assets, tmp_path, cut, 12, lambda: trainer_in(assets, cut, 12).fit())


@pytest.mark.chaos
@pytest.mark.slow
def test_a_killed_job_continues_bit_for_bit(assets, tmp_path):
    cut, steps = tmp_path / "cut", 30
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc_per_node=1"]
    command = [*launcher, "-m", "dllm_reasoning.train_iterative_refine", *settings(assets, cut, steps)]
    cut.mkdir()

    def start():
        with open(cut / "log", "w") as log:
            return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log,
                                    stderr=subprocess.STDOUT)  # fmt: skip

    job = start()
    wait_until(lambda: SAVED in published_steps(cut), job, cut / "log")
    processes = family(job.pid)
    for process in processes:
        process.kill()
    job.wait()
    assert psutil.wait_procs(processes[1:], timeout=10)[1] == []
    assert rows_of(cut)[-1][0] < steps

    def resume():
        assert start().wait(timeout=300) == 0, (cut / "log").read_text()[-3000:]

    check_continues(assets, tmp_path, cut, steps, resume)
