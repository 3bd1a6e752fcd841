"""Submit train_spd_scorer.py to a Ray cluster's job server (started by scripts/submit_spd.sh).

    scripts/submit_spd.sh [http://HEAD:8265] [options] TRAINING OPTIONS... [key=value ...]

Every other option goes to train_spd_scorer.py. Data, models and the output folder must be visible to the cluster: name
them by absolute paths on storage that its nodes share. Relative paths count from the repository and work for what is
packed. Ctrl-C stops the job: the training finishes its step and saves; a second Ctrl-C leaves it to itself.
Exit code: the training's own; 130 for a stopped job.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from verl.utils.redact import redact, redact_command, redact_text  # noqa: E402

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

MIB = 2**20
LARGEST_FILE_MIB = 20
LARGEST_PACKAGE_MIB = 100  # what a job server takes in one request
# Not packed, like hidden files (.git, .venv, caches, .env with its secrets).
LEFT_OUT = ("outputs", "checkpoints", "tensorboard_log", "wandb", "build", "__pycache__", "*.egg-info")
FORWARDED = ("MODEL_PATH", "TOKENIZER_PATH", "ADAPTER_PATH", "LOGURU_LEVEL", "TENSORBOARD_DIR")
FORWARDED_PREFIXES = ("SPD_", "REWARD_", "VERL_", "HF_", "WANDB_", "MLFLOW_", "SWANLAB_", "TRACKIO_")
# Inputs and results of the job: options and keys of train_spd_scorer.py, and the variables that may replace them.
INPUTS = {
    "--blocks": None, "--metadata": None, "--val-blocks": None, "--val-metadata": None, "--model": "MODEL_PATH",
    "--tokenizer": "TOKENIZER_PATH", "spd.adapter_path": "ADAPTER_PATH", "spd.target_path": None,
    "spd.rollout.draft_path": None,
}  # fmt: skip
RESULTS = ("--output-dir", "spd.rollout.store_path")
STOP_WAIT_S = "600"  # a step and its checkpoint; Ray's own 3 s would kill the training in the middle of them
EXIT_STOPPED = 130


def package_files(extra: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Files of the working directory to pack, and those too large ("path (MiB)").

    `extra` names files or folders, relative to the repository, that are packed whatever they are.
    """
    files, too_big = set(), []
    for path in _walk(ROOT):
        if path.stat().st_size > LARGEST_FILE_MIB * MIB:
            too_big.append(f"{path.relative_to(ROOT)} ({path.stat().st_size / MIB:.0f} MiB)")
        else:
            files.add(path)
    for name in extra:
        path = Path(os.path.normpath(ROOT / name))
        if not path.is_relative_to(ROOT) or not path.exists():
            raise SystemExit(f"--pack {name}: the path does not exist in {ROOT}.")
        files.update(p for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())
    return sorted(files), too_big


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(".") or any(path.match(pattern) for pattern in LEFT_OUT) or path.is_symlink():
            continue
        if path.is_dir():
            if not (path / "pyvenv.cfg").exists():  # a virtual environment
                yield from _walk(path)
        elif path.is_file():
            yield path


def write_package(files: Sequence[Path], package: Path) -> int:
    """Zip the files; returns the size in bytes. Exits if it exceeds the limit of job servers."""
    with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in files:
            archive.write(path, path.relative_to(ROOT))
    size = package.stat().st_size
    if size > LARGEST_PACKAGE_MIB * MIB:
        biggest = max(files, key=lambda path: path.stat().st_size).relative_to(ROOT)
        raise SystemExit(
            f"the package has {size / MIB:.0f} MiB (its biggest file: {biggest}), a job server takes "
            f"{LARGEST_PACKAGE_MIB}; leave it on storage that the cluster sees and name it by its absolute path."
        )
    return size


def check_paths(training: Sequence[str], environment: dict[str, str], files: Sequence[Path]) -> list[str]:
    """The absolute paths. Exits for relative paths that the job could not read, or whose results would be lost."""
    options = argparse.ArgumentParser(add_help=False)
    for option in (*INPUTS, *RESULTS):
        if option.startswith("--"):
            options.add_argument(option, dest=option)
    parsed, settings = options.parse_known_args(training)
    given = vars(parsed) | dict(text.lstrip("+").split("=", 1) for text in settings if "=" in text)
    packed, absolute = set(files), []
    for option in (*INPUTS, *RESULTS):
        variable = INPUTS.get(option)
        value = given.get(option) or environment.get(variable or "")
        if not value:
            continue
        if os.path.isabs(value):
            absolute.append(value)
        elif option in RESULTS:
            raise SystemExit(
                f"{option} {value}: the job's working directory is deleted after it; give an absolute path on storage "
                "that the cluster sees."
            )
        else:
            path = Path(os.path.normpath(ROOT / value))
            needed = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
            for missing in [p for p in needed if p not in packed][:1]:
                raise SystemExit(
                    f"{option} {value}: {os.path.relpath(missing, ROOT)} is not packed; put it on storage that the "
                    f"cluster sees and give its absolute path, or add --pack {value}."
                )
    return absolute


