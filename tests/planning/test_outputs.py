"""What a command is to write to is tried before work begins: the message names the key and the path."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.configs import compose_ppo
from tests.helpers.disks import leave_free, small_disk
from tests.helpers.rl_run import overrides
from verl.config.compose import to_settings
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTTrainerConfig
from verl.model_merger.__main__ import parse_args
from verl.planning.checks import check_outputs, check_written
from verl.planning.ppo import check_files_of_the_run
from verl.utils.fs import check_writable
from verl.utils.problems import ABSENT, WRONG


@pytest.fixture
def file(tmp_path):
    (tmp_path / "taken").write_text("x")
    return tmp_path / "taken"


def said(problems):
    return [(p.kind, p.key, p.message) for p in problems]


def test_a_folder_that_can_be_made_leaves_nothing_behind(tmp_path):
    for is_folder in (True, False):
        check_writable(tmp_path / "not" / "there", is_folder)
    check_writable(tmp_path, True)
    check_writable("/dev/null", False)
    assert not any(tmp_path.iterdir())


def test_something_of_another_kind_is_in_the_way(tmp_path, file):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for path, there in ((file, file), (file / "a" / "b", file), (tmp_path / "link", tmp_path / "link")):
        text = f"k: {path} cannot be written: {there} is not a folder. Name another folder."
        assert said(check_written("k", path)) == [(WRONG, "k", text)]
    text = f"k: {tmp_path} cannot be written: {tmp_path} is a folder, not a file. Name another file."
    assert said(check_written("k", tmp_path, is_folder=False)) == [(WRONG, "k", text)]
    assert not [*check_written("k", file, is_folder=False)]
    assert not [*check_written("k", None)] and not [*check_written("k", "hdfs://host/folder")]


def test_a_place_that_nobody_can_write_to_is_absent():
    ((kind, _, text),) = said(check_written("k", "/proc/verl/run"))
    assert kind == ABSENT and text.startswith("k: /proc/verl/run cannot be written: /proc: ")
    ((kind, _, text),) = said(check_written("k", "/tmp/" + "x" * 300))
    assert kind == ABSENT and "File name too long" in text


@pytest.mark.process
def test_a_full_disk_is_absent(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        assert not [*check_written("k", disk / "run")]
        leave_free(disk, 0)
        ((kind, _, text),) = said(check_written("k", disk / "run"))
        assert kind == ABSENT and f"{disk}: No space left on device" in text


def test_every_training_tries_its_folders_and_the_files_of_its_trackers(tmp_path, file, monkeypatch):
    sound = SFTTrainerConfig(default_local_dir=str(tmp_path / "run"), logger=["file", "console", "tensorboard"])
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "logs"))
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board"))
    assert not said(check_outputs(sound))
    broken = replace(sound, default_local_dir=str(file), default_hdfs_dir=str(file / "copies"))
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(file))
    monkeypatch.setenv("TENSORBOARD_DIR", str(file))
    keys = ["trainer.default_local_dir", "trainer.default_hdfs_dir", "trainer.logger", "trainer.logger"]
    assert [key for _, key, _ in said(check_outputs(broken))] == keys
    text = f"trainer.logger=tensorboard ($TENSORBOARD_DIR): {file} cannot be written"
    assert text in said(check_outputs(broken))[-1][2]


def test_an_rl_run_tries_what_its_settings_ask_for(tmp_path, file):
    always = {"trainer.rollout_data_dir": file, "trainer.validation_data_dir": file,
              "ray_kwargs.timeline_json_file": tmp_path}  # fmt: skip
    rollout = "actor_rollout_ref.rollout"
    enabled = {f"{rollout}.skip_dump_dir": (file, f"{rollout}.skip_rollout=true"),
               f"{rollout}.prometheus.file": (tmp_path, f"{rollout}.prometheus.enable=true"),
               "global_profiler.save_path": (file, "global_profiler.steps=[1]"),
               "actor_rollout_ref.actor.profiler.save_path": (
                   file / "a", "actor_rollout_ref.actor.profiler.enable=true")}  # fmt: skip
    given = [f"{key}={value}" for key, value in (always | {k: v for k, (v, _) in enabled.items()}).items()]

    def keys(*more):
        config = to_settings(compose_ppo(*overrides(tmp_path / "data", "model"), *given, *more), PPOConfig)
        return [problem.key for problem in check_files_of_the_run(config)]

    assert keys() == [*always]
    assert keys(*(switch for _, switch in enabled.values())) == [*always, *enabled]


def test_an_option_of_a_command_line_is_refused_by_its_name(tmp_path, file, capsys):
    with pytest.raises(SystemExit):
        parse_args(["merge", "--local_dir", str(tmp_path), "--target_dir", str(file)])
    text = f"argument --target_dir: {file} cannot be written: {file} is not a folder. Name another."
    assert text in capsys.readouterr().err
    args = parse_args(["merge", "--local_dir", str(tmp_path), "--target_dir", "~/merged"])
    assert args.target_dir == Path.home() / "merged"
