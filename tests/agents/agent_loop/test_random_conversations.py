"""Conversations with any templates, answers and outputs of tools: the row is what the engine saw, token for token.

The engine is scripted: it answers drawn ids and notes what it was given.
"""

import asyncio
import functools
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.agents.agent_loop.parts import SayTool, listed
from tests.agents.agent_loop.scripted import ScriptedEngine
from tests.dllm_reasoning.models import captured_warnings
from tests.helpers.chat_templates import FORMATS, HERMES_CALLS, IM, IM_PROMPT, QWEN_TOOL, Format, byte_tokenizer, turns
from tests.helpers.configs import SOUND, compose_ppo
from verl.agents.agent_loop.worker import AgentLoopWorkerBase
from verl.rollout.replica import ServerHandle
from verl.trainer.ppo.turn_rows import to_rows

PARTS = "tests.agents.agent_loop.parts"
RESPONSE = 400
WITH_TOOLS = [name for name, format in FORMATS.items() if format.tool is not None]


@pytest.fixture(scope="module")
def worker_of(tmp_path_factory):
    """A worker for a format and a number of parallel calls."""

    @functools.cache
    def make(name: str, parallel: int, **more) -> AgentLoopWorkerBase:
        folder = tmp_path_factory.mktemp("format")
        tokenizer, format = byte_tokenizer(FORMATS[name]), FORMATS[name]
        tokenizer.save_pretrained(folder)
        tools = listed(folder, "tools", "SayTool")
        parser = "gpt-oss" if name == "gpt-oss" else "hermes"
        multi_turn = {"tool_config_path": tools, "max_parallel_calls": parallel, "journal_tool_calls": False,
                      "max_tool_response_length": 40, "format": parser, **more}  # fmt: skip
        rollout = {"prompt_length": 1000, "response_length": RESPONSE, "calculate_log_probs": True,
                   "stop_token_ids": tokenizer.convert_tokens_to_ids([format.stop, *format.more_stops])}  # fmt: skip
        config = compose_ppo(*SOUND)
        OmegaConf.update(config, "actor_rollout_ref.rollout", rollout | {"multi_turn": multi_turn})
        config.actor_rollout_ref.model.path = str(folder)
        worker = AgentLoopWorkerBase(config, [ServerHandle("127.0.0.1:1")])
        worker.tokenizer.pad_token = worker.tokenizer.eos_token
        return worker

    return make


@st.composite
def turn(draw, tokenizer, format, name):
    """Ids of a turn: calls that can be read or not, text, or any ids, mostly with the end of a turn."""
    call = json.dumps({"name": "say", "arguments": {"i": draw(st.integers(0, 5))}})
    call = draw(st.sampled_from([call] * 4 + [call[:-3], '{"name": "sing", "arguments": {}}', "{}"]))
    if name == "gpt-oss":
        text, stop = f"<|channel|>commentary to=functions.say<|message|>{call[call.find('{', 1):-1]}", "<|call|>"
    else:
        text, stop = f"<tool_call>{call}</tool_call>" * draw(st.integers(1, 3)), format.stop
    text = draw(st.sampled_from([text] * 3 + [""])) + draw(st.text(max_size=4))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = draw(st.one_of(st.just(ids), st.just(ids), st.lists(st.integers(0, len(tokenizer) - 1), max_size=6)))
    end = [tokenizer.convert_tokens_to_ids(stop)] if draw(st.integers(0, 5)) else []
    return ids + end


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_row_is_what_the_engine_saw(worker_of, data):
    name = data.draw(st.sampled_from(WITH_TOOLS))
    worker = worker_of(name, data.draw(st.integers(1, 2)))
    tokenizer, format = worker.tokenizer, FORMATS[name]
    turns = data.draw(st.lists(turn(tokenizer, format, name), max_size=5))
    texts = data.draw(st.lists(st.text(max_size=60), min_size=1, max_size=3))
    question = data.draw(st.text(max_size=10))
    worker.server_manager = engine = ScriptedEngine(worker.rollout_config, lambda *asked: turns.pop(0) if turns else [])
    output = asyncio.run(
        worker._run_agent_loop(
            {"logprobs": True}, {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False},
            agent_name="tool_agent", raw_prompt=[{"role": "user", "content": question}],
            tools_kwargs={"say": {"execute_kwargs": {"texts": texts}}}, interaction_kwargs={},
        )
    )  # fmt: skip
    row = output.prompt_ids + output.response_ids
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs) <= RESPONSE
    assert set(output.response_mask) <= {0, 1} and engine.seen[0] == output.prompt_ids
    place = len(output.prompt_ids)
    for seen, wrote, log_probs in zip(engine.seen, engine.wrote, engine.log_probs, strict=True):
        assert seen == row[: len(seen)] and len(seen) >= place
        assert not any(output.response_mask[place - len(output.prompt_ids) : len(seen) - len(output.prompt_ids)])
        start, place = len(seen) - len(output.prompt_ids), len(seen) + len(wrote)
        end = start + len(wrote)
        assert output.response_ids[start:end] == wrote and all(output.response_mask[start:end])
        assert output.response_logprobs[start:end] == log_probs
    assert place == len(row)  # the last thing is what the model wrote
    assert sum(output.response_mask) == sum(map(len, engine.wrote))
    assert not any(itertools.compress(output.response_logprobs, [1 - mask for mask in output.response_mask]))
    batch = worker._batch_of([output]).batch
    attended = batch["attention_mask"][0].bool()
    assert batch["input_ids"][0][attended].tolist() == row
    assert batch["response_mask"][0].tolist()[: len(output.response_ids)] == output.response_mask
    assert batch["rollout_log_probs"][0].tolist()[: len(output.response_ids)] == pytest.approx(output.response_logprobs)
    assert batch["response_mask"][0, len(output.response_ids) :].sum() == 0
    assert output.extra_fields["end_reason"] in ("stop", "length")


