"""Training on the model's own answers: which are kept, how failures of the reward function end, the cached file."""

import pandas as pd
import pytest
import torch

from dllm_reasoning.trainer import self_generate
from dllm_reasoning.trainer.iterative_refine_trainer import IterativeRefineTrainer
from tests.dllm_reasoning import runs
from tests.helpers.logs import logged
from verl.models.loading import create_huggingface_actor
from verl.trainer import fsdp_sft_trainer

REWARD = '''
def keep_even(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str.split()) % 2 == 0)


def keep_all(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "acc": 0.0}


def keep_none(**_):
    return {"score": 0.0, "acc": 1.0}


def raises(data_source, solution_str, ground_truth, extra_info=None):
    raise RuntimeError("unknown unit")


def no_number(**_):
    return {"acc": 1.0}


def hangs(data_source, solution_str, ground_truth, extra_info=None):
    while extra_info["instruction"] == "HANGS ON":
        pass
    return 1.0
'''


def own(folder, name, *more):
    """Overrides of a run on the model's own answers, scored by this function of REWARD."""
    (folder / "reward.py").write_text(REWARD)
    return ("iterative.self_generate.enable=true", "iterative.self_generate.max_new_tokens=12",
            f"iterative.self_generate.reward_function.path={folder / 'reward.py'}",
            f"iterative.self_generate.reward_function.name={name}", "data.train_batch_size=2", *more)  # fmt: skip


def dataset_of(config):
    return IterativeRefineTrainer.build_dataset(
        config.data.train_files, config, IterativeRefineTrainer.build_tokenizer(config), config.data.train_max_samples
    )


def greedy_answers(assets, length=99):
    """(row, instruction, text of its greedy answer) of the rows answered with text and an end within `length`."""
    config = runs.compose(*assets, "unused")
    given, model, results = dataset_of(config), create_huggingface_actor(assets[0]), []
    for item in range(len(given)):
        ids = torch.tensor([given.instruction_ids(item)])
        predicted = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        text = given.tokenizer.decode(predicted, skip_special_tokens=True)
        if predicted[-1] == 2 and text.strip() and ids.shape[1] + len(predicted) <= length:
            results.append((item, given.text_of(item, "prompt"), text))
    return results


@pytest.mark.process
def test_own_answers_are_the_models_greedy_ones_that_score(assets, tmp_path):
    expected = [(question, text) for _, question, text in greedy_answers(assets) if len(text.split()) % 2 == 0]
    config = runs.compose(*assets, tmp_path, *own(tmp_path, "keep_even"))
    made = dataset_of(config)
    assert [tuple(made.rows[i].values()) for i in range(len(made))] == expected and len(expected) > 2
    [file] = (tmp_path / "self_generated").glob("*.parquet")
    changed = pd.read_parquet(file).iloc[:3]
    changed.to_parquet(file)  # a second start takes the file as it lies there
    assert len(dataset_of(config)) == 3
    more = ("iterative.self_generate.keep_ground_truth=true", "data.train_max_samples=30",
            "iterative.self_generate.max_prompts=20")  # fmt: skip
    both = runs.compose(*assets, tmp_path, *own(tmp_path, "keep_even"), *more)
    answered = [pair for pair in greedy_answers(assets) if pair[0] < 20 and len(pair[2].split()) % 2 == 0]
    joined = dataset_of(both)
    assert len(joined) == 30 + len(answered) == len([joined[i] for i in range(len(joined))])
    assert joined.text_of(30, "response") == answered[0][2] and int(joined[30]["row"]) == 30


@pytest.mark.process
def test_own_answers_under_nested_keys_are_read_by_the_same_keys(assets, tmp_path):
    file = tmp_path / "nested.parquet"
    pd.DataFrame({"info": [{"q": {"text": q}, "a": a} for q, a in runs.sums(12)]}).to_parquet(file)
    keys = ("data.prompt_key=info", "data.response_key=info", "data.prompt_dict_keys=[q,text]",
            "data.response_dict_keys=[a]")  # fmt: skip
    config = runs.compose(assets[0], file, tmp_path, *own(tmp_path, "keep_all", *keys))
    made = dataset_of(config)
    expected = [(question, text) for item, question, text in greedy_answers(assets) if item < 12]
    assert [(made.text_of(i, "prompt"), made.text_of(i, "response")) for i in range(len(made))] == expected and expected