def job_environment(more: Sequence[str]) -> dict[str, str]:
    """Environment variables for the job: those that the training reads, and `more` by name."""
    if unset := [name for name in more if name not in os.environ]:
        raise SystemExit(f"--env {unset[0]}: this variable is not set here.")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in FORWARDED or name in more or name.startswith(FORWARDED_PREFIXES)
    }
    # The training gives its workers LOGURU_LEVEL and VERL_* too, which Ray takes for a conflict with the job's own.
    environment["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
    environment["RAY_JOB_STOP_WAIT_TIME_S"] = os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", STOP_WAIT_S)
    return environment


def connect(address: str) -> JobSubmissionClient:
    """A client of the job server at `address`. Exits if it does not answer or requires a token."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    logging.disable(logging.INFO)  # Ray's own lines about uploads and sockets
    # Ray's environment variables override the address argument.
    os.environ["RAY_API_SERVER_ADDRESS"] = address
    try:
        return JobSubmissionClient(address)
    except AuthenticationError:
        raise SystemExit(
            f"the job server at {address} refuses the request without its token: set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH where the token is not in ~/.ray/auth_token."
        ) from None
    except (ConnectionError, RuntimeError) as error:
        raise SystemExit(
            f"no job server answers at {address} ({str(error).splitlines()[0]}); start the cluster with `ray start "
            "--head --include-dashboard=true`, or forward its port 8265."
        ) from None


def submit(client: JobSubmissionClient, command: Sequence[str], environment: dict[str, str], package: Path) -> str:
    """Upload the package and start the command; returns the job's id."""
    runtime_env = {"working_dir": str(package), "env_vars": environment}
    return client.submit_job(entrypoint=shlex.join(command), runtime_env=runtime_env)


def follow(client: JobSubmissionClient, job: str) -> JobDetails:
    """Copy the job's log to standard output until the job has ended; the first signal stops the job."""

    def on_signal(number: int, frame: Any) -> None:
        # A second one interrupts the wait.
        signal.signal(number, signal.default_int_handler)
        say(f"stopping {job}: the training finishes its step and saves; {signal.Signals(number).name} again to leave")
        client.stop_job(job)

    async def copy_log() -> None:
        async for text in client.tail_job_logs(job):
            sys.stdout.write(text)
            sys.stdout.flush()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    asyncio.run(copy_log())
    while not (details := client.get_job_info(job)).status.is_terminal():
        time.sleep(0.5)
    return details


def exit_code(details: JobDetails) -> int:
    """The training's exit code; 128 + n if signal n killed it, 130 for a stopped job, 1 if unknown."""
    code = details.driver_exit_code
    if details.status == "STOPPED":
        return EXIT_STOPPED
    if code is None:
        if details.status == "SUCCEEDED":
            return 0
        say(f"the job has no exit code: {details.message}")
        return 1
    return 128 - code if code < 0 else code


def say(text: str) -> None:
    """Print a message to standard error, without secrets; standard output has the job's log only."""
    sys.stderr.write(f"[submit] {redact_text(text)}\n")
    sys.stderr.flush()


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the remaining arguments for the training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="scripts/submit_spd.sh [http://HEAD:8265] [options] training options",
    )  # fmt: skip
    parser.add_argument("--python", default="python", help="interpreter on the cluster (default: its PATH's python)")
    parser.add_argument("--pack", action="append", default=[], metavar="PATH", help="pack this too, whatever it is")
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="hand this variable on too")
    parser.add_argument("--no-wait", action="store_true", help="submit, print the job's id on standard output, return")
    argv = list(sys.argv[1:] if argv is None else argv)
    given = argv.pop(0) if argv and "://" in argv[0] and "=" not in argv[0] else os.environ.get("RAY_ADDRESS", "")
    args, training = parser.parse_known_args(argv)
    if not given.startswith(("http://", "https://")):
        parser.error(f"name the job server, http://HEAD:8265, as first argument or in RAY_ADDRESS (it is {given!r})")
    args.address = given.rstrip("/")
    return args, training


def main(argv: Sequence[str] | None = None) -> int:
    """Pack, submit, follow; returns the exit code."""
    args, training = parse(argv)
    environment = job_environment(args.env)
    files, too_big = package_files(args.pack)
    absolute = check_paths(training, environment, files)
    client = connect(args.address)
    with tempfile.TemporaryDirectory(prefix="verl-submit-") as folder:
        package = Path(folder) / "working_dir.zip"
        size = write_package(files, package)
        say(f"packed {len(files)} files of {ROOT}: {size / MIB:.1f} MiB; left out: hidden files, {', '.join(LEFT_OUT)}")
        if too_big:
            say(f"left out, above {LARGEST_FILE_MIB} MiB: {', '.join(too_big)} (--pack adds one)")
        if absolute:
            say(f"the cluster must see {', '.join(absolute)}")
        say("environment: " + " ".join(f"{name}={value}" for name, value in sorted(redact(environment).items())))
        command = [args.python, "train_spd_scorer.py", *training]
        job = submit(client, command, environment, package)
    say(f"{job} at {args.address}: {shlex.join(redact_command(command))}")
    say(f"elsewhere: ray job logs --follow {job}, ray job stop {job} (with --address {args.address})")
    if args.no_wait:
        print(job)
        return 0
    try:
        details = follow(client, job)
    except KeyboardInterrupt:
        say(f"{job} runs to its end; ray job status {job} shows the result")
        return EXIT_STOPPED
    except (OSError, RuntimeError, aiohttp.ClientError) as error:
        raise SystemExit(f"the connection to {args.address} broke off ({error}); {job} runs on by itself.") from error
    say(f"{job}: {details.status}")
    return exit_code(details)


if __name__ == "__main__":
    sys.exit(main())