def held(worker, *turns, texts=("42",)):
    """(the engine, the output) of a conversation whose tool says "42", or texts[i]."""
    answers = list(turns)
    worker.server_manager = engine = ScriptedEngine(worker.rollout_config, lambda *asked: answers.pop(0))
    output = asyncio.run(
        worker._run_agent_loop(
            {"logprobs": True}, {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False},
            agent_name="tool_agent", raw_prompt=[{"role": "user", "content": "?"}],
            tools_kwargs={"say": {"execute_kwargs": {"texts": list(texts)}}}, interaction_kwargs={},
        )
    )  # fmt: skip
    return engine, output


def said(i, id):
    return {"id": id, "type": "function", "function": {"name": "say", "arguments": {"i": i}}}


#: A template that leaves reasoning of earlier turns out, and one that moves the rules behind the last message.
REWRITING = {
    "qwen3": ("<tool_call>%s</tool_call>", "hermes", FORMATS["qwen3"]),
    "rules last": ("<tool_call>%s</tool_call>", "hermes", Format(
        turns(IM % "user", "<|im_start|>assistant\n{{ c }}" + HERMES_CALLS + "<|im_end|>\n", QWEN_TOOL,
              prompt="(rules)" + IM_PROMPT), "<|im_end|>", None, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", REWRITING)
def test_each_turn_is_a_row_after_what_the_template_renders(worker_of, monkeypatch, name):
    shape, parser, format = REWRITING[name]
    monkeypatch.setitem(FORMATS, f"rows {name}", format)
    worker = worker_of(f"rows {name}", 2, row_per_turn=True, format=parser)
    tokenizer = worker.tokenizer
    calls = [shape % json.dumps({"name": "say", "arguments": {"i": i}}) for i in (0, 1)]
    thought = "<think>\nI quote " + calls[0] + "\n</think>\n\n"
    written = [thought + "a" + calls[0] + calls[1] + "<|im_end|>", thought + calls[1] + "<|im_end|>", "b<|im_end|>"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in written]
    engine, output = held(worker, *ids, texts=["42", "58"])

    def answer(i, id):
        return {"role": "tool", "content": ("42", "58")[i], "name": "say", "tool_call_id": id}

    reasoning = f"I quote {calls[0]}"
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "a", "reasoning_content": reasoning,
         "tool_calls": [said(0, "call00000"), said(1, "call00001")]},
        answer(0, "call00000"), answer(1, "call00001"),
        {"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": [said(1, "call00002")]},
        answer(1, "call00002"),
    ]  # fmt: skip
    schemas = [SayTool(config={}, tool_schema=None).get_openai_tool_schema().model_dump(exclude_none=True)]
    rendered = [
        tokenizer.apply_chat_template(messages[:k], tools=schemas, add_generation_prompt=True, tokenize=False)
        for k in (1, 4, 6)
    ]
    assert [tokenizer.decode(seen) for seen in engine.seen] == rendered
    rows = [(prompt, output.response_ids[start:end]) for start, end, prompt in output.extra_fields["turn_prompts"]]
    assert rows == list(zip(engine.seen, engine.wrote, strict=True)) and engine.wrote == ids
    assert output.extra_fields["end_reason"] == "stop" and "58" in tokenizer.decode(output.response_ids)
    batch = to_rows(worker._batch_of([output])).batch
    for row, (prompt, wrote) in enumerate(rows):
        attended = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][attended].tolist() == prompt + wrote
        assert batch["response_mask"][row].sum() == len(wrote)
        assert batch["rollout_log_probs"][row][: len(wrote)].tolist() == pytest.approx(engine.log_probs[row])
    assert len(batch) == len(rows) == 3