@pytest.mark.process
def test_answers_without_room_are_dropped_and_counted(assets, tmp_path):
    fits = [(question, text) for _, question, text in greedy_answers(assets, length=13)]
    with logged("INFO") as lines:
        made = dataset_of(runs.compose(*assets, tmp_path, *own(tmp_path, "keep_all", "data.max_length=13")))
    assert [tuple(row.values()) for row in made.rows] == fits and 0 < len(fits) < len(greedy_answers(assets))
    [summary] = [text for text in lines if text.startswith("own answers: ")]
    assert f"own answers: {len(fits)} of 40 kept ({40 - len(fits)} without an end within iterative.self_gen" in summary
    assert made.skipped == 40 - len(fits)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "message"),
    [("raises", r"train.parquet, row \d+: iterative.self_generate.reward_function raised RuntimeError: unknown unit."),
     ("no_number", r"train.parquet, row \d+: iterative.self_generate.reward_function returned .'acc': 1.0.; it must"),
     ("keep_none", r"iterative.self_generate kept none of 40 answers \(.*\d+ scored 0 or less\). Start from a model")],
)  # fmt: skip
def test_a_failing_reward_function_ends_with_one_message(assets, tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        dataset_of(runs.compose(*assets, tmp_path, *own(tmp_path, name)))


@pytest.mark.process
def test_a_reward_function_that_hangs_costs_its_answer(assets, tmp_path):
    answers = [(question, text) for _, question, text in greedy_answers(assets)]
    config = runs.compose(*assets, tmp_path, *own(tmp_path, "hangs", "iterative.self_generate.item_timeout=3"))
    (tmp_path / "reward.py").write_text(REWARD.replace("HANGS ON", answers[1][0]))
    expected = [pair for pair in answers if pair[0] != answers[1][0]]
    assert [tuple(row.values()) for row in dataset_of(config).rows] == expected and 0 < len(expected) < len(answers)


def test_the_file_of_own_answers_depends_on_everything_that_affects_them(assets, tmp_path):
    model, train = tmp_path / "model", tmp_path / "train.parquet"
    runs.save_model(model)

    def fingerprint_of(*more, rows=runs.sums(6), reward=REWARD):  # noqa: B008
        runs.save_rows(train, rows)
        config = runs.compose(model, train, tmp_path, *own(tmp_path, "keep_all", "data.train_batch_size=2", *more))
        (tmp_path / "reward.py").write_text(reward)
        tokenizer = IterativeRefineTrainer.build_tokenizer(config)
        dataset = IterativeRefineTrainer.build_val_dataset(str(train), config, tokenizer)
        return self_generate._fingerprint(config, dataset, range(len(dataset)))

    first = fingerprint_of()
    assert fingerprint_of() == first == fingerprint_of("iterative.self_generate.keep_ground_truth=true", "optim.lr=1")
    results = [first, fingerprint_of(rows=[("a =", "9"), *runs.sums(6)[1:]]),
               fingerprint_of("data.use_chat_template=true"),
             fingerprint_of("data.use_chat_template=true", "data.chat_template='{{ messages[0].content }} ?'"),
             fingerprint_of("data.max_length=20"), fingerprint_of("iterative.self_generate.max_new_tokens=11"),
             fingerprint_of("data.prompt_key=output", "data.response_key=instruction"),
             fingerprint_of("iterative.self_generate.ground_truth_key=output"),
             fingerprint_of("iterative.self_generate.item_timeout=600")]  # fmt: skip
    runs.save_model(model, seed=1)
    results += [fingerprint_of(), fingerprint_of(reward=REWARD + "# changed")]
    assert len(set(results)) == len(results) == 11


def test_validation_rows_never_become_own_answers(assets, tmp_path, monkeypatch):
    monkeypatch.setattr("dllm_reasoning.trainer.iterative_refine_trainer.own_answers", lambda *_: pytest.fail("called"))
    config = runs.compose(*assets, tmp_path, *own(tmp_path, "keep_all"), f"data.val_files={assets[1]}")
    tokenizer = IterativeRefineTrainer.build_tokenizer(config)
    held = fsdp_sft_trainer._dataset(config, IterativeRefineTrainer, tokenizer, "val", warn=False)
    assert [(row["instruction"], row["output"]) for row in held.rows] == runs.sums(40)
