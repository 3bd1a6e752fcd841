"""Loggers: lines on the console, a file that a resumed run continues, optional services."""

import importlib.util
import json
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch

from tests.helpers.logs import logged
from verl.utils.tracking import Tracking, ValidationGenerationsLogger, plain_number


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT", "TENSORBOARD_DIR"):
        monkeypatch.delenv(name, raising=False)


def lines(path="p/e.jsonl"):
    with open(path) as file:
        return [json.loads(line) for line in file]


def run(*entries):
    """One process's worth of logging: (step, data) in order."""
    tracking = Tracking("p", "e", "file")
    for step, data in entries:
        tracking.log(data, step)
    tracking.finish()


def test_the_console_shows_the_headlines_and_the_validation_only(capsys):
    data = {"critic/score/mean": 0.5, "actor/pg_loss": -1 / 3, "perf/mfu": 1.0, "timing_s/step": 4.25,
            "val-core/x/acc/mean@1": 0.75}  # fmt: skip
    Tracking("p", "e").log(data, step=2)
    assert capsys.readouterr().out == "step 2  reward 0.5  loss -0.3333  seconds 4.25  val-core/x/acc/mean@1 0.75\n"


def test_file_path_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "root"))
    run((1, {"a": 1}))
    assert lines(tmp_path / "root/p/e.jsonl")[0]["step"] == 1
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "own/place.jsonl"))
    run((1, {"a": 1}))
    assert lines(tmp_path / "own/place.jsonl")[0]["step"] == 1


