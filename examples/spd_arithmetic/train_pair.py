"""Target and draft trained side by side in worker processes, and kept for the next time."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from loguru import logger
from transformers.utils.logging import disable_progress_bar

from examples.spd_arithmetic import train_models
from examples.spd_arithmetic.model import export
from examples.spd_arithmetic.tokenizer import Encoder
from examples.spd_arithmetic.workers import Workers, say

HERE = Path(__file__).parent
CODE = ("corpus.py", "tokenizer.py", "model.py", "../muon.py", "train_models.py")
#: Settings of the test bed's models by the names of prepare_blocks' options. With these, which fit_testbed found, its
#: mismatches are like those of Qwen2.5-Coder-1.5B-Instruct and the 0.5B model as its draft on GSM8K.
DEFAULTS = {"softness": 0.03, "draft_softness": 0.0004, "draft_house_share": 0.75, "target_steps": 1000,
            "draft_steps": 400}  # fmt: skip
REPORT_EVERY = 5
Report = Callable[..., None]
"""Called with (done, in all, label)."""


@dataclass(frozen=True)
class Job:
    """Everything that the weights of one model depend on, besides the code."""

    role: str  # target or draft
    steps: int
    seed: int
    softness: float = 0.0  # of the target
    draft_softness: float = 0.0  # of the target, for the draft's favourite wordings
    house_share: float = 0.0  # of the draft's wordings

    @property
    def fingerprint(self) -> str:
        """Name of the trained model in the cache."""
        digest = hashlib.sha256(json.dumps([asdict(self), torch.__version__]).encode())
        for name in CODE:
            digest.update((HERE / name).read_bytes())
        return f"{self.role}-{digest.hexdigest()[:12]}"


def train_pair(out: Path, cache: Path, jobs: list[Job], workers: Workers, report: Report) -> None:
    """Write out/<role> for every job, from the cache where it holds that model, else trained."""
    missing = [job for job in jobs if not (cache / job.fingerprint).exists()]
    for job in jobs:
        if job not in missing:
            logger.info("{} was trained before with the same settings and code: reused", job.fingerprint)
    workers.run([partial(train_one, job, cache) for job in missing],
                lambda job, done: report(done, job.steps, job.role))
    for job in jobs:
        shutil.copytree(cache / job.fingerprint, out / job.role, dirs_exist_ok=True)


def train_one(job: Job, cache: Path) -> None:
    """In a worker: train the job's model and publish it in the cache."""
    disable_progress_bar()  # its lines would cross those of the command
    encoder = Encoder()

    def tell(step: int, loss: float) -> None:
        if step % REPORT_EVERY == 0 or step == job.steps:
            say(job, step)

    if job.role == "target":
        config = train_models.target_config(len(encoder.tokens), job.steps, train_models.TARGET_MUON_LR)
        soft = (job.softness, job.draft_softness)
        model = train_models.train(config, lambda rng: train_models.target_row(rng, encoder, *soft), job.seed, tell)
    else:
        config = train_models.draft_config(len(encoder.tokens), job.steps)
        model = train_models.train(config, lambda rng: train_models.draft_row(rng, encoder, job.house_share),
                                   job.seed, tell)
    publish(model, cache / job.fingerprint)


def publish(model: train_models.SmallLlama, directory: Path) -> None:
    """Export the model so that its folder exists only when it is complete."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    export(model, partial)
    os.replace(partial, directory)
