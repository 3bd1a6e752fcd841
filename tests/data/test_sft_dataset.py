"""Labels and masks of SFT samples, by hand; wrong rows named. Ids of the tiny tokenizer: eos 2, then one a word."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import Dataset

from tests.helpers.chat_templates import Format, byte_tokenizer
from tests.helpers.models import make_tokenizer
from verl.data.rl_dataset import DatasetError
from verl.data.sft_dataset import SFTDataset, get_sft_dataset_class
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset, convert_nested_value_to_list_recursive

TOKENIZER = make_tokenizer()
Q, A, COLON, PLUS, EOS = (*TOKENIZER.convert_tokens_to_ids(["q", "a", ":", "+"]), 2)
IM_TOOLS = (
    "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE, TWO, THREE = TOKENIZER.convert_tokens_to_ids(["1", "2", "3"])


def rows_of(tmp_path, rows, name="rows.jsonl"):
    path = tmp_path / name
    if name.endswith(".parquet"):
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(**settings):
    return OmegaConf.create({"max_length": 12, **settings})


def kept(sample):
    """(ids, loss mask) of a sample without its padding."""
    n = int(sample["attention_mask"].sum())
    return sample["input_ids"][:n].tolist(), sample["loss_mask"][:n].tolist()


def test_a_pair_by_hand(tmp_path):
    data = SFTDataset(rows_of(tmp_path, [{"question": "1 + 1", "answer": "2 3"}]), make_tokenizer(), config())
    sample = data[0]
    # The template writes "q : <question> a : " in front of the answer; EOS ends it and is learned.
    assert sample["input_ids"].tolist() == [Q, COLON, ONE, PLUS, ONE, A, COLON, TWO, THREE, EOS, 0, 0]
    assert sample["loss_mask"].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0]
    assert sample["attention_mask"].tolist() == [1] * 10 + [0, 0]
    assert sample["position_ids"].tolist() == [*range(10), 0, 0]
    assert all(column.dtype == torch.int64 for column in sample.values())


def test_an_answer_deep_in_a_column(tmp_path):
    rows = [{"extra_info": {"question": "1", "answer": "2"}}]
    keys = {"prompt_key": "extra_info", "response_key": "extra_info"}
    path = {"prompt_dict_keys": ["question"], "response_dict_keys": ["answer"]}
    data = SFTDataset([rows_of(tmp_path, rows, "rows.parquet")], make_tokenizer(), config(**keys, **path))
    assert kept(data[0]) == ([Q, COLON, ONE, A, COLON, TWO, EOS], [0, 0, 0, 0, 0, 1, 1])
    path["response_dict_keys"] = ["anser"]
    with pytest.raises(DatasetError, match=r"row 0: column 'extra_info' has no key 'anser' \(it holds: question, ans"):
        SFTDataset(data.data_files, make_tokenizer(), config(**keys, **path))[0]


@pytest.mark.parametrize(("how", "ids", "mask"), [
    ("left", [ONE, A, COLON, TWO, EOS], [0, 0, 0, 1, 1]), ("right", [Q, COLON, ONE, A, COLON], [0, 0, 0, 0, 0]),
])  # fmt: skip
def test_truncation_cuts_ids_and_mask_alike(tmp_path, how, ids, mask):
    file = rows_of(tmp_path, [{"question": "1", "answer": "2"}])
    assert kept(SFTDataset(file, make_tokenizer(), config(max_length=5, truncation=how))[0]) == (ids, mask)


def test_an_overlong_row_is_named(tmp_path):
    file = rows_of(tmp_path, [{"question": "1", "answer": "2"}] * 2)
    with pytest.raises(DatasetError, match=r"rows.jsonl, row 1: the sample has 7 tokens, data.max_length=6. Raise it"):
        SFTDataset(file, make_tokenizer(), config(max_length=6))[1]


def test_half_a_surrogate_pair_is_refused_with_file_and_row(tmp_path):
    rows = [{"question": "1", "answer": "2"}, {"question": "1", "answer": "2 \ude00"}]
    data = SFTDataset(rows_of(tmp_path, rows), make_tokenizer(), config())
    with pytest.raises(DatasetError, match="rows.jsonl, row 1: its text has half a surrogate pair"):
        data[1]


def test_a_missing_column_and_a_number_are_refused(tmp_path):
    file = rows_of(tmp_path, [{"question": "1", "reply": "2"}, {"question": "1", "answer": 5}])
    with pytest.raises(DatasetError, match=r"row 0: there is no column 'answer' \(columns: question, reply\). Set"):
        SFTDataset(file, make_tokenizer(), config())[0]
    with pytest.raises(DatasetError, match=r"row 1: column 'answer' is a int, not a text. Set data.response_key"):
        SFTDataset(file, make_tokenizer(), config())[1]


CONVERSATION = [
    {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3"}, {"role": "assistant", "content": "1 + 2"},
]  # fmt: skip


def test_every_assistant_turn_is_learned_with_its_end(tmp_path):
    file = rows_of(tmp_path, [{"messages": CONVERSATION}], "rows.parquet")
    settings = config(max_length=20, multiturn={"enable": True})  # its other keys are the defaults
    ids, mask = kept(MultiTurnSFTDataset(file, make_tokenizer(), settings)[0])
    assert ids == [Q, COLON, ONE, A, COLON, TWO, EOS, Q, COLON, THREE, A, COLON, ONE, PLUS, TWO, EOS]
    assert mask == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_what_the_template_writes_after_an_end_of_turn_is_not_learned(tmp_path):
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}q {{ m['content'] }} {% else %}"
        "a {{ m['content'] }} <eos> : {% endif %}{% endfor %}{% if add_generation_prompt %}a {% endif %}"
    )
    file = rows_of(tmp_path, [{"messages": CONVERSATION}])
    ids, mask = kept(MultiTurnSFTDataset(file, make_tokenizer(), config(max_length=20, chat_template=template))[0])
    assert ids == [Q, ONE, A, TWO, EOS, COLON, Q, THREE, A, ONE, PLUS, TWO, EOS, COLON]
    assert mask == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0]


def learned_texts(tmp_path, template, end, content="Ja", **tokens):
    """(text, learned text) of a conversation of one turn; `end` is a special token, the EOS token is another."""
    tokenizer = byte_tokenizer(Format(template, "<eos>", None, None, more_stops=(end,)))
    tokenizer.pad_token = "<eos>"
    messages = [{"role": "user", "content": "Nu?"}, {"role": "assistant", "content": content}]
    file = rows_of(tmp_path, [{"messages": messages}])
    data = MultiTurnSFTDataset(file, tokenizer, config(max_length=200, multiturn={"enable": True}))
    ids, mask = kept(data[0])
    return tokenizer.decode(ids), tokenizer.decode([i for i, counts in zip(ids, mask, strict=True) if counts])


GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "content", "rest", "end"),
    [
        (GEMMA, "Ja", "\n", "<end_of_turn>"),  # without a name, and no EOS token follows
        (GEMMA.replace("<end_of_turn>\n{% endfor %}", "{% endfor %}"), "a<end_of_turn>b", "", "<eos>"),
        (GEMMA.replace("<end_of_turn>", "<eos>"), "Ja", "\n", "<eos>"),
    ],
)
def test_the_end_of_a_turn_is_learned_and_nothing_after_it(tmp_path, template, content, rest, end):
    text, learned = learned_texts(tmp_path, template, "<end_of_turn>", content=content)
    assert learned == content + end and text.endswith(f"<start_of_turn>assistant\n{content}{end}{rest}")


def test_a_prompt_that_begins_a_thought_is_refused_with_this_reason(tmp_path):
    template = GEMMA.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    with pytest.raises(DatasetError, match=r"row 0: the chat template's generation prompt ends with '<think>\\n'"):
        learned_texts(tmp_path, template, "<end_of_turn>")
    text, learned = learned_texts(tmp_path, template, "<end_of_turn>", content="<think>\nHm</think>Ja")
    assert learned == "Hm</think>Ja<end_of_turn>"  # the prompt has <think>, the model continues


def turns_of(tmp_path, template, messages, end="<end_of_turn>"):
    """[(prompt, learned text)] of each sample with row_per_turn."""
    tokenizer = byte_tokenizer(Format(template, "<eos>", None, None, more_stops=(end,)))
    tokenizer.pad_token = "<eos>"
    settings = config(max_length=300, multiturn={"enable": True, "row_per_turn": True})
    data = MultiTurnSFTDataset(rows_of(tmp_path, [{"messages": messages}] * 2), tokenizer, settings)
    parts = []
    for ids, mask in (kept(data[i]) for i in range(len(data))):
        first = mask.index(1)
        last = first + sum(mask)
        assert all(mask[first:last]) and tokenizer.decode(ids[last:]) == "\n"
        parts.append((tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:last])))
    return parts


REASONED = [
    {"role": "user", "content": "Nu?"}, {"role": "assistant", "content": "<think>\nHm\n</think>\n\nJa"},
    {"role": "user", "content": "Nu?"}, {"role": "assistant", "content": "<think>\nAch</think>Nein"},
]  # fmt: skip
WITHOUT_THOUGHTS = GEMMA.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip() }}")
FIRST = "<start_of_turn>user\nNu?<end_of_turn>\n<start_of_turn>assistant\n"


@pytest.mark.parametrize("begun", ["", "<think>\n", "<think>"])
def test_each_turn_is_a_sample_after_its_prompt_where_the_template_drops_thoughts(tmp_path, begun):
    """R1's template begins a thought in the prompt and drops thoughts from all turns: the content has them."""
    template = WITHOUT_THOUGHTS.replace("assistant\n{% endif %}", f"assistant\n{begun}{{% endif %}}")
    second = f"{FIRST}Ja<end_of_turn>\n{FIRST}{begun}"
    line = "\n" if begun == "<think>" else ""
    learned = {"": ("Ja", "Nein")}.get(begun, (f"{line}Hm\n</think>\n\nJa", f"{line}Ach</think>Nein"))
    expected = [(FIRST + begun, f"{learned[0]}<end_of_turn>"), (second, f"{learned[1]}<end_of_turn>")]
    assert turns_of(tmp_path, template, REASONED) == expected * 2


