"""A dry run compares memory and disk space with those of the machine."""

import shutil
from types import SimpleNamespace

import psutil
import pytest
from transformers import AutoConfig

from tests.helpers.disks import leave_free, small_disk
from verl.config.engine import FSDPEngineConfig
from verl.config.sft import SFTTrainerConfig
from verl.planning.machine import GIB, check_disk, check_memory, checkpoint_bytes
from verl.planning.memory_estimate import measure_model
from verl.training.host_memory import available_memory
from verl.utils.problems import ABSENT, UNUSED

MIB = 2**20


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_available_memory_is_the_machines_or_what_a_cgroup_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9 * GIB))
    write(tmp_path / "proc/self", cgroup="0::/a/b")
    assert available_memory(tmp_path) == 9 * GIB
    home = tmp_path / "sys/fs/cgroup/a"
    write(home, memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=f"anon 1\ninactive_file {2 * GIB}")
    write(home / "b", memory__max="max", memory__current=GIB, memory__stat="inactive_file 0")
    assert available_memory(tmp_path) == 3 * GIB  # the outer group's: 4 - (3 - 2)
    write(home / "b", memory__max=GIB)
    assert available_memory(tmp_path) == 0
    write(tmp_path / "proc/self", cgroup="9:cpu:/\n4:memory:/host/path")  # version 1, within a container
    write(tmp_path / "sys/fs/cgroup/memory", **{"memory__limit_in_bytes": 2 * GIB, "memory__usage_in_bytes": GIB,
                                                "memory__stat": f"total_inactive_file {GIB // 2}"})  # fmt: skip
    assert available_memory(tmp_path) == 3 * GIB // 2


def test_memory_that_is_missing_is_a_problem_and_little_memory_a_warning(monkeypatch):
    monkeypatch.setattr("verl.planning.machine.available_memory", lambda: 10 * GIB)
    remedies = {"a.b": "set a.b=true", "c": "lower c"}
    (problem,) = check_memory(11 * GIB, "2 ranks", remedies)
    assert (problem.kind, problem.key) == (ABSENT, "a.b")
    text = "2 ranks need about 11.0 GiB of memory, and this machine has 10.0 GiB available."
    assert problem.message == f"{text} To need less: set a.b=true, lower c."
    (problem,) = check_memory(8 * GIB, "2 ranks", remedies)
    assert problem.kind == UNUSED and "10.0 GiB available, which may be too little" in problem.message
    assert not [*check_memory(6 * GIB, "2 ranks", remedies)]


def run(folder, **more):
    return SFTTrainerConfig(default_local_dir=str(folder), **{"save_freq": 10, **more})


def problems(trainer, one, steps):
    return [(p.kind, p.message) for p in check_disk(trainer, one, steps, "max_ckpt_to_keep", "trainer.save_contents")]


@pytest.mark.process
def test_the_disk_needs_room_for_the_checkpoints_that_exist_at_the_same_time(tmp_path):
    with small_disk(tmp_path / "disk", "64m") as disk:
        folder = disk / "not" / "there"
        assert shutil.disk_usage(disk).free == 64 * MIB
        assert not problems(run(folder), 10 * MIB, 50)  # 5 x 10 of 64
        ((kind, text),) = problems(run(folder), 10 * MIB, 51)  # the last step is saved as well
        assert kind == UNUSED and "up to 6 checkpoints of 0.01 GiB at a time, and 0.06 GiB are free" in text
        ((kind, text),) = problems(run(folder), 10 * MIB, 70)
        assert kind == ABSENT and "Lower trainer.max_ckpt_to_keep, leave parts out of trainer.save_contents" in text
        assert not problems(run(folder, max_ckpt_to_keep=3), 10 * MIB, 1000)  # 3, and the one that is written
        ((kind, text),) = problems(run(folder, max_ckpt_to_keep=1), 33 * MIB, 1000)
        assert kind == ABSENT and "Free some space" in text
        assert not problems(run(folder, save_freq=-1), 33 * MIB, 1000)  # one at the end
        assert not problems(run(folder, save_freq=0), 99 * MIB, 1000)
        for step in range(10, 50, 10):
            (folder / f"global_step_{step}").mkdir(parents=True)
        leave_free(disk, 40 * MIB)
        assert not problems(run(folder), 10 * MIB, 70)  # three more
        ((kind, text),) = problems(run(folder), 10 * MIB, 90)
        assert kind == ABSENT and "in addition to the 4 there" in text
        ((kind, text),) = problems(run(folder, resume_mode="disable"), 10 * MIB, 70)  # none is its own
        assert kind == ABSENT and "at a time, and" in text
        back = {"resume_mode": "resume_path", "resume_from_path": str(folder / "global_step_20")}
        assert "in addition to the 2 there" in problems(run(folder, **back), 10 * MIB, 90)[0][1]
        (folder / "other_runs.json").write_text("?")
        assert "remove it if" in problems(run(folder), 10 * MIB, 1)[0][1]


def test_a_checkpoint_holds_trained_weights_moments_and_the_export(tiny_llama):
    config, engine = AutoConfig.from_pretrained(tiny_llama), FSDPEngineConfig(model_dtype="fp32")
    full, lora = measure_model(config), measure_model(config, 4)
    three = ["model", "optimizer", "extra"]
    assert checkpoint_bytes(full, engine, three) == 12 * full.parameters
    assert checkpoint_bytes(full, FSDPEngineConfig(model_dtype="bfloat16"), [*three, "hf_model"]) == 8 * full.parameters
    assert checkpoint_bytes(lora, engine, [*three, "hf_model"]) == 12 * lora.trainable + 4 * lora.parameters
