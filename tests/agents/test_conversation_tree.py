"""The record of requests that share prefixes: every generated token is trained once, after what the engine saw."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.agents.conversation import ConversationTree

IDS = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def requests(draw):
    """(prompt, generated) of requests that continue earlier ones, edit them or begin anew; few ids, so they collide."""
    made = []
    for _ in range(draw(st.integers(1, 12))):
        base = [7]
        if made and draw(st.integers(0, 5)):
            prompt, wrote = draw(st.sampled_from(made))
            base = prompt + wrote
            if draw(st.integers(0, 3)) == 0:
                base = base[: draw(st.integers(1, len(base)))]
        made.append((base + draw(IDS), draw(IDS)))
    return made


def tree_of(made):
    tree = ConversationTree()
    for number, (prompt, wrote) in enumerate(made):
        # The log-prob names the token: its request, and its place.
        tree.add(prompt, wrote, [float(100 * number + i) for i in range(len(wrote))], number)
    return tree


@given(requests())
def test_every_generated_token_is_trained_once_after_what_the_engine_saw(made):
    rows, trained = tree_of(made).rows(), {}
    for row in rows:
        assert len(row.response_ids) == len(row.response_mask) == len(row.response_logprobs)
        assert row.response_mask[0] == row.response_mask[-1] == 1
        spans = [version for version, start, end in row.versions for _ in range(start, end)]
        places = [i for i, mask in enumerate(row.response_mask) if mask]
        assert len(spans) == len(places)
        for version, place in zip(spans, places, strict=True):
            name = row.response_logprobs[place]
            assert name not in trained and version == name // 100
            trained[name] = row.ids[: len(row.prompt_ids) + place + 1]
        assert not any(value for value, mask in zip(row.response_logprobs, row.response_mask, strict=True) if not mask)
    expected = {}
    for number, (prompt, wrote) in enumerate(made):
        expected |= {float(100 * number + i): prompt + wrote[: i + 1] for i in range(len(wrote))}
    assert trained == expected


@given(requests())
def test_the_tree_counts_the_turns_and_the_tokens_of_the_responses(made):
    tree = tree_of(made)
    rows = tree.rows()
    assert tree.response_length == sum(len(row.response_ids) for row in rows)
    assert tree.turns == sum(bool(wrote) for _, wrote in made)


@given(requests(), IDS, st.data())
def test_what_a_turn_adds_to_the_responses_is_known_before(made, more, data):
    tree = tree_of(made)
    base = data.draw(st.sampled_from(made))
    prompt = [*base[0], *base[1], *more]
    before, appended = tree.response_length, tree.appended(prompt)
    tree.add(prompt, [1], [0.5], 0)
    assert tree.response_length <= before + appended + 1


def test_each_branch_is_a_row():
    tree = ConversationTree()
    tree.add([1, 2], [3])
    tree.add([1, 2, 3, 4], [5])
    tree.add([1, 2], [3])  # another choice with the same tokens
    tree.add([1, 2, 3, 9], [5])  # the history was edited after the first turn
    tree.add([8], [5])  # a sub-agent
    rows = [(row.prompt_ids, row.response_ids) for row in tree.rows()]
    assert rows == [([1, 2], [3, 4, 5]), ([1, 2, 3, 9], [5]), ([1, 2], [3]), ([8], [5])]


def test_log_probs_are_given_for_every_token_of_every_turn_or_for_none():
    tree = ConversationTree()
    with pytest.raises(ValueError, match="1 log-probs for 2 generated tokens"):
        tree.add([1], [2, 3], [-1.0])
    tree.add([1], [2])
    with pytest.raises(ValueError, match="either all generated turns have log-probs, or none"):
        tree.add([1], [2], [-1.0])