@pytest.mark.parametrize("closed", ["<think>\n</think>", "</think>\n"])
def test_a_turn_follows_a_prompt_that_ends_the_thought(tmp_path, closed):
    """As templates do that are asked for no thought."""
    template = WITHOUT_THOUGHTS.replace("assistant\n{% endif %}", f"assistant\n{closed}{{% endif %}}")
    expected = [(FIRST + closed, "Ja<end_of_turn>"), (f"{FIRST}Ja<end_of_turn>\n{FIRST}{closed}", "Nein<end_of_turn>")]
    assert turns_of(tmp_path, template, REASONED) == expected * 2


def test_thoughts_that_the_template_shows_in_the_last_turn_alone_are_learned_in_each(tmp_path):
    shown = "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip() }}"
    template = GEMMA.replace("{{ m.content }}", shown)
    expected = [(FIRST, "<think>\nHm\n</think>\n\nJa<end_of_turn>"),
                (f"{FIRST}Ja<end_of_turn>\n{FIRST}", "<think>\nAch</think>Nein<end_of_turn>")]  # fmt: skip
    assert turns_of(tmp_path, template, REASONED) == expected * 2


@pytest.mark.parametrize("begin", ["", "<think>", "<think>\n"])
def test_a_turn_continues_a_begun_thought_that_the_template_shows_without_its_beginning(tmp_path, begin):
    template = GEMMA.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    messages = [REASONED[0], {"role": "assistant", "content": f"{begin}Hm</think> Ja"}]
    assert turns_of(tmp_path, template, messages) == [(f"{FIRST}<think>\n", "Hm</think> Ja<end_of_turn>")] * 2


