"""The demo of a scorer on a pretrained pair: questions, training data, stages, draft, commands.

Not covered: the figures of the pretrained pair (`make demo-pretrained-spd` shows them).
"""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from examples.demo_runner import PhaseFailed
from examples.pretrained.spd import cut, demo, gains, reward, serve, tasks
from examples.pretrained.stages import Stage, run
from examples.spd_arithmetic.questions import PromptStyle, read_splits
from recipe.spd.rollout.answers import final_answer, is_correct
from tests.examples.test_grpo_demo import trained_config
from tests.helpers.models import save_tiny_llama
from tests.spd.vllm_plugin.pair import GAMMA, make_pair, make_prompts
from verl.utils.tokenizer import hf_tokenizer

pytestmark = pytest.mark.demo
COUNTS = {"train": 30, "val": 12, "test": 15}


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


def test_prepare_blocks_asks_as_the_target_was_trained(splits, tmp_path, tiny_llama):
    demo.write_question_files(tmp_path, COUNTS, 0)
    style = PromptStyle(tasks.INSTRUCTION, tasks.SYSTEM)
    files = {split: tmp_path / f"questions_{split}.jsonl" for split in COUNTS}
    tokenizer = hf_tokenizer(tiny_llama)
    read = read_splits(files, COUNTS, 0, tokenizer, style)
    by_text = {asked.question: asked for asked in splits["test"]}
    for question in read["test"]:
        assert question.ground_truth == by_text[question.question].answer
        rendered = tokenizer.apply_chat_template(
            tasks.messages(question.question), tokenize=False, add_generation_prompt=True
        )
        assert question.prompt_ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_the_evaluation_asks_further_questions(splits, tmp_path, tiny_llama):
    (tmp_path / "pair").mkdir()
    for split in ("val", "test"):
        (tmp_path / "pair" / f"questions_{split}.jsonl").write_text('{"question": "of the pair"}\n')
    demo.write_evaluation_questions(tmp_path, tiny_llama, demo.Sizes(**COUNTS, further_val=1, further_test=4), 0)
    rows = {split: demo.read_rows(tmp_path / f"evaluation_{split}.jsonl") for split in ("val", "test")}
    assert {split: len(of_split) for split, of_split in rows.items()} == {"val": 2, "test": 5}
    assert rows["test"][0] == {"question": "of the pair"}
    asked = tasks.draw(COUNTS, further={"val": 1, "test": 4})["test"][-1]
    last = rows["test"][-1]
    assert (last["question"], last["ground_truth"]) == (asked.question, asked.answer)
    tokenizer = hf_tokenizer(tiny_llama)
    rendered = tokenizer.apply_chat_template(tasks.messages(asked.question), tokenize=False, add_generation_prompt=True)
    assert last["prompt_ids"] == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_the_target_learns_from_given_answers_and_the_draft_from_the_targets_own(tmp_path, splits):
    def read(name):
        return [[json.loads(line)["messages"] for line in (tmp_path / f"{name}.{split}.jsonl").read_text().splitlines()]
                for split in ("train", "val")]  # fmt: skip

    demo.write_target_data(tmp_path, COUNTS, 0)
    train, val = read("target")
    assert [turns[-1]["content"] for turns in train + val] == [asked.worked for asked in splits["train"]]
    assert [turn["role"] for turn in train[0]] == ["system", "user", "assistant"] and len(val) == 24
    rows = [{"question": f"q{i}", "answer": f"a{i}", "ended": i % 2 == 0} for i in range(60)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    demo.write_draft_data(tmp_path / "answers.jsonl", tmp_path)
    train, val = read("draft")
    assert [turns[-1]["content"] for turns in train + val] == [f"a{i}" for i in range(0, 60, 2)]


def test_grpo_sees_more_questions_and_rewards_what_the_verifier_accepts(tmp_path, splits):
    sizes = demo.Sizes(**COUNTS, rl_questions=45)
    demo.write_rl_data(tmp_path, sizes, 0)
    rows = {split: pd.read_parquet(tmp_path / f"{split}.parquet") for split in ("train", "val")}
    assert {split: len(of_split) for split, of_split in rows.items()} == {"train": 45, "val": 12}
    for row, asked in zip(rows["val"].itertuples(), splits["val"], strict=True):
        assert list(row.prompt) == tasks.messages(asked.question) and row.data_source == asked.task
        for answer, right in ((asked.answer, 1.0), ("a stepson", 0.0)):
            given = (row.data_source, f"So the answer is {answer}.", row.reward_model["ground_truth"], row.extra_info)
            assert reward.compute_score(*given) == {"score": right, "acc": right, "answered": 1.0}
    assert reward.compute_score(row.data_source, "no", "x", row.extra_info)["answered"] == 0.0
    command = demo.rl_command(tmp_path / "model", tmp_path, tmp_path / "run", 6, 0, limit=64)
    config = trained_config([*command, "trainer.dry_run=true"])
    assert config.data.max_response_length == 64
    assert "hf_model" in config.actor_rollout_ref.actor.checkpoint.save_contents


def test_a_stage_runs_once_resumes_and_starts_again_with_other_settings(tmp_path):
    result = tmp_path / "result"
    code = f"open({str(result)!r}, 'a').write('x'); import sys; sys.exit(int(sys.argv[1]))"
    stage = Stage("one", [sys.executable, "-c", code, "0"], result)
    run(stage, tmp_path)
    run(stage, tmp_path)
    assert result.read_text() == "x"
    failing = Stage("one", [sys.executable, "-c", code, "3"], result)
    for _ in range(2):
        with pytest.raises(PhaseFailed, match="ended with 3"):
            run(failing, tmp_path)
    assert result.read_text() == "xx"  # other settings: removed; then continued
    reading = [Stage("two", ["true"], result, (given,)).key for given in (stage, failing)]
    assert reading[0] != reading[1]
    assert Stage("two", ["true"], result).key != Stage("two", ["true"], result, given="{}").key


def test_gains_at_an_equal_drop_by_hand():
    """Of 100 questions the scorer loses one at 4 accepted tokens a forward and ten at 6, the margin rule four at 3."""

    def run(rule, threshold, lost, accepted):
        return {"rule": rule, "threshold": threshold, "correct": [i >= lost for i in range(100)],
                "accepted": [accepted] * 100, "rounds": [1] * 100}  # fmt: skip

    runs = [run("exact", None, 0, 2), run("margin", 3.0, 4, 3), run("scorer_sweep", 0.0, 1, 4),
            run("scorer_sweep", -1.0, 10, 6), run("words", 0.0, 30, 7)]  # fmt: skip
    result = gains.gains({"validation": runs, "test": [*runs[:2], {**runs[2], "rule": "scorer"}, *runs[3:]]})
    assert (result["scorer"], result["rule"]) == ("trained scorer, swept", "margin rule, swept")
    # At 2 points: half of the questions by the margin rule; the scorer mixes 1 and 10 points, 1/9 by the latter.
    assert result["accepted"] == pytest.approx({"scorer": 4 + 2 / 9, "rule": 2.5, "exact": 2.0})
    assert result["spd_gain_over_best_rule"] == pytest.approx((4 + 2 / 9) / 2.5)
    low, high = result["spd_gain_over_best_rule_95"]
    assert low < result["spd_gain_over_best_rule"] < high


@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_has_the_first_layers_and_the_last_one(tmp_path, tied):
    target = save_tiny_llama(tmp_path / "target", layers=4, tied=tied)
    assert cut.cut(Path(target), tmp_path / "draft", 3) == [0, 1, 3]
    whole, draft = (AutoModelForCausalLM.from_pretrained(folder) for folder in (target, tmp_path / "draft"))
    whole.model.layers = torch.nn.ModuleList(whole.model.layers[i] for i in (0, 1, 3))
    for place, layer in enumerate(whole.model.layers):
        layer.self_attn.layer_idx = place
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(whole(ids, use_cache=False).logits, draft(ids).logits) and draft.config.num_hidden_layers == 3
    with pytest.raises(SystemExit, match="give 2 to 4"):
        cut.cut(Path(target), tmp_path / "none", 5)
    assert demo.head_inputs(Path(target)) == ("logits" if tied else "pair")


def test_a_model_without_a_chat_template_or_a_list_of_layers_is_refused_before_it_is_trained(tmp_path, tiny_llama):
    model, tokenizer = tmp_path / "model", hf_tokenizer(tiny_llama)
    GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=32).save_pretrained(model)
    tokenizer.save_pretrained(model)
    with pytest.raises(SystemExit, match="cannot be cut from gpt2 models"):
        demo.main(["--model", str(model), "--out", str(tmp_path / "out")])
    tokenizer.chat_template = None
    for file in model.glob("*chat_template*"):
        file.unlink()
    tokenizer.save_pretrained(model)
    with pytest.raises(SystemExit, match="its tokenizer has no chat template"):
        demo.main(["--model", str(model), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_pair_of_another_model_is_kept(tmp_path, tiny_llama):
    out, model = tmp_path / "out", Path(tiny_llama).resolve()
    command = ["--out", str(out), "--until", "target", "--draft-layers", "2", "--model"]
    made = demo.pair_stages(model, out, demo.Sizes(draft_layers=2), demo.SEED)[0].command
    made = [str(part).replace(str(model), "/models/other") for part in made]
    file = out / "stages" / "target.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"key": "of another model", "command": made, "seconds": 5.0, "ended": True}))
    (out / "target_run").mkdir()
    with pytest.raises(SystemExit, match=f"command .now with model.partial_pretrain={model}.. Name .* --out"):
        demo.main([*command, tiny_llama])
    file.unlink()
    with pytest.raises(SystemExit, match="target_run exists, but was not made by this command"):
        demo.main([*command, tiny_llama])
    assert (out / "target_run").exists()
    with pytest.raises(SystemExit, match="no-model: there is no such folder"):
        demo.main([*command, str(tmp_path / "no-model")])


def test_every_stage_follows_those_that_it_reads(tmp_path):
    def all_stages(**sizes):
        pair = demo.pair_stages(tmp_path / "model", tmp_path, demo.Sizes(**sizes), 0)
        return pair + [s for seed in (0, 1) for s in demo.scorer_stages(pair[-1], tmp_path, demo.Sizes(**sizes), seed)]

    def equal(**sizes):
        return [a.key == b.key for a, b in zip(stages, all_stages(**sizes), strict=True)]

    stages = all_stages()
    assert len({stage.name for stage in stages}) == len({stage.result for stage in stages}) == len(stages)
    for number, stage in enumerate(stages):
        assert {read.name for read in stage.reads} <= {earlier.name for earlier in stages[:number]}
    names = [stage.name for stage in stages]
    assert names[:6] == ["target", "answers_val", "answers_train", "cut", "draft", "blocks"]
    same = equal(draft_layers=5)
    assert same[:3] == [True] * 3 and not any(same[3:])  # the target stays, what follows the draft does not
    assert not any(equal(train=1700))  # of which the target's command has the file only
    again = {stage.name for stage, kept in zip(stages, equal(further_test=9), strict=True) if not kept}
    assert again == {f"seed{seed}/{name}" for seed in (0, 1) for name in ("evaluation", "served")}
    watched = [stage.name for stage in stages if demo.watched(stage, demo.Sizes())]
    assert watched[:2] == ["target", "draft"] and len(watched) == 8
    reinforced = all_stages(rl_steps=4)
    assert [stage.name for stage in reinforced[:5]] == [
        "target", "answers_val_sft", "target_rl", "answers_val", "answers_train",
    ]
    assert reinforced[2].key != all_stages(rl_steps=4, rl_questions=1700)[2].key
    assert reinforced[2] in reinforced[4].reads and any("target_rl_run" in str(p) for p in reinforced[4].command)


def test_the_figures_that_exist_are_reported(tmp_path, capsys):
    (tmp_path / "answers_val.jsonl").write_text("".join(
        json.dumps({"task": "needle_haystack", "right": right}) + "\n" for right in (True, True, False, True)
    ))  # fmt: skip
    demo.report(tmp_path, [0])
    printed = " ".join(capsys.readouterr().out.split())
    assert "needle_haystack 75.0 %, all 75.0 % (wanted of the target: 85 % of all)" in printed


@pytest.mark.process
def test_a_served_pair_is_measured_and_compared_with_the_recipes_decoder(tmp_path, capsys):
    pair = make_pair(tmp_path, tied=True)
    questions = [{"question_id": f"test-{i}", "question": "q", "prompt_ids": ids, "ground_truth": "4"}
                 for i, ids in enumerate(make_prompts(6))]  # fmt: skip
    (tmp_path / "questions_test.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    rows = [{"rule": "scorer", "threshold": 5.0}, {"rule": "refined", "threshold": 0.0}]
    (tmp_path / "evaluation.json").write_text(json.dumps({"rows": rows}))
    runs = [{"rule": rule, "threshold": threshold, "correct": [True], "accepted": [accepted], "rounds": [1]}
            for rule, threshold, accepted in (("exact", None, 2), ("scorer_sweep", 5.0, 3), ("refined_sweep", 0.0, 4))]
    (tmp_path / "by_question.json").write_text(json.dumps({"validation": runs, "test": []}))
    serve.main([
        "--target", pair.target, "--draft", pair.draft, "--scorers", "scorer=nowhere", f"refined={pair.scorer}",
        "--pair", str(tmp_path),
        "--evaluation", str(tmp_path), "--gamma", str(GAMMA), "--out", str(tmp_path / "served.json"),
        "--dtype", "float32",  # in which answers do not depend on how many tokens a forward has
    ])  # fmt: skip
    record = json.loads((tmp_path / "served.json").read_text())
    assert (record["questions"], record["scorer"], record["threshold"]) == (6, "refined", 0.0)
    assert all(record[f"{name}_equals_{other}"] == 6
               for name, other in (("exact", "greedy"), ("exact", "decoder"), ("scorer", "decoder")))  # fmt: skip
    greedy, exact, scorer = (record["results"][name] for name in ("greedy", "exact", "scorer"))
    assert greedy["tokens_per_draft"] is None and scorer["tokens_per_draft"] > exact["tokens_per_draft"] > 1
    assert min(result["tokens_per_cpu_second"] for result in (greedy, exact, scorer)) > 0
    assert "tokens per CPU second" in " ".join(capsys.readouterr().out.split())
