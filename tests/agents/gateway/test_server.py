"""The real openai client against the gateway: what it gets, and what is recorded of it."""

import asyncio
import json
from unittest.mock import Mock

import httpx
import openai
import pytest

from tests.agents.gateway.parts import CALL, LOOKUP, USER, client_of, session_of
from verl.agents.gateway import responses_api
from verl.agents.gateway.server import Gateway
from verl.agents.message_encoder import NotAppendable
from verl.rollout.replica import TokenOutput
from verl.utils.http_json import ServerUnreachable


def scripted(*answers):
    left = list(answers)
    return lambda prompt: left.pop(0) if left else "so<|im_end|>"


async def ask(client, messages=(USER,), **more):
    return await client.chat.completions.create(model="m", messages=list(messages), **more)


async def test_a_conversation_with_a_tool_is_one_row_of_what_the_engine_saw():
    session = session_of(scripted(f"<think>\nWell.\n</think>\n\n{CALL}", "It is 42.<|im_end|>"))
    async with client_of(session) as client:
        first = await ask(client, tools=[LOOKUP])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls" and message.content is None
        assert message.reasoning_content == "Well."
        (call,) = message.tool_calls
        assert call.function.name == "lookup" and json.loads(call.function.arguments) == {"key": "sky"}
        answered = [USER, {"role": "assistant", "tool_calls": [call.to_dict()]},
                    {"role": "tool", "tool_call_id": call.id, "content": "42"}]  # fmt: skip
        second = await ask(client, answered, tools=[LOOKUP])
        assert second.choices[0].message.content == "It is 42." and second.choices[0].finish_reason == "stop"
        assert second.usage.prompt_tokens == len(session.settings.server_manager.asked[1][0])
    (row,) = session.tree.rows()
    (prompt, wrote, log_probs, _), (later, last, last_log_probs, _) = session.settings.server_manager.asked
    assert row.prompt_ids == prompt and later[: len(prompt) + len(wrote)] == prompt + wrote
    assert row.ids == later + last and second.usage.completion_tokens == len(last)
    assert [value for value, mask in zip(row.response_logprobs, row.response_mask, strict=True) if mask] == (
        log_probs + last_log_probs
    )
    text = session.settings.encoder.tokenizer.decode(later[len(prompt) + len(wrote) :])
    assert text == "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


async def test_an_edited_history_and_a_sub_agent_are_branches():
    session = session_of(scripted("a<|im_end|>", "b<|im_end|>", "c<|im_end|>", "d<|im_end|>"))
    first = [USER, {"role": "assistant", "content": "a"}]
    async with client_of(session) as client:
        await ask(client)
        await ask(client, [*first, {"role": "user", "content": "x"}])
        await ask(client, [*first, {"role": "user", "content": "y"}])
        await ask(client, [{"role": "system", "content": "Plan."}, USER])
    rows = session.tree.rows()
    assert len(rows) == 3 and session.tree.turns == 4
    assert sum(sum(row.response_mask) for row in rows) == 8  # a letter and the end of each turn
    decode = session.settings.encoder.tokenizer.decode
    assert "a<|im_end|>\n<|im_start|>user\ny" in decode(rows[1].prompt_ids) and "Plan." in decode(rows[2].prompt_ids)


async def test_other_errors_of_the_encoder_do_not_pass_for_a_template_that_cannot_append(monkeypatch):
    session = session_of(scripted("a<|im_end|>"))
    first = await session.generate([USER])
    continued = [USER, first.choices[0].message, USER]
    encoder = session.settings.encoder
    monkeypatch.setattr(encoder, "encode_appended", Mock(side_effect=NotAppendable("no user")))
    await session.generate(continued)
    assert session.settings.server_manager.asked[1][0] == encoder.prompt(continued)
    monkeypatch.setattr(encoder, "encode_appended", Mock(side_effect=ValueError("a fault")))
    with pytest.raises(ValueError, match="a fault"):
        await session.generate(continued)