def test_a_begun_thought_without_its_end_is_refused_with_this_reason(tmp_path):
    template = GEMMA.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    for content in ("Ja", "<think>\nHm</think>"):
        shown = template if content == "Ja" else template.replace("{{ m.content }}", "{{ m.content[-1] }}")
        messages = [{"role": "user", "content": "Nu?"}, {"role": "assistant", "content": content}]
        with pytest.raises(DatasetError, match=r"row 0: .*'<think>\\n', but the content of message 1 has no reasoning"):
            turns_of(tmp_path, shown, messages)
    with pytest.raises(DatasetError, match="row 0: no message has the role 'assistant'"):
        turns_of(tmp_path, GEMMA, REASONED[:1])
    moved = GEMMA.replace("{% for", "{% if not add_generation_prompt %}!{% endif %}{% for", 1)
    with pytest.raises(DatasetError, match="row 0: the chat template's text up to message 1 is not its prompt"):
        turns_of(tmp_path, moved, REASONED)


def test_an_end_is_added_where_the_template_writes_none(tmp_path):
    template = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
    file = rows_of(tmp_path, [{"messages": CONVERSATION[:2]}])
    data = MultiTurnSFTDataset(file, make_tokenizer(), config(chat_template=template))
    u = TOKENIZER.convert_tokens_to_ids("u")
    assert kept(data[0]) == ([u, ONE, A, TWO, EOS], [0, 0, 1, 1, 1])


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    template = "{% for m in messages %}{% if loop.last %}: {% endif %}{{ m['content'] }} {% endfor %}"
    file = rows_of(tmp_path, [{"messages": CONVERSATION}])
    refused = "row 0: the chat template writes message 1 differently once other messages .* Set {}data.chat_template"
    with pytest.raises(DatasetError, match=refused.format("")):  # nor are its turns their prompts and what follows
        MultiTurnSFTDataset(file, make_tokenizer(), config(chat_template=template))[0]
    end = "{{ ': ' if loop.last and m['role'] == 'assistant' }}"
    template = "{% for m in messages %}{{ m['content'] }} " + end + "{% endfor %}"
    with pytest.raises(DatasetError, match=refused.format("data.multiturn.row_per_turn=true, or ")):
        MultiTurnSFTDataset(file, make_tokenizer(), config(chat_template=template))[0]
    each = config(chat_template=template, multiturn={"row_per_turn": True})
    assert kept(MultiTurnSFTDataset(file, make_tokenizer(), each)[0]) == ([ONE, TWO, COLON, EOS], [0, 1, 1, 1])


