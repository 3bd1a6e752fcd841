"""Local files in GSM8K's and MATH's shape become the columns that the trainers read."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.data_preprocess import gsm8k, local_files, math_dataset
from tests.helpers.models import make_tokenizer
from verl.data.rl_dataset import RLHFDataset
from verl.reward.rules import default_compute_score

QUESTIONS = [
    {"question": "A has 3 apples and 4 pears. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "How far?", "answer": "far\n#### -1,200"},
]
PROBLEMS = [
    {"problem": "What is 1/2 + 1/2?", "solution": "It is \\boxed{2}, no: $\\boxed{\\frac{2}{2}}$.", "level": "1"},
    {"problem": "x?", "solution": "\\boxed{x^{2}+\\{1\\}}"},
]


def write(file, rows):
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        with open(file, "w", newline="") as f:
            writer = csv.DictWriter(f, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", local_files.KINDS)
def test_gsm8k_of_every_kind_of_file(tmp_path, kind, capsys):
    write(tmp_path / f"train{kind}", QUESTIONS)
    write(tmp_path / f"test{kind}", QUESTIONS[:1])
    given = ["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")]
    local_files.run(gsm8k.convert, "", "unused", given)
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / f"{s}.parquet") for s in ("train", "test")]
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["7", "-1200"]
    assert rows[0]["data_source"] == "openai/gsm8k" and rows[1]["extra_info"]["index"] == 1
    assert default_compute_score("openai/gsm8k", QUESTIONS[1]["answer"], "-1200") == 1.0
    config = {"max_prompt_length": 60, "truncation": "left"}
    sample = RLHFDataset(str(tmp_path / "out" / "test.parquet"), make_tokenizer(), config)[0]
    assert sample["raw_prompt"][0]["content"].startswith("A has 3 apples")


def test_math_takes_the_last_box_with_its_braces(tmp_path):
    write(tmp_path / "train.jsonl", PROBLEMS)
    (written,) = local_files.save(math_dataset.convert, tmp_path / "train.jsonl", tmp_path / "out")
    rows = pq.read_table(written).to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["\\frac{2}{2}", "x^{2}+\\{1\\}"]
    assert rows[0]["prompt"][0]["content"].endswith("within \\boxed{}.")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([QUESTIONS[0], {"question": "q", "answer": "no figure"}], "train.jsonl, row 1: the answer does not end in"),
        ([{"question": "q"}], "row 0: column 'answer' holds no text; the columns are question"),
        ([], "train.jsonl: no rows"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path, rows, message):
    write(tmp_path / "train.jsonl", rows)
    with pytest.raises(SystemExit, match=message):
        local_files.run(gsm8k.convert, "", str(tmp_path / "out"), ["--local_dataset_path", str(tmp_path)])
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_folder_is_named_before_rows_are_read(tmp_path, capsys):
    (tmp_path / "taken").touch()
    for option in ("--local_save_dir", "--local_dir"):
        with pytest.raises(SystemExit):
            given = ["--local_dataset_path", str(tmp_path / "none"), option, str(tmp_path / "taken")]
            local_files.run(gsm8k.convert, "", "unused", given)
        assert f"argument {option}: {tmp_path}/taken cannot be written" in capsys.readouterr().err


def test_folders_without_a_data_set_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="no train"):
        local_files.run(gsm8k.convert, "", "out", ["--local_dataset_path", str(tmp_path)])
    for name in ("train-0.jsonl", "train-1.jsonl"):
        write(tmp_path / name, QUESTIONS)
    with pytest.raises(SystemExit, match="train-0.jsonl, train-1.jsonl all look like one split"):
        local_files.run(gsm8k.convert, "", "out", ["--local_dataset_path", str(tmp_path)])
    write(tmp_path / "one.jsonl", [{"problem": "p", "solution": "\\boxed{1"}])
    with pytest.raises(SystemExit, match="the braces of"):
        given = ["--local_dataset_path", str(tmp_path / "one.jsonl")]
        local_files.run(math_dataset.convert, "", str(tmp_path / "o"), given)
