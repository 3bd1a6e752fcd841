"""Offsets of a drafted block under padding and truncation, and the rows that are refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from recipe.spd.data.blocks import resolve_sep_token_id
from recipe.spd.data.columns import TableRows
from recipe.spd.data.dataset import SPDRLHFDataset
from tests.helpers.models import make_tokenizer

SEP = 3
TOKENIZER = make_tokenizer()


def row(context, draft, target, **changes):
    extra = {
        "index": 7, "context_ids": context, "draft_ids": draft, "target_ids": target, "is_correct_baseline": 1,
    }  # fmt: skip
    return {
        "data_source": "spd_scorer", "prompt": "q", "sep_token_id": SEP, "extra_info": extra,
        "reward_model": {"style": "rule", "ground_truth": "4"}, **changes,
    }  # fmt: skip


def dataset(tmp_path, rows, width=32, gamma=8):
    file = tmp_path / "blocks.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = OmegaConf.create(
        {"max_prompt_length": width, "max_response_length": gamma, "shuffle": False, "seed": None}
    )
    return SPDRLHFDataset(str(file), TOKENIZER, config)


@given(st.integers(1, 30), st.integers(1, 8), st.integers(21, 60), st.randoms(use_true_random=False))
def test_offsets_point_at_the_block_whatever_the_width(tmp_path_factory, context_len, gamma, width, random):
    draw = lambda n: [random.randrange(5, 40) for _ in range(n)]  # noqa: E731
    context, draft, target = draw(context_len), draw(gamma), draw(gamma + 1)
    item = dataset(tmp_path_factory.mktemp("d"), [row(context, draft, target)], width=width)[0]
    start, kept, draft_start, draft_len, target_start = item["spd_layout"].tolist()
    ids = item["input_ids"].tolist()
    assert len(ids) == width and ids[draft_start : draft_start + draft_len] == draft
    assert ids[target_start : target_start + gamma + 1] == target
    assert ids[start : start + kept] == context[-kept:] and kept == min(context_len, width - 2 * gamma - 4)
    assert ids[draft_start - 1] == ids[target_start - 1] == ids[-1] == SEP
    assert item["attention_mask"].tolist() == [0] * start + [1] * (width - start)
    assert item["extra_info"]["draft_start"] == item["rollout_info"]["draft_start"] == draft_start
    assert item["extra_info"]["context_len"] == kept and item["extra_info"]["context_ids"] == context


@pytest.mark.parametrize(
    "changes, width, gamma, message",
    [
        ({}, 11, 1, "row 1: the draft has 2 tokens, data.max_response_length=1. Raise it to 2"),
        ({}, 8, 8, "row 1: draft and target .* need 9 tokens, data.max_prompt_length=8 would cut the draft"),
        ({"extra_info": {"context_ids": [5]}}, 32, 8, "row 1: extra_info lacks draft_ids"),
    ],
)
def test_bad_rows_are_refused_by_file_and_row(tmp_path, changes, width, gamma, message):
    good = row([5], [8], [9, 9])
    with pytest.raises(ValueError, match=r"blocks.jsonl, " + message):
        dataset(tmp_path, [good, row([5, 6], [8, 9], [8, 10, 11], **changes)], width, gamma)


def test_separator_comes_from_environment_then_tokenizer_then_reserved(monkeypatch):
    assert resolve_sep_token_id(TOKENIZER) == 3
    monkeypatch.setenv("SPD_SEP_TOKEN_ID", "9")
    assert resolve_sep_token_id(TOKENIZER) == 9
    monkeypatch.setenv("SPD_SEP_TOKEN_ID", "9999")
    with pytest.raises(ValueError, match="SPD_SEP_TOKEN_ID='9999'"):
        resolve_sep_token_id(TOKENIZER)
    monkeypatch.delenv("SPD_SEP_TOKEN_ID")
    other = make_tokenizer()
    other.sep_token = None
    with pytest.raises(ValueError, match="an own backbone reads a separator.* set SPD_SEP_TOKEN_ID"):
        resolve_sep_token_id(other)
    assert resolve_sep_token_id(other, read=False) == other.pad_token_id  # a target head sees none
    other.add_special_tokens(
        {"additional_special_tokens": ["<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]}
    )
    assert resolve_sep_token_id(other) == other.convert_tokens_to_ids("<|reserved_special_token_0|>")


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    config = OmegaConf.create({"max_prompt_length": 32, "max_response_length": 8, "shuffle": True, "seed": 3})
    return SPDRLHFDataset, (str(path), TOKENIZER, config)


def test_a_parquet_file_stays_in_columns_and_gives_the_rows_of_a_jsonl_file(tmp_path):
    rows = [row(list(range(4, 6 + i % 20)), [8] * (1 + i % 3), [9] * (2 + i % 3)) for i in range(5000)]
    plain = dataset(tmp_path, rows)
    make, given = parquet(tmp_path / "blocks.parquet", rows)
    data = make(*given)
    assert isinstance(data.rows, TableRows)
    for i in (0, 1, 2047, 2048, 4999):
        mine, theirs = data[i], plain[i]
        for name in ("input_ids", "attention_mask", "position_ids", "spd_layout"):
            assert torch.equal(mine.pop(name), theirs.pop(name))
        assert mine == theirs
    assert set(data.separators) == {SEP} and data.largest_ids[:20].tolist() == [max(9, 5 + i % 20) for i in range(20)]
    drawn = make(*given, max_samples=7)
    assert len(drawn) == 7 and [r["extra_info"] for r in drawn.rows] == [
        rows[number]["extra_info"] for _, number in drawn.origins]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_files_of_both_kinds_are_read_together(tmp_path, order):
    rows = [row(list(range(4, 6 + i)), [8], [9, 9]) for i in range(6)]
    make, (path, *given) = parquet(tmp_path / "blocks.parquet", rows[:3])
    lines = tmp_path / "more.jsonl"
    lines.write_text("".join(json.dumps(r) + "\n" for r in rows[3:]))
    files = [path, str(lines)]
    data = make([files[i] for i in order], *given)
    halves = [rows[:3], rows[3:]]
    assert [r["extra_info"] for r in data.rows] == [r["extra_info"] for i in order for r in halves[i]]


def test_ground_truths_may_be_numbers(tmp_path):
    rows = [row([4, 5], [8], [9, 9]) for _ in range(3)]
    for number, r in enumerate(rows):
        r["reward_model"] = {**r["reward_model"], "ground_truth": number}
    make, given = parquet(tmp_path / "blocks.parquet", rows)
    assert len(make(*given)) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.update(sep_token_id=-1), lambda r: r.update(sep_token_id=10**6),
        lambda r: r["extra_info"].update(context_ids=[5, 59]), lambda r: r["extra_info"].update(target_ids=[9]),
        lambda r: r.update(sep_token_id=None), lambda r: r["extra_info"].update(draft_ids=[8, 9, 10]),
        lambda r: r["extra_info"].update(is_correct_baseline=2), lambda r: r["extra_info"].update(baseline_length=-1),
        lambda r: r["extra_info"].update(is_correct_baseline=None), lambda r: r.update(reward_model=None),
        lambda r: r["reward_model"].update(ground_truth=" "),
        lambda r: r["extra_info"].update(draft_ids=[], target_ids=[9]),
        lambda r: r["extra_info"].update(context_ids=[]),
    ],
)  # fmt: skip
def test_a_wrong_row_is_refused_alike_in_both_kinds_of_files(tmp_path, change):
    rows = [row([5 + i, 6], [8, 9], [8, 10, 11]) for i in range(6)]
    for r in rows:
        r["extra_info"]["baseline_length"] = 4
    change(rows[4])
    with pytest.raises(ValueError, match="row 4: ") as refused:
        dataset(tmp_path, rows)
    make, given = parquet(tmp_path / "blocks.parquet", rows)
    with pytest.raises(ValueError, match="row 4: ") as refused_too:
        make(*given)
    said, again = (str(error.value).split("row 4: ")[1] for error in (refused, refused_too))
    assert said == again
