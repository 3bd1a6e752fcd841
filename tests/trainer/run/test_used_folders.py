"""A start in a folder that has files of another run, or of later steps: neither is taken for its own."""

import pytest

from tests.helpers.logs import logged
from tests.helpers.rl_run import fake_run, read_rows
from tests.helpers.sft_run import make_trainer, write_pairs
from tests.trainer.run.test_run_log import steps_in
from verl.trainer.fsdp_sft_trainer import extract_step
from verl.training.checkpoint.publish import TRACKER, find_valid_checkpoint, published_steps

pytestmark = pytest.mark.process
BACK = {"trainer__resume_mode": "resume_path"}
ANEW = {"trainer__resume_mode": "disable"}


@pytest.fixture
def messages():
    with logged("INFO") as lines:
        yield lines


def run_rl(directory, steps, **more):
    keys = {"save_freq": 2, "max_actor_ckpt_to_keep": 2, "total_training_steps": steps, "total_epochs": 9}
    more = {"reward_model__num_workers": 0, **more}
    return fake_run(directory, **{f"trainer__{key}": value for key, value in keys.items()} | more).resumed_step


def test_a_new_run_keeps_and_resumes_its_own_checkpoints_only(tmp_path, messages):
    out = tmp_path / "out"
    run_rl(tmp_path, 8)
    assert published_steps(out) == [6, 8]
    run_rl(tmp_path, 1, **ANEW, trainer__save_freq=1)
    assert published_steps(out) == [1, 6, 8] and (out / TRACKER).read_text() == "1"
    (line,) = [line for line in messages if "of another run" in line]
    assert "global_step_6, global_step_8" in line and "trainer.resume_from_path" in line
    assert run_rl(tmp_path, 4) == 1  # the rotation counts 1, 2 and 4 only
    assert published_steps(out) == [2, 4, 6, 8] and find_valid_checkpoint(out) == out / "global_step_4"
    assert run_rl(tmp_path, 6) == 4  # global_step_6 is replaced
    assert published_steps(out) == [4, 6, 8] and steps_in(out / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert steps_in(out / "metrics.1.jsonl") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run_rl(tmp_path, 10) == 6 and published_steps(out) == [8, 10]


def test_a_new_run_that_saved_nothing_is_not_replaced_by_the_former_one(tmp_path):
    """Its rows are in metrics.jsonl, so that the former run cannot continue there."""
    run_rl(tmp_path, 4)
    run_rl(tmp_path, 1, **ANEW, trainer__save_freq=0)
    assert not (tmp_path / "out" / TRACKER).exists() and run_rl(tmp_path, 2) == 0


def test_a_run_that_went_back_continues_from_there(tmp_path, messages):
    out = tmp_path / "out"
    dumps = {"trainer__rollout_data_dir": tmp_path / "dumps", "trainer__max_actor_ckpt_to_keep": 3}
    run_rl(tmp_path, 6, **dumps)
    back = {**BACK, "trainer__resume_from_path": out / "global_step_2"}
    assert run_rl(tmp_path, 3, **back, **dumps, trainer__save_freq=1) == 2
    assert (out / TRACKER).read_text() == "3" and published_steps(out) == [2, 3, 4, 6]
    assert any("global_step_4, global_step_6" in line and "of another run" in line for line in messages)
    assert steps_in(out / "metrics.jsonl") == [1, 2, 3] and steps_in(out / "metrics.1.jsonl") == [1, 2, 3, 4, 5, 6]
    assert {f.name for f in (tmp_path / "dumps").iterdir()} == {"earlier_1", "1.jsonl", "2.jsonl", "3.jsonl"}
    assert {f.name for f in (tmp_path / "dumps" / "earlier_1").iterdir()} == {f"{n}.jsonl" for n in (3, 4, 5, 6)}
    assert run_rl(tmp_path, 5, **dumps) == 3
    assert not (out / "metrics.2.jsonl").exists()  # nothing was left behind
    assert published_steps(out) == [3, 4, 5, 6] and run_rl(tmp_path, 5) == 5


def test_rows_of_the_folder_are_not_taken_for_those_before_a_checkpoint_of_another_run(tmp_path, messages):
    run_rl(tmp_path / "a", 4, trainer__total_epochs=8)
    run_rl(tmp_path / "b", 3, actor_rollout_ref__actor__optim__lr="1e-6")
    other = {**BACK, "trainer__resume_from_path": tmp_path / "a" / "out" / "global_step_2", "data__train_files":
             tmp_path / "a" / "train.jsonl"}  # fmt: skip
    messages.clear()
    assert run_rl(tmp_path / "b", 3, **other) == 2
    out = tmp_path / "b" / "out"
    assert steps_in(out / "metrics.jsonl") == [3] and steps_in(out / "metrics.1.jsonl") == [1, 2, 3]
    assert not any("changed since the checkpoint" in line for line in messages)  # the starts in b did not write it
    messages.clear()
    (out / "tool_journal").mkdir()
    back = {**BACK, "trainer__resume_from_path": out / "global_step_2"}  # of the first run in b
    assert run_rl(tmp_path / "b", 3, **back) == 2
    (line,) = [line for line in messages if "optim.lr" in line]  # its checkpoint was written by the first start
    assert "1e-06 -> 0.001" in line and steps_in(out / "metrics.2.jsonl") == [3]
    assert (out / "tool_journal.1").is_dir() and not (out / "tool_journal").exists()


def test_validation_alone_leaves_the_run_as_it_is(tmp_path):
    run_rl(tmp_path, 4)
    back = {**BACK, "trainer__resume_from_path": tmp_path / "out" / "global_step_2"}
    assert run_rl(tmp_path, 4, **back, trainer__val_only="true") == 2
    assert run_rl(tmp_path, 5) == 4 and steps_in(tmp_path / "out" / "metrics.jsonl")[:4] == [1, 2, 3, 4]


def test_supervised_runs_do_the_same(tmp_path, tiny_llama):
    write_pairs(tmp_path)
    out = tmp_path / "out"

    def run(steps, **more):
        keys = {"trainer__save_freq": 2, "trainer__max_ckpt_to_keep": 2, "trainer__total_training_steps": steps}
        make_trainer(tmp_path, tiny_llama, **keys | more).fit()
        return published_steps(out), [row["step"] for row in read_rows(out / "starts.jsonl") if "config" in row]

    assert run(6) == ([4, 6], [0])
    assert run(3, **ANEW) == ([2, 3, 4, 6], [0, 0])
    assert run(5) == ([4, 5, 6], [0, 0, 3])
    back = {**BACK, "trainer__resume_from_path": out / "global_step_4"}
    assert run(4, **back)[1] == [0, 0, 3, 4] and run(5)[1] == [0, 0, 3, 4, 4]
    (out / "global_step_5" / "extra_state.json").write_text("{}")  # torn: the one before it is taken
    assert run(6)[1][-1] == extract_step(str(out / "global_step_4")) == 4
    assert steps_in(out / "metrics.1.jsonl") == [0, 1, 2, 3, 4, 5, 6]  # of the first run
