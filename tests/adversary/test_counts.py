"""Ids that a client of a served scorer may ask for: it gets the counts of its own response only."""

import pytest

from recipe.spd.vllm_plugin.judge import of_response

OWN, OTHER = "cmpl-" + "5f" * 16, "cmpl-" + "5e" * 16
COUNTS = {f"{OWN}-0-1a2b3c4d": 1, f"{OWN}-1": 2, f"{OTHER}-0-1a2b3c4d": 3, OTHER: 4, "chatcmpl-" + "5f" * 16: 5}


def test_a_response_has_the_counts_of_its_requests():
    assert of_response(COUNTS, OWN) == {f"{OWN}-0-1a2b3c4d": 1, f"{OWN}-1": 2}


def test_a_response_with_several_answers_has_the_counts_of_each():
    """vLLM puts the number of the answer before the id."""
    answers = {f"0_{OWN}-0-1a2b3c4d": 1, f"1_{OWN}-0-1a2b3c4d": 2}
    assert of_response(answers | {f"0_{OTHER}-0-1a2b3c4d": 3}, OWN) == answers
    assert of_response(answers, "0") == of_response(answers, "cmpl") == {}


@pytest.mark.parametrize("asked", ["", "c", "cmpl", "cmpl-", "chat", "chatcmpl-", OTHER[:-1], OTHER[:20], ".*",
                                   "cmpl-.*", "%", "*", "cmpl-5", OTHER + "-", "-", "/"])  # fmt: skip
def test_part_of_an_id_lists_nothing(asked):
    assert of_response(COUNTS, asked) == {}
