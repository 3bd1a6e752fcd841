"""The table of chat templates, and that its comparison tells templates apart, on templates of our own."""

import asyncio
import hashlib

import pytest

from tests.helpers.chat_templates import HERMES_CALLS, IM, IM_PROMPT, QWEN_TOOL, THOUGHT, calls, turns
from tests.models import templates
from tests.models.templates import (
    APPENDED,
    EXACT,
    FOLDER,
    KEPT,
    OPEN,
    REFUSED,
    SPLIT,
    STOPS,
    TOOLS,
    Played,
    counted,
    played,
    stored_templates,
)
from verl.agents.agent_loop.tool_parser import ToolParser
from verl.agents.message_encoder import MessageEncoder

ASSISTANT = "<|im_start|>assistant\n{{ c }}" + HERMES_CALLS + "<|im_end|>\n"
REASONS = "<|im_start|>assistant\n<think>{{ m.reasoning_content }}</think>{{ c }}" + HERMES_CALLS + "<|im_end|>\n"
LATER = "{% if loop.index0 < messages | length - 2 %} (before){% endif %}"


def test_at_least_55_of_60_templates_are_exact():
    rows = stored_templates()
    right, tested = counted(rows)
    assert tested == 60 and right >= 55
    assert all(("reason" in row) == (row["result"] in (SPLIT, REFUSED)) for row in rows.values())
    assert set(rows) == {*templates.STOPS, "Qwen-Qwen3-0.6B, its own tokenizer"}
    read = {format for row in rows.values() for format in row["calls"].split(", ") if format}
    assert read == set(templates.FORMATS) - {"llama4_pythonic"} <= set(ToolParser._registry)  # no file of Llama 4


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (turns(IM % "user", ASSISTANT, QWEN_TOOL, prompt=IM_PROMPT), APPENDED),
        (turns(IM % "user", REASONS, QWEN_TOOL, prompt=IM_PROMPT), APPENDED),
        (turns(IM % "user", REASONS, QWEN_TOOL, prompt=IM_PROMPT + "<think>"), APPENDED),
        (turns(IM % "user", THOUGHT + HERMES_CALLS + "<|im_end|>\n", QWEN_TOOL, prompt=IM_PROMPT), KEPT),
        (turns(IM % "user" + LATER, ASSISTANT, QWEN_TOOL, prompt=IM_PROMPT), SPLIT),
        (turns(IM % "user", ASSISTANT, QWEN_TOOL + LATER, prompt=IM_PROMPT), SPLIT),
        (turns(IM % "user", ASSISTANT + LATER, QWEN_TOOL, prompt=IM_PROMPT), SPLIT),
        (turns(IM % "user", ASSISTANT.replace("{{ c }}", "{{ c[:6] if not loop.last else c }}"), QWEN_TOOL,
               prompt=IM_PROMPT), REFUSED),
        (turns(IM % "user", ASSISTANT, QWEN_TOOL, prompt=IM_PROMPT).replace("{{ c }}", "{{ c | upper }}"), REFUSED),
        (turns(IM % "user", "<|im_start|>assistant\n{{ c }}<|im_end|>\n", QWEN_TOOL, prompt=IM_PROMPT), REFUSED),
        (turns(IM % "user", ASSISTANT.replace("{{ c }}", "<|im_end|>\n<|im_start|>assistant\n{{ c }}"), QWEN_TOOL,
               prompt=IM_PROMPT), REFUSED),
        (turns(IM % "user", ASSISTANT), REFUSED),
    ],
)  # fmt: skip
def test_what_a_template_does_is_found(monkeypatch, template, expected):
    monkeypatch.setitem(templates.STOPS, "own", ["<|im_end|>"])
    assert played("own", template)["result"] == expected


def test_a_template_counts_if_it_renders_a_call_and_its_answer():
    renders = turns(IM % "user", ASSISTANT, QWEN_TOOL)
    assert templates.is_testable(renders)
    assert not templates.is_testable(turns(IM % "user", ASSISTANT))
    assert not templates.is_testable(turns(IM % "user", "{{ c }}", QWEN_TOOL))
    assert not templates.is_testable(turns(IM % "user", calls("{{ '' + f.arguments }}"), QWEN_TOOL))


#: Templates that leave a message's calls out, or show the call's id, which is not that of the table's conversation.
OWN_WAYS = ("HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "moonshotai-Kimi-K2")
fetched = pytest.mark.skipif(not FOLDER.is_dir(), reason="the templates are fetched by make test-models")


@pytest.mark.long
@fetched
def test_what_parsers_read_of_a_turn_renders_the_next_prompt():
    """As agent loops do with row_per_turn: text of a model -> message with reasoning and calls -> the template."""
    checked = 0
    for name, row in stored_templates().items():
        if row["calls"] and name in STOPS and name not in OWN_WAYS:
            made = Played(name, (FOLDER / f"{name}.jinja").read_text())
            encoder = MessageEncoder(made.tokenizer, made.tokenizer.convert_tokens_to_ids(made.ends))
            parser = ToolParser.get_tool_parser(row["calls"], made.tokenizer)
            ids, starts_reasoning = made.ids(made.written[0]), bool(OPEN.search(made.prompts[0]))
            (call,) = asyncio.run(parser.extract_tool_calls(ids, starts_reasoning))[1]
            call.id = made.messages[2]["tool_call_id"]
            turn = parser.message([i for i in ids if i not in encoder.stop_ids], starts_reasoning)
            turn["tool_calls"] = [call.as_message()]
            prompt = encoder.prompt([made.messages[0], turn, made.messages[2]], TOOLS)
            assert made.tokenizer.decode(prompt) == made.prompts[1], name
            checked += 1
    assert checked > 30


@fetched
def test_the_files_are_those_of_the_table():
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in FOLDER.iterdir()]
    assert sorted(hashes) == sorted(row["sha256"] for row in stored_templates().values())
    assert sum(row["result"] in EXACT for row in stored_templates().values()) > 55
