"""What a run says of its starts: settings changed since the checkpoint, seeds, end, an earlier finished run."""


import pytest
from omegaconf import OmegaConf

from tests.helpers.logs import logged
from tests.helpers.rl_run import compose_run, fake_trainer, read_rows
from verl.trainer.run.starts import changed_settings


@pytest.fixture
def messages():
    with logged("INFO") as lines:
        yield lines


def trainer_of(directory, **more):
    settings = {"trainer__total_training_steps": 2, "reward_model__num_workers": 0, **more}
    return fake_trainer(compose_run(directory, "unused", **settings))


def test_changed_settings_say_whether_they_apply():
    old = OmegaConf.create({"optim": {"lr": 1e-3, "clip_grad": 1.0}, "trainer": {"seed": 1, "resume_mode": "auto"}})
    new = OmegaConf.create({"optim": {"lr": 1e-6, "clip_grad": 2.0}, "trainer": {"seed": 2, "resume_mode": "disable"}})
    lines, in_force = changed_settings(old, new, {})
    assert lines == [
        "optim.clip_grad: 1.0 -> 2.0 (applied)",
        "optim.lr: 0.001 -> 1e-06 (not applied: the checkpoint restores its optimizer state; "
        "trainer.checkpoint.load_contents=[model] starts a new one)",
        "trainer.seed: 1 -> 2 (not applied: the checkpoint restores its random states)",
    ]
    assert in_force == {"optim.lr": 1e-3, "trainer.seed": 1}
    assert changed_settings(new, new, in_force)[0] == lines[1:]  # the next resume, with the same settings
    new.trainer.checkpoint = {"load_contents": ["model"]}
    lines, in_force = changed_settings(old, new, {})
    assert "optim.lr: 0.001 -> 1e-06 (applied)" in lines and "optim.lr" not in in_force


def test_settings_that_follow_a_changed_one_are_in_its_line_and_empty_sections_have_none():
    old, new = ({"actor": {"tokens": n}, "ref": {"tokens": n}, "rollout": {"tokens": n, "vllm": vllm}, "other": n}
                for n, vllm in ((2048, {}), (1024, {"cache": 7})))  # fmt: skip
    lines, in_force = changed_settings(OmegaConf.create(old), OmegaConf.create(new), {}, ["actor.tokens", "other"])
    assert lines == [
        "actor.tokens: 2048 -> 1024 (applied), also ref.tokens, rollout.tokens", "other: 2048 -> 1024 (applied)",
        "rollout.vllm.cache: null -> 7 (applied)",
    ] and in_force == {}  # fmt: skip
    seeds = ({"trainer": {"seed": n}, "rollout": {"seed": n}, "top": {"rollout": {"seed": n}}} for n in (1, 2))
    lines, _ = changed_settings(*map(OmegaConf.create, seeds), {}, ["trainer.seed"])
    assert [line.partition(":")[0] for line in lines] == ["rollout.seed", "top.rollout.seed", "trainer.seed"]


def test_a_start_after_a_failed_one_renames_its_tracebacks(tmp_path):
    for name in ("traceback", "traceback_rank11", "traceback.1"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / f"{name}.txt").write_text(name)
    trainer_of(tmp_path).run_log.open(0)
    left = {file.name: file.read_text() for file in (tmp_path / "out").glob("traceback*")}
    assert left == {
        "traceback.1.txt": "traceback.1", "traceback.2.txt": "traceback", "traceback_rank11.txt": "traceback_rank11",
    }  # fmt: skip


def test_a_run_says_what_it_computes_until_the_line_of_its_first_step(tmp_path, messages):
    trainer_of(tmp_path, trainer__val_before_train="true", trainer__test_freq=1).fit()
    said = [line for line in messages if line.startswith(("validating", "step "))]
    assert said == ["validating 4 prompts", "step 1: generating 4 answers to each of 8 prompts"]


def test_another_seed_of_the_rollouts_applies_to_a_resumed_run():
    old, new = ({"trainer": {"seed": seed}, "actor_rollout_ref": {"rollout": {"seed": seed}}} for seed in (1, 2))
    lines, in_force = changed_settings(OmegaConf.create(old), OmegaConf.create(new), {})
    assert "actor_rollout_ref.rollout.seed: 1 -> 2 (applied)" in lines and in_force == {"trainer.seed": 1}


def test_a_resume_reports_what_changed_since_its_checkpoint(tmp_path, messages):
    trainer_of(tmp_path, trainer__save_freq=1).fit()
    out = tmp_path / "out"
    trainer_of(tmp_path, trainer__total_epochs=3, actor_rollout_ref__actor__optim__lr="1e-6").run_log.open(1)
    changed = [line.split(": ")[1] for line in messages if "changed since the checkpoint" in line]
    assert changed == ["actor_rollout_ref.actor.optim.lr", "trainer.save_freq", "trainer.total_epochs"]
    assert [OmegaConf.load(out / f"run_configs/{n}.yaml").trainer.total_epochs for n in (1, 2)] == [2, 3]
    assert OmegaConf.load(out / "run_config.yaml").trainer.total_epochs == 3
    rows = read_rows(out / "starts.jsonl")
    assert [(r["start"], r["step"], r.get("ended")) for r in rows] == [(1, 0, None), (1, 2, "finished"), (2, 1, None)]
    messages.clear()
    trainer_of(tmp_path, trainer__total_epochs=3, actor_rollout_ref__actor__optim__lr="1e-6").run_log.open(2)
    (line,) = [line for line in messages if "changed since the checkpoint" in line]  # it is still 0.001 that is used
    assert "optim.lr: 0.001 -> 1e-06 (not applied" in line


def test_the_last_line_names_folder_report_and_checkpoint(tmp_path, capsys):
    trainer_of(tmp_path, trainer__report="true").fit()
    out = tmp_path / "out"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        f"Finished after step 2 of 2. Folder: {out}, report: {out}/report.html, last checkpoint: {out}/global_step_2"
    )
    metrics = (out / "metrics.jsonl").read_text()
    trainer_of(tmp_path).fit()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("This run was finished before, at step 2 of 2: nothing was trained. Raise trainer.")
    assert (out / "metrics.jsonl").read_text() == metrics
    trainer_of(tmp_path / "unsaved", trainer__save_freq=0).fit()
    assert capsys.readouterr().out.splitlines()[-1].endswith(", no checkpoint was saved")
