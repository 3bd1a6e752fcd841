"""The demo of refinement of a pretrained model: data, commands, figures, server.

Not covered: the figures of the pretrained model (`make demo-pretrained-dllm` shows them).
"""

import json
import math
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from dllm_reasoning.trainer.sft_dataset import IterativeSFTDataset
from examples.demo_runner import json_rows
from examples.dllm_arithmetic.evaluate import accuracy_under_parallelism
from examples.pretrained.dllm import demo, serve, target, tasks
from examples.pretrained.stages import Stage
from recipe.spd.rollout.answers import final_answer, is_correct
from tests.dllm_reasoning.test_vllm_drafter import prompts, refined  # noqa: F401
from tests.examples.test_dllm_demo import read
from verl.data.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.tokenizer import hf_tokenizer

COUNTS = {"train": 30, "val": 12, "test": 15}


def test_a_task_with_too_few_questions_names_the_options(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "_of_gym", lambda name, seed: iter([SimpleNamespace(question=name)]))
    stream = tasks._unseen("test", 0, None, set())
    with pytest.raises(ValueError, match="has too few different questions: lower --questions .dllm.demo. or --counts"):
        list(stream)


@pytest.fixture(scope="module")
def splits():
    pytest.importorskip("reasoning_gym", reason="requirements/pretrained.txt")
    return tasks.draw(COUNTS)


def test_questions_occur_once_and_more_training_questions_change_no_others(splits):
    texts = [asked.question for asked in sum(splits.values(), [])]
    assert {split: len(asked) for split, asked in splits.items()} == COUNTS and len(set(texts)) == sum(COUNTS.values())
    assert {asked.task for asked in splits["val"]} == set(tasks.TASKS)
    more = tasks.draw({**COUNTS, "train": 60})
    assert (more["val"], more["test"], more["train"][:30]) == (splits["val"], splits["test"], splits["train"])
    further = tasks.draw(COUNTS, further={"val": 3, "test": 20})
    assert {split: asked[: COUNTS[split]] for split, asked in further.items()} == splits
    texts = [asked.question for asked in sum(further.values(), [])]
    assert len(further["test"]) == 35 and len(set(texts)) == len(texts) == sum(COUNTS.values()) + 23


def test_the_recipe_grades_as_the_tasks_verifiers_do(splits):
    """Words decide some answers, and digits others."""
    kinds = {asked.task: asked.answer[-1].isdigit() for asked in splits["train"]}
    assert set(kinds.values()) == {True, False}
    for one, other in zip(splits["test"], splits["test"][3:], strict=False):  # of the same task
        for answer in (one.answer, other.answer):
            text = f"Some words. So the answer is {answer}."
            assert one.is_right(final_answer(text)) == is_correct(text, one.answer) == (answer == one.answer)
    assert not splits["train"][0].is_right(final_answer("no answer at all"))


def test_gsm8k_is_a_further_task_with_its_own_answers(tmp_path, monkeypatch, splits):
    monkeypatch.setattr(tasks, "GSM8K_VALIDATION", 5)
    for name in ("train", "test"):
        rows = ({"question": f"{name} {i}", "answer": f"It is 2*{i}=<<2*{i}={2 * i}>>{2 * i}.\n#### {2 * i}"}
                for i in range(20))  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = tasks.draw({"train": 18, "val": 16, "test": 8}, gsm8k=tmp_path)
    given = {split: [a for a in asked if a.task == tasks.GSM8K] for split, asked in mixed.items()}
    assert {split: len(asked) for split, asked in given.items()} == {"train": 3, "val": 4, "test": 2}
    assert {a.question for a in given["val"]} <= {f"train {i}" for i in range(15, 20)}
    one = given["test"][0]
    assert one.worked == f"It is 2*{int(one.answer) // 2}={one.answer}.\nThe answer is {one.answer}."
    assert one.is_right(final_answer(one.worked)) and not one.is_right("1")


def test_answers_that_come_with_the_questions_are_right_and_short(splits):
    """Calculations of gsm_symbolic have steps in words with small whole numbers; the other answers are one sentence."""
    for asked in sum(splits.values(), []):
        assert asked.is_right(final_answer(asked.worked)) and asked.worked.endswith(f"The answer is {asked.answer}.")
        assert ("=" in asked.worked) == (asked.task == "gsm_symbolic")
        numbers = tasks.NUMBER.findall(asked.question + asked.worked)
        assert all(int(number) <= tasks.LARGEST for number in numbers)
    shares = [sum(asked.task == "gsm_symbolic" for asked in splits[split]) / COUNTS[split] for split in COUNTS]
    assert shares == pytest.approx([3 / 5, 1 / 3, 1 / 3])


