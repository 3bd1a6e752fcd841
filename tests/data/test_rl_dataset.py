"""The prompt data set: padding, truncation, filter, errors by file and row."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from tests.agents.agent_loop.parts import listed
from tests.helpers.models import make_tokenizer
from verl.data import RLHFDataset, collate_fn
from verl.data.rl_dataset import DatasetError, read_rows, truncate_ids
from verl.planning.checks import row_problems
from verl.utils.fs import copy_to_shm

TOKENIZER = make_tokenizer()


def config(**changes):
    base = {"prompt_key": "prompt", "max_prompt_length": 8, "truncation": "error", "filter_overlong_prompts": False}
    return OmegaConf.create(base | changes)


def row(content="1 + 2", **more):
    return {
        "data_source": "x", "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "3"}, "extra_info": {"index": 5, "split": "train"}, **more,
    }  # fmt: skip


def write(path, rows):
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_a_prompt_has_the_tools_and_its_length_counts_them(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.parameters.required | join(' ') }} {% endfor %}"
        "{{ messages[0].content }}"
    )
    file = write(tmp_path / "d.jsonl", [row("1"), row("1 + 2")])
    settings = config(filter_overlong_prompts=True, max_prompt_length=3)
    settings.tool_config_path = listed(tmp_path, "tools", "AddTool")
    dataset = RLHFDataset(file, tokenizer, settings)
    assert [tokenizer.decode(sample["raw_prompt_ids"]) for sample in dataset] == ["a b 1"]  # the other has 5 tokens


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_a_row_is_templated_and_left_padded(tmp_path, suffix):
    dataset = RLHFDataset(write(tmp_path / f"d{suffix}", [row()]), TOKENIZER, config(max_prompt_length=9))
    sample = dataset[0]
    ids = TOKENIZER("q : 1 + 2 a :", add_special_tokens=False)["input_ids"]
    assert sample["raw_prompt_ids"] == ids
    assert sample["input_ids"].tolist() == [0, 0] + ids
    assert sample["attention_mask"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert sample["position_ids"].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert sample["raw_prompt"] == [{"role": "user", "content": "1 + 2"}]
    assert sample["reward_model"] == {"style": "rule", "ground_truth": "3"}
    assert (sample["index"], sample["sample_index"], sample["tools_kwargs"]) == (5, 0, {})
    assert "prompt" not in sample


@pytest.mark.parametrize(
    "how, expected", [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5]), ("error", None)]
)
def test_truncation(how, expected):
    if expected is None:
        with pytest.raises(ValueError, match="5 tokens exceed the limit of 3"):
            truncate_ids([1, 2, 3, 4, 5], 3, how)
    else:
        assert truncate_ids([1, 2, 3, 4, 5], 3, how) == expected
    assert truncate_ids([1, 2, 3], 3, how) == [1, 2, 3]
    assert how == "error" or truncate_ids([1, 2, 3], 0, how) == []


CALL_TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endif %}{% endfor %}"
)


def call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


def texts_of(rows, tmp_path, *suffixes):
    """(prompts, samples) of the rows, written in each format."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CALL_TEMPLATE
    for suffix in suffixes:
        dataset = RLHFDataset(write(tmp_path / f"d{suffix}", rows), tokenizer, config(max_prompt_length=64))
        yield [dataset.prompt_text(i) for i in range(len(dataset))], [dataset[i] for i in range(len(dataset))]


def test_parquet_renders_what_json_renders(tmp_path):
    """Parquet gives every struct the keys of all rows: nulls at any depth that nobody wrote."""
    first = [{"role": "user", "content": "1"}, call("add", a={"x": [1]}), {"role": "tool", "content": "2"}]
    rows = [row(prompt=first), row(prompt=[{"role": "user", "content": "3"}, call("sub", a={"y": ["u", "v"]}, b=2)])]
    (parquet, samples), (lines, plain) = texts_of(rows, tmp_path, ".parquet", ".jsonl")
    assert parquet == lines == [
        '<user>1<assistant>{"name": "add", "arguments": {"a": {"x": [1]}}}<tool>2',
        '<user>3<assistant>{"name": "sub", "arguments": {"a": {"y": ["u", "v"]}, "b": 2}}',
    ]
    assert [sample["raw_prompt"] for sample in samples] == [sample["raw_prompt"] for sample in plain]
    assert samples[0]["raw_prompt"][1]["content"] is None  # a turn of calls alone, as json has it