async def test_several_choices_log_probs_limits_and_stops():
    session = session_of(scripted("one<|im_end|>", "two<|im_end|>", "a. b. c.<|im_end|>", "12345678"))
    async with client_of(session) as client:
        both = await ask(client, n=2, logprobs=True)
        assert [choice.message.content for choice in both.choices] == ["one", "two"]
        tokens = both.choices[1].logprobs.content
        assert "".join(token.token for token in tokens) == "two<|im_end|>"
        assert [token.logprob for token in tokens] == session.settings.server_manager.asked[1][2]
        stopped = await ask(client, stop=["x", "b."])
        assert stopped.choices[0].message.content == "a. " and stopped.choices[0].finish_reason == "stop"
        cut = await ask(client, max_tokens=4)
        assert cut.choices[0].message.content == "1234" and cut.choices[0].finish_reason == "length"
    decode = session.settings.encoder.tokenizer.decode
    written = [decode(row.response_ids) for row in session.tree.rows()]
    assert written == ["one<|im_end|>", "two<|im_end|>", "a. b.", "1234"]
    seeds = [asked[3]["seed"] for asked in session.settings.server_manager.asked]
    assert len(set(seeds)) == 4


async def test_streams_have_the_same_reply():
    session = session_of(scripted("Hello.<|im_end|>", CALL, "Hi.<|im_end|>", CALL))
    async with client_of(session) as client:
        stream = await ask(client, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello."
        assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens == 7
        async with client.chat.completions.stream(model="m", messages=[USER], tools=[LOOKUP]) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"key": "sky"}
        async with client.responses.stream(model="m", input="?") as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output_text == "Hi."
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        function = {"type": "function", **LOOKUP["function"]}
        async with client.responses.stream(model="m", input="?", tools=[function]) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert final.output[0].type == "function_call" and json.loads(final.output[0].arguments) == {"key": "sky"}
    assert session.tree.turns == 4


@pytest.mark.parametrize("by_id", [True, False])
async def test_the_responses_api_continues_a_conversation(by_id):
    session = session_of(scripted("<think>\nWell.\n</think>\n\nOne moment." + CALL, "It is 42.<|im_end|>"))
    function = {"type": "function", **LOOKUP["function"]}
    async with client_of(session) as client:
        first = await client.responses.create(model="m", instructions="Be short.", input="?", tools=[function])
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "42"}
        kept = {"previous_response_id": first.id, "input": [result]}
        if not by_id:
            kept = {"input": [USER, *(item.to_dict() for item in first.output), result]}
        second = await client.responses.create(model="m", instructions="Be short.", tools=[function], **kept)
        assert second.output_text == "It is 42." and second.status == "completed"
    (row,) = session.tree.rows()
    assert row.ids == sum(session.settings.server_manager.asked[1][:2], [])


def test_items_of_a_reply_are_one_message_and_no_text_is_lost():
    said = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    messages = responses_api._chat_messages([said[0], said[1], call, said[0]])
    assert [message["content"] for message in messages] == ["One.", "Two.", "One."]
    assert [len(message.get("tool_calls", ())) for message in messages] == [0, 1, 0]


async def test_a_session_sees_only_its_own_conversation():
    one, other = session_of(scripted("secret<|im_end|>")), session_of(scripted())
    gateway = Gateway()
    async with client_of(one, gateway) as client, client_of(other, gateway) as stranger:
        made = await client.responses.create(model="m", input="?")
        with pytest.raises(openai.NotFoundError, match="not a response of this session"):
            await stranger.responses.create(model="m", input="?", previous_response_id=made.id)
        for path in (f"/responses/{made.id}", "/chat/completions", f"/responses/{made.id}/input_items"):
            with pytest.raises(openai.APIStatusError):
                await stranger.get(path, cast_to=object)
        for key in ("guess", client.api_key[:-1]):
            with pytest.raises(openai.AuthenticationError):
                await stranger.with_options(api_key=key).models.list()
        await stranger.post("/reward", body={"reward": 1.0}, cast_to=object)
        await ask(stranger)
        late = client.api_key
        assert gateway.url.startswith("http://127.0.0.1:")
    async with client_of(other, gateway) as client:
        with pytest.raises(openai.AuthenticationError):
            await ask(client.with_options(api_key=late))
    assert one.reward is None and other.reward == 1.0 and one.tree.turns == other.tree.turns == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": 3}, "input=3 must be a text or a list of items"),
        ({"input": {"role": "user", "content": "?"}}, "input={.*} must be a text or a list of items"),
        ({"input": ["?"]}, r"input\[0\]=\? must be an object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type='item_reference' is not supported"),
        ({"input": [{"type": "reasoning", "content": "?"}]}, r"input\[0\].content=\? must be a list of parts"),
        ({"input": [{"type": "reasoning", "summary": [{"text": 3}]}]}, r"input\[0\].summary=.* must be a list"),
        ({"input": "?", "tools": 3}, "tools=3 must be a list of functions"),
        ({"input": "?", "tools": {"type": "function", "name": "f"}}, "tools={.*} must be a list of functions"),
        ({"input": "?", "text": "json"}, "text=json must be an object"),
        ({"input": "?", "text": {"format": {"type": "json_object"}}}, "text.format.type='json_object'"),
    ],
)
async def test_the_responses_api_names_a_field_of_a_wrong_type(body, said):
    session = session_of(scripted())
    async with client_of(session) as client:
        with pytest.raises(openai.BadRequestError, match=said):
            await client.post("/responses", body=body, cast_to=object)
    assert session.tree.turns == 0 and session.failure is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "king"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"messages": [USER], "n": 0}, "n=0 must be a positive integer"),
        ({"messages": [USER], "n": 999}, "at most 64"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "json_object"),
        ({"messages": [USER], "stop": [3]}, r"stop=\[3\] must be a text or a list of texts"),
        ({"messages": [USER], "stop": 3}, "stop=3 must be a text or a list of texts"),
        ({"messages": [USER], "stop": True}, "stop=True must be"),
        ({"messages": [USER], "stream": True, "stream_options": ["usage"]}, "stream_options=.*must be an object"),
        ({"messages": [USER], "top_logprobs": 3, "logprobs": True}, "top_logprobs=3: .* leave it out"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "function.name"),
        ({"messages": [{"role": "user", "content": "?" * 3000}]}, "rollout.prompt_length=3000"),
        ([], "JSON object"),
    ],
)  # fmt: skip
async def test_a_request_that_cannot_be_answered_is_refused_with_the_reason(body, said):
    session = session_of(scripted())
    async with client_of(session) as client:
        with pytest.raises(openai.BadRequestError, match=said):
            await client.post("/chat/completions", body=body, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="reward='much' must be a finite number"):
            await client.post("/reward", body={"reward": "much"}, cast_to=object)
    assert session.tree.turns == 0 and session.failure is None