def test_steps_done_again_replace_what_the_killed_run_left():
    run((0, {"val": 1}), (1, {"a": 1}), (2, {"a": 2}), (3, {"a": 30}))
    with open("p/e.jsonl", "a") as file:
        file.write('{"step": 4, "da')  # killed while writing
    run((3, {"a": 3}), (4, {"a": 4}))
    assert [(line["step"], *line["data"].values()) for line in lines()] == [(0, 1), (1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_new_run_keeps_the_file_of_the_former_one():
    run((1, {"a": 1}), (2, {"a": 2}))
    run((1, {"a": 3, "n": np.float32(0.5)}))
    assert lines() == [{"step": 1, "data": {"a": 3, "n": 0.5}}]
    assert [line["data"]["a"] for line in lines("p/e.1.jsonl")] == [1, 2]


def test_a_validation_before_resuming_keeps_that_steps_metrics():
    run((1, {"a": 1}), (2, {"a": 2, "val": 5}), (3, {"a": 3}))
    run((2, {"val": 5}), (3, {"a": 3}))
    assert [line["step"] for line in lines()] == [1, 2, 2, 3]
    assert lines()[1]["data"] == {"a": 2, "val": 5}


def test_tensorboard_writes_scalars():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = Tracking("p", "e", ["tensorboard"])
    tracking.log({"actor/loss": 0.5, "text": "no"}, step=3)
    tracking.finish()
    events = EventAccumulator("tensorboard_log/p/e").Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/loss")] == [(3, 0.5)]


def test_backend_argument_picks_one(capsys):
    tracking = Tracking("p", "e", ["console", "file"])
    tracking.log({"a": 1}, step=1, backend="file")
    tracking.finish()
    assert capsys.readouterr().out == "" and len(lines()) == 1


def test_unknown_logger_names_the_nearest():
    with pytest.raises(ValueError, match=r"trainer.logger='tensorbord' is unknown; did you mean 'tensorboard'\?"):
        Tracking("p", "e", ["console", "tensorbord"])


def test_a_missing_package_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match="pip install mlflow"):
        Tracking("p", "e", "mlflow")


@pytest.mark.parametrize("folder", [False, True], ids=["nothing", "folder_of_earlier_runs"])
def test_the_console_replaces_wandb_where_it_is_not_installed(folder, monkeypatch, capsys, tmp_path):
    if folder:
        (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for backends in (["console", "wandb"], "wandb"):
        Tracking("p", "e", backends).log({"a": 1}, step=1)
        assert capsys.readouterr().out == "step 1  a 1\n"


def test_generations_go_where_text_fits_and_skip_wandb_where_it_is_not_installed(monkeypatch, tmp_path):
    logger = ValidationGenerationsLogger("p", "e")
    logger.log(["console", "file", "tensorboard"], [["in", "out", torch.tensor(1.0)]], step=4)
    assert lines("p/e.generations.jsonl") == [{"step": 4, "input": "in", "output": "out", "score": 1.0}]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    logger.log(["console", "wandb", "file"], [["question", "answer", 1.0]], 3)
    logger.log("file", [["question", "answer", 0.0]], 4)
    assert [row["step"] for row in lines(tmp_path / "metrics.generations.jsonl")] == [3, 4]


def test_vemlp_wandb_signs_in_first(monkeypatch):
    calls = []
    service = SimpleNamespace(init=lambda **kw: calls.append(kw["name"]), log=None, finish=None)
    monkeypatch.setitem(sys.modules, "volcengine_ml_platform", SimpleNamespace(init=lambda **kw: calls.append(kw)))
    monkeypatch.setitem(sys.modules, "volcengine_ml_platform.wandb", service)
    with pytest.raises(ValueError, match="VOLC_ACCESS_KEY_ID and VOLC_SECRET_ACCESS_KEY"):
        Tracking("p", "e", "vemlp_wandb")
    for name in ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION"):
        monkeypatch.setenv(name, name.lower())
    with monkeypatch.context() as without:  # the service and its package have different names
        without.setitem(sys.modules, "volcengine_ml_platform", None)
        with pytest.raises(ImportError, match="or take the service out of trainer.logger"):
            Tracking("p", "e", "vemlp_wandb")
    with logged() as warnings:
        Tracking("p", "e", "vemlp_wandb")
    keys = {"ak": "volc_access_key_id", "sk": "volc_secret_access_key", "region": "mlp_tracking_region"}
    assert calls == [keys, "e"] and warnings == []


RUN = {"project": "p", "config": {"lr": 1}}
LOGGED = ({"a": 1}, [call.log({"a": 1}, step=2), call.finish()])
TASK = call.Task.init()
SCALAR = TASK.get_logger().report_scalar
SERVICES = {  # name: (what is logged, calls of the package)
    "wandb": (LOGGED[0], [call.init(name="e", **RUN), *LOGGED[1]]),
    "trackio": (LOGGED[0], [call.init(name="e", **RUN), *LOGGED[1]]),
    "swanlab": (LOGGED[0], [call.init(experiment_name="e", **RUN), *LOGGED[1]]),
    "mlflow": ({"val-core/x/mean@4": 1.0, "train/time(s)": 2.0}, [
        call.set_experiment("p"), call.start_run(run_name="e"), call.log_dict({"lr": 1}, "config.json"),
        call.log_metrics({"val-core/x/mean_at_4": 1.0, "train/time_s_": 2.0}, step=2), call.end_run(),
    ]),
    "clearml": ({"actor/pg/loss": 0.5, "step": 2}, [
        call.Task.init(project_name="p", task_name="e", continue_last_task=True, output_uri=False),
        TASK.connect_configuration({"lr": 1}, name="config"), TASK.get_logger(),
        SCALAR(title="actor/pg", series="loss", value=0.5, iteration=2),
        SCALAR(title="step", series="step", value=2, iteration=2), TASK.close(),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVICES)
def test_services_get_project_run_and_metrics(monkeypatch, name):
    package, (data, calls) = MagicMock(), SERVICES[name]
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=f"{name}/__init__.py"))
    tracking = Tracking("p", "e", name, config={"lr": 1})
    tracking.log(data, step=2)
    tracking.finish()
    assert package.mock_calls == calls


def test_plain_numbers():
    scalars = (1, 2.5, np.int64(3), torch.tensor([4.0]), np.array([5.0]))
    assert [plain_number(x) for x in scalars] == [1, 2.5, 3, 4.0, 5.0]
    assert [plain_number(x) for x in ("1", None, [1], torch.zeros(2), np.array(["x"]))] == [None] * 5