def test_nulls_that_the_user_wrote_stay_in_arguments_of_json(tmp_path):
    rows = [row(prompt=[{"role": "user", "content": "1", "name": None}, call("add", a=None)])]
    ((texts, samples),) = texts_of(rows, tmp_path, ".jsonl")
    assert texts == ['<user>1<assistant>{"name": "add", "arguments": {"a": null}}']
    assert samples[0]["raw_prompt"][0] == {"role": "user", "content": "1"}


def test_kwargs_of_tools_and_interactions_have_no_nulls_of_parquet(tmp_path):
    kwargs = [{"add": {"create_kwargs": {"x": 1}}}, {"sub": {"create_kwargs": {"y": [None, 2]}}}]
    rows = [row(extra_info={"tools_kwargs": each, "interaction_kwargs": {f"k{i}": i}}) for i, each in enumerate(kwargs)]
    ((_, samples),) = texts_of(rows, tmp_path, ".parquet")
    assert [sample["tools_kwargs"] for sample in samples] == kwargs
    assert [sample["interaction_kwargs"] for sample in samples] == [{"k0": 0}, {"k1": 1}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_text_parts_are_joined_and_other_parts_refused(tmp_path, suffix):
    parts = [{"type": "text", "text": "1 "}, {"type": "text", "text": "+ 2"}]
    ((texts, samples),) = texts_of([row(prompt=[{"role": "user", "content": parts}])], tmp_path, suffix)
    assert texts == ["<user>1 + 2"] and samples[0]["raw_prompt"][0]["content"] == "1 + 2"
    parts[1] = {"type": "image_url", "image_url": {"url": "a.png"}}
    file = write(tmp_path / f"image{suffix}", [row(prompt=[{"role": "user", "content": parts}])])
    with pytest.raises(DatasetError, match=r"row 0: column 'prompt', message 0 has a part of type 'image_url'"):
        RLHFDataset(file, TOKENIZER, config())[0]


@pytest.mark.parametrize("column", ["images", "image", "videos", "audio"])
def test_columns_of_images_are_refused_by_name(tmp_path, column):
    rows = [row(**{column: []}), row(**{column: [{"bytes": "x"}]})]
    with pytest.raises(DatasetError, match=rf"d.jsonl, row 1: column '{column}' has images"):
        RLHFDataset(write(tmp_path / "d.jsonl", rows), TOKENIZER, config())
    assert len(RLHFDataset(write(tmp_path / "d.jsonl", rows[:1]), TOKENIZER, config())) == 1  # empty everywhere


def test_files_with_other_columns_train_together(tmp_path):
    first, second = row(ability="math"), row(level=2)
    del second["extra_info"]
    files = [write(tmp_path / "a.parquet", [first]), write(tmp_path / "b.jsonl", [second, {**second, "more": 1}])]
    dataset = RLHFDataset(files, TOKENIZER, config())
    batch = collate_fn([dataset[i] for i in range(3)])
    assert batch["ability"].tolist() == ["math", None, None]
    assert batch["level"].tolist() == [None, 2, 2] and batch["more"].tolist() == [None, None, 1]
    assert batch["extra_info"].tolist() == [{"index": 5, "split": "train"}, None, None]
    assert batch["index"].tolist() == [5, 1, 2]


def test_a_prompt_that_cannot_be_encoded_is_refused_with_file_and_row(tmp_path):
    file = write(tmp_path / "d.jsonl", [row("1 \ud83d\ude00 2"), row("1 \ud83c 2")])  # a whole pair, half a pair
    dataset = RLHFDataset(file, TOKENIZER, config(max_prompt_length=9))
    assert dataset[0]["raw_prompt"][0]["content"] == "1 \U0001f600 2"
    with pytest.raises(DatasetError, match=r"d.jsonl, row 1: its text has half a surrogate pair \('\\ud83c'\)"):
        dataset[1]
    with pytest.raises(DatasetError, match="d.jsonl, row 1: its text has half"):
        RLHFDataset(file, TOKENIZER, config(filter_overlong_prompts=True))


def test_an_overlong_prompt_is_an_error_that_names_it_or_is_cut_and_counted(tmp_path):
    file = write(tmp_path / "d.jsonl", [row("1"), row("1 + 2 + 3 + 4 + 5"), row("1 + 2 + 3 + 4 + 6")])
    dataset = RLHFDataset(file, TOKENIZER, config())
    dataset[0]
    with pytest.raises(DatasetError, match=r"d.jsonl, row 1: the prompt has 13 tokens, data.max_prompt_length=8"):
        dataset[1]
    full = RLHFDataset(file, TOKENIZER, config(max_prompt_length=50))[1]["raw_prompt_ids"]
    cut = RLHFDataset(file, TOKENIZER, config(truncation="left"))
    assert cut[1]["raw_prompt_ids"] == cut[1]["input_ids"].tolist() == full[-8:]
    with pytest.raises(ValueError, match="data.truncation='lef'"):
        RLHFDataset(file, TOKENIZER, config(truncation="lef"))
    (problem,) = row_problems(cut, "data.train_files", 10, lambda row: None)
    said = "d.jsonl: 2 of 3, the first is row 1. Raise data.max_prompt_length."
    assert problem.kind == "unused" and said in problem.message


def test_overlong_prompts_are_dropped_and_counted(tmp_path):
    file = write(tmp_path / "d.jsonl", [row("1 + 2 + 3 + 4 + 5"), row("1"), row("1 + 2 + 3 + 4 + 6")])
    dataset = RLHFDataset(file, TOKENIZER, config(filter_overlong_prompts=True))
    assert (len(dataset), dataset.dropped_overlong) == (1, 2)
    assert dataset.error(0, "x").args[0].endswith("row 1: x")  # still says where the row came from
    (problem,) = row_problems(dataset, "data.train_files", 10, lambda row: None)
    assert "data.train_files: 2 of 3 rows are left out (data.filter_overlong_prompts)" in problem.message
    with pytest.raises(DatasetError, match="every one of 3 prompts"):
        RLHFDataset(file, TOKENIZER, config(filter_overlong_prompts=True, max_prompt_length=2))


def test_full_prompts_and_files_in_shared_memory(tmp_path):
    file = write(tmp_path / "d.jsonl", [row("1"), row("2")])
    dataset = RLHFDataset(file, TOKENIZER, config(return_full_prompt=True, use_shm=True))
    copied = Path(copy_to_shm(str(file)))
    shutil.rmtree(copied.parent)
    assert copied.is_relative_to("/dev/shm") and dataset.error(1, "x").args[0].startswith(str(file))
    sample = dataset[1]
    assert TOKENIZER(sample["full_prompts"], add_special_tokens=False)["input_ids"] == sample["raw_prompt_ids"]
    assert "full_prompts" not in RLHFDataset(file, TOKENIZER, config())[1]


@pytest.mark.process
def test_several_processes_filter_alike_and_name_a_bad_row(tmp_path):
    rows = [row("1 + 2 + 3 + 4 + 5"), row("1"), row("2"), row("1 + 2 + 3 + 4 + 6"), row("3")]
    several = config(filter_overlong_prompts=True, filter_overlong_prompts_workers=2)
    dataset = RLHFDataset(write(tmp_path / "d.jsonl", rows), TOKENIZER, several)
    assert [dataset[i]["raw_prompt"][0]["content"] for i in range(len(dataset))] == ["1", "2", "3"]
    with pytest.raises(DatasetError, match="row 1: column 'prompt' is a string"):
        RLHFDataset(write(tmp_path / "e.json", [row(), {"prompt": "text"}]), TOKENIZER, several)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"prompt": "1 + 2"}, "row 1: column 'prompt' is a string; expected a list of {role, content}. Wrap it"),
        ({"prompt": []}, "row 1: column 'prompt' is an empty list; expected a list of {role, content}. Fill it"),
        ({"prompt": [{"role": "user"}]}, "row 1: column 'prompt', message 0"),
        ({"prompt": [{"role": "user", "content": [["1"]]}]}, "message 0 has a part of type 'list'"),
        ({"question": "1"}, "row 1: there is no column 'prompt'"),
    ],
)
def test_a_bad_row_is_named(tmp_path, bad, message):
    dataset = RLHFDataset(write(tmp_path / "d.json", [row(), bad]), TOKENIZER, config())
    with pytest.raises(DatasetError, match=message.replace("{", r"\{").replace("}", r"\}")):
        dataset[1]


