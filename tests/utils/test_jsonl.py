"""Lines of JSON: empty ones are passed over, a torn one is named."""

import pytest

from verl.utils.jsonl import read_objects


def test_objects_come_with_their_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n{"a": "x\u2028y"}\n', encoding="utf-8")
    assert list(read_objects(file)) == [(1, {"a": 1}), (3, {"a": "x\u2028y"})]


@pytest.mark.parametrize(("line", "said"), [('{"a": ', "no JSON"), ("[1, 2]", r"\[1, 2\] is no object")])
def test_a_wrong_line_is_named_with_its_file(tmp_path, line, said):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 2: .*{said}"):
        list(read_objects(file))