def test_the_model_learns_from_given_answers(tmp_path, splits):
    target.write_given_answers(tmp_path / "target", COUNTS)
    train, val = [[row["messages"] for row in json_rows(tmp_path / f"target.{split}.jsonl")]
                  for split in ("train", "val")]  # fmt: skip
    assert [turns[-1]["content"] for turns in train + val] == [asked.worked for asked in splits["train"]]
    assert [turn["role"] for turn in train[0]] == ["system", "user", "assistant"] and len(val) == 24


def test_refinement_and_its_twin_learn_the_same_tokens(tmp_path, tiny_llama):
    rows = [{"question": f"what is {i} ?", "answer": f"the answer is {i}"} for i in range(6)]
    demo.write_pairs(rows, Path(tiny_llama), tmp_path / "pairs", held_out=2)
    tokenizer = hf_tokenizer(tiny_llama)
    for split, count in (("train", 4), ("val", 2)):
        keys = {"max_length": 64, "prompt_key": "instruction", "response_key": "output"}
        pairs = IterativeSFTDataset(str(tmp_path / f"pairs.{split}.parquet"), tokenizer, keys)
        turns = MultiTurnSFTDataset(str(tmp_path / f"pairs.{split}.jsonl"), tokenizer, {"max_length": 64})
        assert len(pairs) == len(turns) == count
        for pair, conversation in zip(pairs, turns, strict=True):
            learned = [item["input_ids"][item["loss_mask"] == 1].tolist() for item in (pair, conversation)]
            prompt = [item["input_ids"][: int(item["loss_mask"].argmax())].tolist() for item in (pair, conversation)]
            assert learned[0] == learned[1] and prompt[0] == prompt[1] and learned[0][-1] == tokenizer.eos_token_id


def test_test_questions_are_trained_on_by_no_stage(tmp_path, tiny_llama):
    pytest.importorskip("reasoning_gym", reason="requirements/pretrained.txt")
    counts = {"train": 6, "val": 3, "test": 6}
    demo.write_test(Path(tiny_llama), tmp_path / "test.parquet", counts, 3, 0)
    written, asked = pd.read_parquet(tmp_path / "test.parquet"), tasks.draw(counts, further={"test": 3})["test"][-3:]
    of_pair = {a.question for questions in tasks.draw(counts).values() for a in questions}
    assert len(written) == 3 and not of_pair & {a.question for a in asked}
    assert written["answer"].tolist() == [a.answer for a in asked]
    assert all(a.question in text for a, text in zip(asked, written["instruction"], strict=True))


def test_both_trainings_have_the_same_steps_batches_and_learning_rate(tmp_path):
    sizes = demo.Sizes(steps=48)
    answers = Stage("answers_train", ["true"], tmp_path / "answers.jsonl")
    stages = demo.trained_stages(answers, tmp_path / "target", tmp_path, sizes, 1, lambda file: None)
    refinement, twin = read(list(stages[0].command)), read(list(stages[1].command))
    for name in ("data.train_batch_size", "optim.lr", "trainer.total_training_steps", "model.partial_pretrain",
                 "data.max_length", "trainer.seed", "model.fsdp_config.dtype"):  # fmt: skip
        value = attrgetter(name)
        assert value(refinement) == value(twin), name
    settings = refinement.iterative
    assert (settings.noise_pattern, settings.single_round_steps, settings.noise_seed) == ("packed", 36, 1)
    for number, stage in enumerate(stages):
        known = {"answers_train", *(earlier.name for earlier in stages[:number])}
        assert {part.name for part in stage.reads} <= known


def row(mode, accuracy, tokens_per_forward, same=1.0):
    return {"mode": mode, "accuracy": accuracy, "tokens_per_forward": tokens_per_forward, "same_as_greedy": same}


