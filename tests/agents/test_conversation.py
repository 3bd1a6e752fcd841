"""The records of conversations, templates that cannot continue them, and the routing of requests."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.models import make_tokenizer
from verl.agents.conversation import Conversation, ConversationTree
from verl.agents.message_encoder import MessageEncoder
from verl.utils import request_router
from verl.utils.http_json import ServerUnreachable
from verl.utils.request_router import RequestRouter

IDS = st.lists(st.integers(0, 99), max_size=5)


@given(IDS, st.lists(st.tuples(st.booleans(), IDS)))
def test_the_record_is_what_the_engine_saw(prompt, turns):
    conversation, seen = Conversation(list(prompt)), list(prompt)
    for version, (generated, ids) in enumerate(turns):
        if generated:
            assert conversation.ids == seen
            conversation.add_generated(ids, [-float(i) for i in ids], version)
        else:
            conversation.add_given(ids)
        seen += ids
    assert conversation.ids == seen
    expected = [(token, int(generated)) for generated, ids in turns for token in ids]
    assert list(zip(conversation.response_ids, conversation.response_mask, strict=True)) == expected
    if any(generated for generated, _ in turns):
        assert conversation.response_logprobs == [-float(token) * mask for token, mask in expected]
    else:
        assert conversation.response_logprobs is None
    assert [v for v, _, _ in conversation.versions] == [v for v, (generated, _) in enumerate(turns) if generated]


@pytest.mark.parametrize("add", [Conversation([1]).add_generated, partial(ConversationTree().add, [1])])
def test_log_probs_are_complete_or_absent(add):
    with pytest.raises(ValueError, match="1 log-probs for 2 generated tokens"):
        add([1, 2], [0.0])
    add([1], [-1.0])
    with pytest.raises(ValueError, match="either all generated turns have log-probs, or none"):
        add([1])


CHATML = (
    "{% for m in messages %}<|im_start|> {{ m.role }}\n {{ m.content }} <|im_end|> \n {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant\n {% endif %}"
)
WORDS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "user", "tool", "assistant", "system", "4"]


@pytest.mark.parametrize(
    ("template", "stop", "message"),
    [
        ("{% for m in messages %}{{ raise_exception('no') if m.role == 'tool' }}{{ m.content }} <|im_end|> "
         "{% endfor %}", "<|im_end|>", "role 'tool' cannot be added by the chat template: .*raised.*: no"),
        (CHATML, "<|endoftext|>", "ends the turn before with none of the stop tokens"),
        (CHATML.replace("m.content", "m.content if loop.last else 4"), "<|im_end|>", "renders earlier turns different"),
    ],
)  # fmt: skip
def test_a_template_for_which_the_rule_does_not_hold_is_refused(template, stop, message):
    tokenizer = make_tokenizer(WORDS)
    tokenizer.chat_template = template
    made = MessageEncoder(tokenizer, [tokenizer.convert_tokens_to_ids(stop)])
    with pytest.raises(ValueError, match=message):
        made.check(["tool"])


def test_routing_is_sticky_within_its_margin_and_skips_lost_servers():
    router = RequestRouter(2, margin=2)
    assert router.acquire("a") == 0
    assert [router.acquire("a"), router.acquire("a")] == [0, 0]  # 3 against 0: one more than the margin
    assert router.acquire("a") == 1 and router.running == [3, 1]
    router.release(0)
    assert router.acquire("a") == 1  # it moved
    router.release(1, lost=True)
    assert router.acquire("a") == 0
    router.release(0, lost=True)
    with pytest.raises(ServerUnreachable, match="no rollout server is left"):
        router.acquire("b")


def test_requests_of_dead_workers_and_lost_servers_are_forgotten():
    router = RequestRouter(2)
    assert [router.acquire(name) for name in "abc"] == [0, 1, 0]
    router.release(1, lost=True)
    router.reset(lost=False)
    assert router.running == [0, 0] and router.lost == {1}
    router.release(0)  # of a request that ran meanwhile
    assert router.running == [0, 0]
    router.reset()
    assert router.lost == set() and router.acquire("b") == 1


def test_the_router_forgets_the_oldest_conversation():
    router = RequestRouter(2, max_cache_size=2)
    for name in "abc":
        router.release(router.acquire(name))
    assert list(router.server_of) == ["b", "c"]


def test_a_failed_server_is_used_last_while_it_backs_off(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(request_router.time, "monotonic", lambda: now[0])
    router = RequestRouter(2, backoff_s=10.0, max_backoff_s=30.0)
    assert [router.acquire(weight=3), router.acquire(), router.acquire()] == [0, 1, 1] and router.running == [3, 2]
    router.release(1, lost=True)
    assert router.acquire(exclude=[0]) == 1 and router.acquire(exclude=[0, 1]) == 0
    router.release(1, lost=True)  # it was in flight when the back-off began
    now[0] += 9.9
    assert router.acquire() == 0
    now[0] += 0.2
    assert router.acquire() == 1
    for seconds in (20, 30, 30):  # doubled, up to the limit
        router.release(1, lost=True)
        now[0] += seconds - 0.1
        assert router.acquire() == 0
        now[0] += 0.2
        assert router.acquire() == 1
    router.release(1)
    router.release(1, lost=True)
    now[0] += 10.1
    assert router.acquire() == 1  # after a success the back-off is the first one again


FEW_IDS = st.lists(st.integers(0, 2), max_size=4)


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
        made.append((base + draw(FEW_IDS), draw(FEW_IDS)))
    return made


def tree_of(made):
    tree = ConversationTree()
    for number, (prompt, wrote) in enumerate(made):
        # The log-prob names the token: its request, and its place.
        tree.add(prompt, wrote, [float(100 * number + i) for i in range(len(wrote))], number)
    return tree


@given(requests())
def test_every_generated_token_is_trained_once_after_what_the_engine_saw(made):
    tree = tree_of(made)
    rows, trained = tree.rows(), {}
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
    assert tree.response_length == sum(len(row.response_ids) for row in rows)
    assert tree.turns == sum(bool(wrote) for _, wrote in made)


@given(requests(), FEW_IDS, st.data())
def test_what_a_turn_adds_to_the_responses_is_known_before(made, more, data):
    tree = tree_of(made)
    base = data.draw(st.sampled_from(made))
    prompt = [*base[0], *base[1], *more]
    before, appended = tree.response_length, tree.appended(prompt)
    tree.add(prompt, [1], [0.5], 0)
    assert tree.response_length <= before + appended + 1


def test_a_conversation_that_grows_stays_one_row_though_a_longer_answer_begins_with_it():
    tree = ConversationTree()
    tree.add([7], [1, 2])
    tree.add([7], [1, 2, 3])
    assert tree.appended([7, 1, 2, 9]) == 1
    tree.add([7, 1, 2, 9], [4])
    assert [(row.prompt_ids, row.response_ids) for row in tree.rows()] == [([7], [1, 2, 9, 4]), ([7], [1, 2, 3])]