def test_the_filter_reads_many_rows_as_one_by_one_and_names_the_bad_one(tmp_path):
    rows = [row(" + ".join("1" * (1 + i % 5))) for i in range(200)]
    filtered = RLHFDataset(write(tmp_path / "d.jsonl", rows), TOKENIZER, config(filter_overlong_prompts=True))
    whole = RLHFDataset(write(tmp_path / "d.jsonl", rows), TOKENIZER, config())
    kept = [i for i in range(200) if len(whole.prompt_ids(i)) <= 8]
    assert 0 < len(kept) < 200 and filtered.dropped_overlong == 200 - len(kept)
    assert [filtered.prompt_ids(i) for i in range(len(kept))] == [whole.prompt_ids(i) for i in kept]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if messages[0].content == '9' %}{{ raise_exception('nine') }}{% endif %}q"
    file = write(tmp_path / "d.jsonl", [*rows[:130], row("9"), *rows[:3]])
    with pytest.raises(DatasetError, match="d.jsonl, row 130: the chat template failed on column 'prompt'.*nine"):
        RLHFDataset(file, tokenizer, config(filter_overlong_prompts=True))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(DatasetError, match="none.parquet: file does not exist"):
        RLHFDataset(str(tmp_path / "none.parquet"), TOKENIZER, config())
    unusual = tmp_path / "unusual.jsonl"
    unusual.write_text('{"a": "x\u2028y"}\n\n', encoding="utf-8")  # a line separator within a text ends no line
    assert read_rows(unusual) == [{"a": "x\u2028y"}]
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"a": 1}\n{"a":')
    with pytest.raises(DatasetError, match="torn.jsonl: cannot be read as jsonl: .*line 2"):
        RLHFDataset(str(torn), TOKENIZER, config())
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"no parquet at all")
    with pytest.raises(DatasetError, match="broken.parquet: cannot be read as parquet"):
        RLHFDataset(str(broken), TOKENIZER, config())
    other = tmp_path / "d.csv"
    other.write_text("a")
    with pytest.raises(DatasetError, match="unknown kind of file '.csv'"):
        RLHFDataset(str(other), TOKENIZER, config())


def test_max_samples_is_a_seeded_subset(tmp_path):
    file = write(tmp_path / "d.jsonl", [row(str(i % 20)) for i in range(20)])

    def contents(**changes):
        dataset = RLHFDataset(file, TOKENIZER, config(**changes), max_samples=5)
        return [dataset[i]["raw_prompt"][0]["content"] for i in range(len(dataset))]

    assert contents(shuffle=False) == ["0", "1", "2", "3", "4"]
    assert contents(shuffle=True, seed=1) == contents(shuffle=True, seed=1) != contents(shuffle=True, seed=2)
    assert len(set(contents(shuffle=True, seed=1))) == 5
    assert not len(RLHFDataset(file, TOKENIZER, config(filter_overlong_prompts=True), max_samples=0))


def test_samples_with_other_columns_are_refused():
    with pytest.raises(ValueError, match="column 'b' is in 1 of 2 samples"):
        collate_fn([{"a": 1, "b": 2}, {"a": 1}])