def test_a_conversation_that_the_template_refuses_ends_by_its_template(worker_of, monkeypatch):
    refuses = "{% if m.tool_calls %}" + QWEN_TOOL + "{% endif %}{{ raise_exception('no call before') }}"
    template = turns(IM % "user", IM % "assistant", refuses, prompt=IM_PROMPT)
    monkeypatch.setitem(FORMATS, "rows refused", Format(template, "<|im_end|>", None, None))
    worker = worker_of("rows refused", 1, row_per_turn=True)
    ids = worker.tokenizer("<tool_call>{</tool_call><|im_end|>", add_special_tokens=False)["input_ids"]
    engine, output = held(worker, ids)
    assert output.extra_fields["end_reason"] == "template" and len(engine.seen) == 1
    assert [turn[2] for turn in output.extra_fields["turn_prompts"]] == engine.seen
    assert worker._batch_of([output]).non_tensor_batch["__lost__"].tolist() == [False]


def test_a_call_that_cannot_be_read_stays_text_in_the_next_turns_prompt(worker_of, monkeypatch):
    monkeypatch.setitem(FORMATS, "rows qwen3", FORMATS["qwen3"])
    worker = worker_of("rows qwen3", 1, row_per_turn=True)
    broken = "<tool_call>{'name': 3}</tool_call>"
    turn = worker.tokenizer(broken + "<|im_end|>", add_special_tokens=False)["input_ids"]
    engine, output = held(worker, turn, turn[-1:])
    assert output.extra_fields["tool_call_counts"] == 1 and output.extra_fields["tool_rewards"] == []
    seen = worker.tokenizer.decode(engine.seen[1])
    assert f"assistant\n{broken}<|im_end|>" in seen and "Error: the call is n" in seen


@pytest.mark.parametrize("at_once", [False, True])
def test_generation_continues_the_ids_or_the_messages_encoded_at_once(worker_of, at_once):
    worker = worker_of("chatml", 1, use_inference_chat_template=at_once)
    tokenizer = worker.tokenizer
    call, marker = '<tool_call>{"name": "say", "arguments": {"i": 0}}</tool_call>', "<|im_start|>"
    first = tokenizer(f"a{marker}{call}<|im_end|>", add_special_tokens=False)["input_ids"]
    engine, output = held(worker, first, tokenizer("b<|im_end|>", add_special_tokens=False)["input_ids"])
    row, seen = output.prompt_ids + output.response_ids, tokenizer.decode(engine.seen[1])
    assert (engine.seen[1] == row[: len(engine.seen[1])]) != at_once
    assert f"a{marker}{call}" in tokenizer.decode(row) and (f"a{call}" in seen) == at_once and "42" in seen


@pytest.mark.parametrize(("mode", "warned"), [("strict", 1), ("ignore_strippable", 1), ("disable", 0)])
def test_ids_that_the_finished_messages_do_not_have_are_reported_once(worker_of, mode, warned):
    worker = worker_of("chatml", 1, tokenization_sanity_check_mode=mode)
    call = worker.tokenizer('<tool_call>{"name": "say", "arguments": {"i": 0}}</tool_call><|im_end|>')["input_ids"]
    last = worker.tokenizer("b<|im_start|><|im_end|>")["input_ids"]
    with captured_warnings() as logged:
        for _ in range(2):
            held(worker, call, last)
    named = [line for line in logged if "differ from those of the finished messages" in line]
    assert len(named) == warned and all("'<|im_start|><|im_end|>' against '<|im_end|>'" in line for line in named)