def test_tools_and_thinking_reach_the_template(tmp_path):
    template = (
        "{% if tools %}{{ tools[0]['name'] }} {% endif %}{% if enable_thinking %}x {% endif %}"
        "{% for m in messages %}{{ m['content'] }} {% endfor %}<eos>"
    )
    rows = [{"messages": CONVERSATION[:2], "tools": json.dumps([{"name": "t"}]), "enable_thinking": True},
            {"messages": CONVERSATION[:2], "tools": None, "enable_thinking": None}]  # fmt: skip
    keys = config(chat_template=template, max_length=8)
    data = MultiTurnSFTDataset(rows_of(tmp_path, rows), make_tokenizer(), keys)
    t, x = TOKENIZER.convert_tokens_to_ids(["t", "x"])
    with pytest.raises(DatasetError, match="writes message 1 differently"):  # EOS follows the prompt as well
        data[0]
    data.tokenizer.chat_template = template.replace("<eos>", "")
    assert kept(data[0])[0] == [t, x, ONE, TWO, EOS] and kept(data[1])[0] == [ONE, TWO, EOS]


def test_parquet_teaches_what_json_teaches(tmp_path):
    """Calls and schemas get the keys of all rows in a parquet file, with nulls."""
    tokenizer = byte_tokenizer(Format(IM_TOOLS, "<|im_end|>", None, None))
    tokenizer.pad_token = "<|im_end|>"
    rows = []
    for given in ({"a": 1}, {"b": {"c": 2}}):
        call, kinds = {"function": {"name": "f", "arguments": given}}, {key: {"type": "integer"} for key in given}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        schema = {"function": {"name": "f", "parameters": {"properties": kinds}}}
        rows.append({"messages": [{"role": "user", "content": "Sum?"}, answer], "tools": [schema]})
    for name in ("rows.jsonl", "rows.parquet"):
        settings = config(max_length=200, multiturn={"enable": True})
        data = MultiTurnSFTDataset(rows_of(tmp_path, rows, name), tokenizer, settings)
        for i, given in enumerate(('{"a": 1}', '{"b": {"c": 2}}')):
            ids, mask = kept(data[i])
            properties = '{"a": {"type": "integer"}}' if i == 0 else '{"b": {"type": "integer"}}'
            schema = '[{"function": {"name": "f", "parameters": {"properties": ' + properties + "}}}]"
            answer = '{"name": "f", "arguments": ' + given + "}<|im_end|>"
            start = f"{schema}<|im_start|>user\nSum?<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode(ids) == f"{start}{answer}\n"
            assert tokenizer.decode([token for token, counts in zip(ids, mask, strict=True) if counts]) == answer


def test_rows_without_an_answer_or_without_messages_are_refused(tmp_path):
    rows = [{"messages": CONVERSATION[:1]}, {"messages": "text"}, {"messages": [{"role": "user"}]}]
    data = MultiTurnSFTDataset(rows_of(tmp_path, rows), make_tokenizer(), config())
    expected = ["no message has the role 'assistant'", "is a string; expected a list of", "message 0"]
    for item, said in enumerate(expected):
        with pytest.raises(DatasetError, match=f"row {item}: .*{said}"):
            data[item]


def test_nested_arrays_become_lists():
    assert convert_nested_value_to_list_recursive({"a": np.array([np.array([1, 2]), None], dtype=object)}) == {
        "a": [[1, 2], None]
    }


class Mine(Dataset):
    """A data set of a user's."""


def test_the_class_follows_the_config():
    assert get_sft_dataset_class(OmegaConf.create({})) is SFTDataset
    assert get_sft_dataset_class(OmegaConf.create({"multiturn": {"enable": True}})) is MultiTurnSFTDataset
    custom = {"custom_cls": {"path": "pkg://tests.data.test_sft_dataset", "name": "Mine"}}
    assert get_sft_dataset_class(OmegaConf.create(custom)).__name__ == "Mine"
    custom["custom_cls"]["name"] = "TOKENIZER"
    with pytest.raises(TypeError, match="subclass of torch.utils.data.Dataset"):
        get_sft_dataset_class(OmegaConf.create(custom))