async def test_the_responses_of_all_rows_have_response_length_tokens_at_most():
    session = session_of(lambda prompt: "x" * 1000, response_length=100, seconds=0.01)
    async with client_of(session) as client:

        async def one(i, **more):
            return await ask(client, [{"role": "user", "content": str(i)}], **more)

        async with asyncio.timeout(20):
            await asyncio.gather(*(one(i, max_tokens=20) for i in range(4)))
            assert session.settings.server_manager.most == 4
            replies = await asyncio.gather(*(one(i) for i in range(5, 8)), return_exceptions=True)
        assert sum(isinstance(reply, openai.BadRequestError) for reply in replies) == 2
        assert all(getattr(reply, "code", None) in (None, "context_length_exceeded") for reply in replies)
    assert session.tree.response_length == 100 and session.is_full


async def test_a_client_that_gives_up_and_asks_again_gets_one_turn():
    session = session_of(scripted("late<|im_end|>"), seconds=0.3)
    async with client_of(session) as client:
        engine = session.settings.server_manager
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.1).chat.completions.create(model="m", messages=[USER])
        await asyncio.sleep(0.5)
        assert session.tree.turns == 0 and not engine.asked and not session._reserved
        assert (await ask(client)).choices[0].message.content == "late"
    assert session.tree.turns == 1


async def test_failures_of_servers_are_errors_of_requests():
    def unreachable(prompt):
        raise ServerUnreachable("gone")

    stopped = TokenOutput(token_ids=[1], stop_reason="aborted")
    for answer, aborted in ((unreachable, False), (lambda prompt: stopped, True)):
        session = session_of(answer)
        async with client_of(session) as client:
            with pytest.raises(openai.InternalServerError):
                await ask(client)
        assert session.is_aborted == aborted and session.tree.turns == 0 and not session._reserved


async def test_64_agents_at_once_neither_lose_nor_double_a_turn():
    async def agent(number, gateway, http):
        session = session_of(lambda prompt: f"{number}<|im_end|>", seconds=0.002)
        async with gateway.serve(session) as (url, token):
            client = openai.AsyncOpenAI(base_url=url, api_key=token, http_client=http, max_retries=0)
            messages = [{"role": "user", "content": f"{number}?"}]
            for _ in range(3):
                message = (await ask(client, messages)).choices[0].message
                assert message.content == str(number)
                messages += [message.to_dict(), USER]
        (row,) = session.tree.rows()
        asked = session.settings.server_manager.asked
        assert len(asked) == session.tree.turns == len(row.versions) == 3 and row.ids == asked[-1][0] + asked[-1][1]

    gateway = Gateway()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        await asyncio.gather(*(agent(i, gateway, http) for i in range(64)))
