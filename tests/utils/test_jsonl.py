"""Lines of JSON: empty ones are skipped, an invalid one is named, an unfinished one may be left out."""

import pytest

from verl.utils.jsonl import read_objects


def test_objects_come_with_their_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n{"a": "x\u2028y"}\n', encoding="utf-8")
    assert list(read_objects(file)) == [(1, {"a": 1}), (3, {"a": "x\u2028y"})]


@pytest.mark.parametrize(("line", "message"), [('{"a": ', "not JSON"), ("[1, 2]", r"\[1, 2\] is not an object")])
def test_a_wrong_line_is_named_with_its_file(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 2: .*{message}"):
        list(read_objects(file))


def test_a_growing_file_may_be_missing_or_end_in_the_middle_of_a_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert list(read_objects(file, growing=True)) == []
    file.write_text('{"a": 1}\n{"a": ')
    assert list(read_objects(file, growing=True)) == [(1, {"a": 1})]
    file.write_text('{"a": \n{"a": 2}\n')
    with pytest.raises(ValueError, match="rows.jsonl, line 1: not JSON"):
        list(read_objects(file, growing=True))