def test_figures_of_a_seed_by_hand():
    refined_rows = [row("greedy", 0.8, 1), row("slide", 0.8, 2), row("verify", 0.8, 3, 0.99), row("refine 1", 0.5, 4)]
    parts = {
        "refined": {"rows": refined_rows, "correct": [True, True, False, True], "questions": 4},
        "twin": {"rows": [row("greedy", 0.9, 1), row("slide", 0.9, 1.5)], "correct": [True] * 4, "questions": 4},
    }
    result = demo.figures(parts)
    # One answer of `verify` differs from greedy decoding, so that it is not lossless.
    assert (result["mode"], result["dllm_tokens_per_forward"]) == ("slide", 2)
    assert result["differing"] == {"verify": 0.99}
    assert result["gap"]["difference"] == -25
    # `refine 1` loses more than 5 points and is left out; W(80) = exp(-3 (1 - 80 / 90)).
    weighted = 80 * math.exp(-3 / 9)
    assert result["aup"] == pytest.approx({"refined": 80 + (3 - 1) * weighted, "twin": 90 + 0.5 * 90})
    assert accuracy_under_parallelism([row("greedy", 0.5, 1)], 0.5) == 50


def test_a_window_that_is_too_wide_for_branches_is_refused_at_the_start(tmp_path, capsys):
    with pytest.raises(SystemExit):
        demo.main(["--block", "33", "--out", str(tmp_path / "out")])
    assert "--block 33: give 2 to 32" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_target_of_another_model_is_kept(tmp_path, tiny_llama):
    out, model = tmp_path / "out", Path(tiny_llama).resolve()
    made = [part.replace(str(model), "/models/other") for part in target.target_stages(model, out)[0].command]
    record = out / "stages" / "target.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"key": "of another model", "command": made, "seconds": 9.0, "ended": True}))
    (out / "target_run").mkdir()
    with pytest.raises(SystemExit, match=f"command .now with model.partial_pretrain={model}.. Name .* --out"):
        demo.main(["--model", tiny_llama, "--out", str(out)])
    assert (out / "target_run").exists() and json.loads(record.read_text())["seconds"] == 9.0


def test_what_exists_is_reported(tmp_path, capsys):
    (tmp_path / "seed0").mkdir()
    (tmp_path / "stages" / "seed0").mkdir(parents=True)
    (tmp_path / "stages" / "seed0" / "refinement.json").write_text('{"seconds": 100.0}')
    for name in ("refined", "twin"):
        rows = [row("greedy", 0.9, 1) | {"model": name, "accuracy_se": 0.1, "block": 1}]
        (tmp_path / "seed0" / f"{name}.json").write_text(
            json.dumps({"rows": rows, "correct": [True, False], "questions": 2})
        )
    for name in ("refinement", "twin"):
        (tmp_path / "seed0" / name).mkdir()
        metrics = {"step": 1, "time": 0.0, "data": {"train/loss": 2.0}}
        (tmp_path / "seed0" / name / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    demo.report(tmp_path, [0, 1])
    text = " ".join(capsys.readouterr().out.split())
    assert "means over 1 seeds: dllm_tokens_per_forward 1.00 (wanted: 2.2)" in text
    assert "longest refinement 100 s" in text
    assert json.loads((tmp_path / "result.json").read_text())["means"]["gap"] == 0


@pytest.mark.process
def test_a_refined_model_is_served_next_to_n_gram_drafts(tmp_path, capsys, refined):  # noqa: F811
    folder = str(refined[0])
    tokenizer = hf_tokenizer(folder)
    questions = [{"instruction": tokenizer.decode(ids), "answer": "4"} for ids in prompts(4)]
    pd.DataFrame(questions).to_parquet(tmp_path / "test.parquet")
    serve.main(["--model", folder, "--questions", str(tmp_path / "test.parquet"),
                "--max-new-tokens", "24", "--out", str(tmp_path / "served.json")])  # fmt: skip
    record = json.loads((tmp_path / "served.json").read_text())
    assert record["questions"] == 4 and record["same_as_greedy"] == {"refined": 4, "n-gram": 4}
    results = record["results"]
    assert results["greedy"]["tokens_per_draft"] is None and results["refined"]["tokens_per_draft"] >= 1
    speeds = [results[name]["tokens_per_second"] for name in ("refined", "greedy")]
    assert record["refined_over_greedy"] == pytest.approx(speeds[0] / speeds[1])
    text = " ".join(capsys.readouterr().out.split())
    assert "answers equal to greedy decoding's: 4 (own drafts), 4 (n-gram) of 4" in text
