"""A save that dies before any single file operation, and every file of a checkpoint torn or altered.

The operations are those that Python reports to its audit hooks: opening for writing, making, renaming, removing. Not
covered: a file that safetensors writes (in Rust), a write that is cut short inside (a torn file: below), and an
operating system that reorders what was synced.
"""

import functools
import os
import shutil
import sys

import pytest

from tests.helpers.engines import make_actor, make_engine, rl_batch
from tests.training.test_checkpoint_publish import save
from verl.trainer.run.checkpoints import TrainerState, read_trainer_state, write_trainer_state
from verl.training.checkpoint import CheckpointCorruptError, CheckpointWriter, find_valid_checkpoint, verify_manifest
from verl.training.checkpoint.publish import begin_run

WATCHED = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate")


class Killed(BaseException):
    """Stands for SIGKILL: from here on no file operation happens, whatever handlers try."""


class Death:
    """Counts the file operations below a folder; from number `at` on none of them happens."""

    def __init__(self) -> None:
        self.root, self.at, self.count = None, None, 0
        sys.addaudithook(self.watch)  # for the rest of the process; without a root it does nothing

    def watch(self, event, arguments):
        if self.root is None:
            return
        how = arguments[1] if event == "open" and isinstance(arguments[1], str) else ""
        writes = set(how) & set("wax+") or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if (writes or event in WATCHED) and self.path(event, arguments).startswith(self.root):
            if self.count >= self.at:
                raise Killed
            self.count += 1

    @staticmethod
    def path(event, arguments) -> str:
        """What is touched; rmtree names files by an open folder of theirs."""
        path = os.fspath(arguments[0]) if not isinstance(arguments[0], int) else ""
        place = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.rename": 2}.get(event)
        if place is None or os.path.isabs(path) or arguments[place] < 0:
            return path
        return os.path.join(os.readlink(f"/proc/self/fd/{arguments[place]}"), path)

    def strikes(self, root, at, work) -> bool:
        """Whether `work` was killed before its operation number `at`."""
        self.root, self.at, self.count = str(root), at, 0
        try:
            work()
            return False
        except BaseException:
            if self.count < at:
                raise
            return True
        finally:
            self.root = None


@pytest.fixture(scope="module")
def death():
    return Death()


@pytest.fixture(scope="module")
def engine(tiny_llama):
    made = make_engine(tiny_llama, lora_rank=2, contents=("model", "optimizer", "extra", "hf_model"))
    make_actor(made).update_policy(rl_batch())
    yield made


save_files = functools.partial(save, max_to_keep=2)


def save_run(engine):
    """What a trainer saves: the actor with its optimizer and adapter, the data position, the counters."""

    def save(root, step, max_to_keep=2):
        with CheckpointWriter(root, step, max_to_keep) as writer:
            engine.save_checkpoint(str(writer.path / "actor"), global_step=step)
            state = TrainerState(step, {"epoch": 0}, {}, {}, {}, {})
            write_trainer_state(writer.path, state, {"position": step})

    return save


def step_of(folder):
    return int(folder.name.rpartition("_")[2])


def die_everywhere(tmp_path, death, save, step):
    """Kill the save of `step` before each of its operations in turn; the number of operations."""
    base = tmp_path / "base"
    for earlier in (1, 2):
        save(base, earlier)
    at, killed = 0, True
    while killed:
        root = tmp_path / f"at{at}"
        shutil.copytree(base, root)
        killed = death.strikes(root, at, lambda root=root: save(root, step))
        valid = find_valid_checkpoint(root)
        assert valid is not None and step_of(valid) >= 2 and (killed or step_of(valid) == step), at
        verify_manifest(valid)
        save_files(root, 4)
        assert step_of(find_valid_checkpoint(root)) == 4
        assert len([p for p in root.iterdir() if p.is_dir()]) == 2, at
        shutil.rmtree(root)
        at += 1
    return at - 1


@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step saved again"])
def test_a_publication_that_dies_anywhere_leaves_a_valid_checkpoint(tmp_path, death, step):
    assert die_everywhere(tmp_path, death, save_files, step) >= 15


def test_a_new_run_that_dies_anywhere_in_a_used_folder_never_continues_the_former_one(tmp_path, death):
    def save(root, step, of):
        with CheckpointWriter(root, step, 2) as writer:
            (writer.path / "run").write_text(of)

    def offered(root):
        valid = find_valid_checkpoint(root)
        return valid and (step_of(valid), (valid / "run").read_text())

    begun = tmp_path / "begun"
    for step in (2, 4):
        save(begun, step, "former")
    for at in range(9):  # a start that dies has or has not begun the new run
        root = tmp_path / f"start{at}"
        shutil.copytree(begun, root)
        killed = death.strikes(root, at, lambda root=root: begin_run(root, None))
        assert offered(root) in ((None, (4, "former")) if killed else (None,))
    assert not killed
    begin_run(begun, None)
    save(begun, 1, "new")
    at, killed = 0, True
    while killed:
        root = tmp_path / f"save{at}"
        shutil.copytree(begun, root)
        killed = death.strikes(root, at, lambda root=root: save(root, 2, "new"))  # in place of the former one's
        assert offered(root) in (((1, "new"), (2, "new")) if killed else ((2, "new"),))
        save(root, 3, "new")
        assert offered(root) == (3, "new") and (root / "global_step_4" / "run").read_text() == "former"
        at += 1
    assert at >= 10


def test_a_whole_save_that_dies_anywhere_leaves_a_valid_checkpoint(tmp_path, death, engine):
    operations = die_everywhere(tmp_path, death, save_run(engine), 3)
    print(f"{operations} file operations of a save")
    assert operations >= 40


def test_every_file_cut_altered_or_missing_is_refused_by_name_and_the_step_before_offered(tmp_path, engine):
    for step in (1, 2):
        save_run(engine)(tmp_path, step)
    last = tmp_path / "global_step_2"
    files = [f for f in last.rglob("*") if f.is_file()]
    assert {"data.pt", ".metadata", "extra_state.json", "adapter_model.safetensors", "model.safetensors"} <= {
        f.name for f in files
    }
    for file in files:
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for harm in (whole[: len(whole) // 2], bytes(flipped), None):
            file.unlink() if harm is None else file.write_bytes(harm)
            with pytest.raises(CheckpointCorruptError) as refusal:
                verify_manifest(last)
            assert file.name in str(refusal.value) and "\n" not in str(refusal.value)
            assert find_valid_checkpoint(tmp_path) == tmp_path / "global_step_1"
        file.write_bytes(whole)
    assert find_valid_checkpoint(tmp_path) == last
    assert read_trainer_state(last)[1] == {"position": 2}
