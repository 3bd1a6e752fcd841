"""Texts and numbers of models, rewards and users do not act on a console or on the report page."""

import json
import re
from types import SimpleNamespace

import pytest
from loguru import logger
from omegaconf import OmegaConf

from dllm_reasoning.inference import demo
from tests.helpers.models import make_tokenizer
from verl.data.chat_template import ChatTemplateError, render_chat
from verl.report.page import write_report
from verl.reward.rows import log_examples
from verl.trainer.run.failure import failure_message
from verl.trainer.run.samples import write_jsonl
from verl.utils.problems import one_line
from verl.utils.visible_text import visible

UNSEEN = [
    "\x00", "\x07", "\x08", "\x1b[2J", "\x1b]0;title\x07", "\x1b]8;;http://h\x07", "\r", "\x0b", "\x0c", "\x7f",
    "\x9b31m", "\x85", "\u202e", "\u202d", "\u202a", "\u202b", "\u202c", "\u2066", "\u2067", "\u2068", "\u2069",
    "\u200e", "\u200f", "\u061c", "\u2028", "\u2029", "\ud800", "\udfff", "\udc80\ud800",
]  # fmt: skip
SEEN = ["", "plain", "tab\tand\nline", "\u00e9\u4e2d\u6587 \U0001f600", "a\u200db", "\u05d0\u05d1", "<b>&amp;"]
NUMBERS = ["1e308", "-1e308", "1e309", "NaN", "-Infinity", "9" * 400, "-" + "9" * 400, "5e-324", "0", "true", "1.5"]
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("text", UNSEEN, ids=ascii)
def test_what_acts_on_a_terminal_becomes_an_escape(text):
    clean = visible(f"a{text}b")
    assert not ACTS.search(clean) and clean.startswith("a\\") and clean.endswith("b")
    clean.encode("utf-8")


@pytest.mark.parametrize("text", SEEN, ids=ascii)
def test_other_texts_stay(text):
    assert visible(text) == text


def test_the_report_shows_every_number_and_text(tmp_path):
    names = ("critic/score/mean", "timing_s/gen", "timing_s/step", "y/z/a")
    data = ["{" + ", ".join(f'"{name}": {n}' for name in names) + "}" for n in NUMBERS * 4]
    lines = [f'{{"step": {i + 1}, "data": {row}}}\n' for i, row in enumerate(data)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    rows = []
    for text in UNSEEN:
        row = {"step": 1, "kind": "best", "prompt": f"p{text}", "response": text, "score": 1.0, "ground_truth": text}
        rows.append(json.dumps(row | {"segments": [{"text": text, "kind": "given"}], "extras": {"note": text}}))
    rows += [rows[0].replace('"score": 1.0', f'"score": {n}') for n in NUMBERS]
    rows += [rows[0].replace('"note": "\\u0000"', f'"note": {n}') for n in NUMBERS]
    for i in range(0, len(rows), 16):  # the page shows the last 18
        (tmp_path / "samples.jsonl").write_text("\n".join(rows[i : i + 16]) + "\n")
        page = write_report(tmp_path, title="t\u202e").read_text(encoding="utf-8")
        assert not ACTS.search(page) and "t\\u202e" in page and ("p\\" in page)


@pytest.mark.parametrize("text", UNSEEN, ids=ascii)
def test_samples_are_kept_as_they_were(tmp_path, text):
    write_jsonl(tmp_path / "1.jsonl", [{"output": text}])
    assert json.loads((tmp_path / "1.jsonl").read_text(encoding="utf-8")) == {"output": text}


@pytest.mark.parametrize("text", UNSEEN, ids=ascii)
def test_no_place_prints_what_acts_on_a_terminal(text, tmp_path, monkeypatch, capsys):
    text = f"a{text}b"
    config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}})
    shown = [one_line(text), failure_message(ValueError(text), config)]
    sink = logger.add(shown.append, format="{message}")
    row = SimpleNamespace(data_source="d", prompt_ids=[text], response_ids=[text], ground_truth=text)
    decoder = SimpleNamespace(decode=lambda ids, skip_special_tokens: ids[0])
    log_examples(decoder, [row], [(1.0, {"note": text})], 1)
    logger.remove(sink)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception(messages[0].content) }}"
    with pytest.raises(ChatTemplateError) as caught:
        render_chat(tokenizer, [{"role": "user", "content": text}])
    answered = {"prompt": text, "response": f"[/bold]{text}", "tokens": 1, "forwards": 1, "batch_seconds": 1.0}
    arguments = SimpleNamespace(output_file=tmp_path / "answers.jsonl", max_display=1, batch_size=1)
    monkeypatch.setattr(demo, "parse", lambda argv: arguments)
    monkeypatch.setattr(demo, "read_prompts", lambda args: [])
    monkeypatch.setattr(demo, "answer", lambda args, prompts: [answered])
    if not re.search("[\ud800-\udfff]", text):  # the file of answers is UTF-8
        assert demo.main([]) == 0
    shown += [str(caught.value), capsys.readouterr().out]
    assert len(shown) == 5 and not [each for each in shown if ACTS.search(each)]
