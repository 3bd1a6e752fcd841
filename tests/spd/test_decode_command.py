"""Claims on scripts/spd_decode.py: what it prints is what the models said.

Not covered: a GPU.
"""

import io
import shutil
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from recipe.spd.rollout.decoder import FROM_MATCH, FROM_MISMATCH, FROM_TARGET, SpecResult, speculative_generate
from scripts import spd_decode as command
from scripts.spd_evaluation import rules
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig
from tests.helpers.models import SPECIAL, WORDS, make_tokenizer, save_tiny_llama
from verl.utils.accelerator import default_dtype

VOCAB = len(SPECIAL) + len(WORDS)
ENDS = [2, 11, 30]
PROMPTS = ["q : 3 + 4 a :", "a b c", "7", "z y x w v u t s 1 2 3 4 5"]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Directories of a target with three end tokens, a draft that often agrees with it, and scorers of both kinds."""
    root = tmp_path_factory.mktemp("decode")
    save_tiny_llama(root / "target", vocab_size=VOCAB)
    target = LlamaForCausalLM.from_pretrained(root / "target")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Wider weights: a model at its first initialisation says one word for ever.
        for parameter in target.parameters():
            parameter.mul_(8.0 if parameter.ndim == 2 else 1.0)
    target.generation_config.eos_token_id = ENDS
    target.save_pretrained(root / "target")
    for option in ("target", "own"):
        config = ScoringModelConfig(base_model_path=str(root / "target"), backbone=option, seed=3)
        AutoModelForSPDScoring.from_config(config).save_pretrained(root / f"scorer_{option}")
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1 * parameter.std())
    target.save_pretrained(root / "draft")
    make_tokenizer().save_pretrained(root / "draft")
    return root


def run(house, *more: str) -> list[dict]:
    options = ["--target", str(house / "target"), "--draft", str(house / "draft"), "--device", "cpu"]
    options += ["--dtype", "float32"]  # that of the models that the tests load themselves
    return command.main([*options, "--max-new-tokens", "24", "--gamma", "4", *more])


def next_word(model, ids: list[int]) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([ids])).logits[0, -1].argmax())


def test_exact_match_prints_the_targets_own_text(house, capsys):
    rows = run(house, "--rule", "exact", "--batch-size", "3", "--prompt", *PROMPTS)
    target, tokenizer = LlamaForCausalLM.from_pretrained(house / "target"), make_tokenizer()
    printed = capsys.readouterr().out
    for row, prompt in zip(rows, PROMPTS, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        output = target.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=24, eos_token_id=ENDS, pad_token_id=0
        )
        assert row["tokens"] == row["greedy_tokens"] == output[0, len(ids) :].tolist()
        assert row["finished"] == (row["tokens"][-1] in ENDS)
        text = tokenizer.decode(row["tokens"], skip_special_tokens=True)
        assert (text if row["origin"] == [FROM_TARGET] * len(row["tokens"]) else "[=") in printed
    assert sum(row["accepted"] for row in rows) > 0
    assert "same text as plain greedy decoding: 4 of 4; output length ratio 1.000" in printed


def test_every_mark_says_what_the_models_said(house, capsys):
    rows = run(house, "--rule", "all", "--prompt", *PROMPTS)
    target, draft = (LlamaForCausalLM.from_pretrained(house / name) for name in ("target", "draft"))
    seen = set()
    for row in rows:
        for i, (token, origin) in enumerate(zip(row["tokens"], row["origin"], strict=True)):
            context = row["prompt_ids"] + row["tokens"][:i]
            said = next_word(target, context)
            seen.add(origin)
            if origin == FROM_MISMATCH:
                assert (token, row["wanted"][i]) == (next_word(draft, context), said) and token != said
            else:
                assert token == said
        assert set(row["wanted"]) == {i for i, origin in enumerate(row["origin"]) if origin == FROM_MISMATCH}
    assert seen == {FROM_TARGET, FROM_MATCH, FROM_MISMATCH}
    tokenizer, printed = make_tokenizer(), capsys.readouterr().out
    place, wanted = next(iter(rows[0]["wanted"].items()))
    assert f"{tokenizer.decode([rows[0]['tokens'][place]])}|{tokenizer.decode([wanted])}~]" in printed


def test_the_scorer_of_either_kind_judges_as_in_the_evaluation(house):
    ids = [make_tokenizer()(prompt)["input_ids"] for prompt in PROMPTS]
    target, draft = (LlamaForCausalLM.from_pretrained(house / name).eval() for name in ("target", "draft"))
    for kind, threshold in (("target", -0.02), ("own", 0.2)):
        scorer = AutoModelForSPDScoring.from_pretrained(house / f"scorer_{kind}")
        tokens = {"sep_token_id": 3, "pad_token_id": 0, "end_ids": frozenset(ENDS)} if kind == "own" else {}
        judge = rules.scorer(scorer, threshold, **tokens)
        expected = speculative_generate(target, draft, ids, judge, gamma=4, max_new_tokens=24, eos_token_id=ENDS)
        assert 0 < sum(expected.accepted_mismatches) < sum(expected.judged_mismatches)
        options = ["--scorer", str(house / f"scorer_{kind}"), "--threshold", str(threshold)]
        rows = run(house, *options, "--prompt", *PROMPTS)
        assert [row["tokens"] for row in rows] == expected.tokens
        assert [row["accepted_mismatches"] for row in rows] == expected.accepted_mismatches
    everything = run(house, "--scorer", str(house / "scorer_target"), "--threshold", "-1000", "--prompt", *PROMPTS)
    assert [r["tokens"] for r in everything] == [r["tokens"] for r in run(house, "--rule", "all", "--prompt", *PROMPTS)]


def test_prompts_come_from_a_file_or_as_lines(house, tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a b"}\n{"question": "a b"}\n')
    a, b, q, colon = (make_tokenizer()(word)["input_ids"][0] for word in ("a", "b", "q", ":"))
    assert [row["prompt_ids"] for row in run(house, "--prompts", str(tmp_path / "p.jsonl"))] == [[a, b], [a, b]]
    monkeypatch.setattr("sys.stdin", io.StringIO("a b\n\nc\n"))
    rows = run(house, "--chat-template")
    assert [row["prompt"] for row in rows] == ["a b", "c"]
    assert rows[0]["prompt_ids"] == [q, colon, a, b, a, colon]


def test_marks_leave_the_text_whole_and_steer_no_terminal():
    segments = [
        command.Segment(FROM_TARGET, "so"), command.Segment(FROM_MATCH, " it is"),
        command.Segment(FROM_MISMATCH, " four", " five"), command.Segment(FROM_TARGET, "\x1b[2J"),
    ]  # fmt: skip
    assert command.marked(segments, colour=False).plain == "so[= it is=][~ four|five~]\N{REPLACEMENT CHARACTER}[2J"
    coloured = command.marked(segments, colour=True)
    assert coloured.plain == "so it is four(five)\N{REPLACEMENT CHARACTER}[2J"
    styles = {coloured.plain[span.start : span.end]: span.style for span in coloured.spans}
    assert styles == {" it is": "green", " four": "bold yellow", "(five)": "dim"}


def test_a_token_inside_a_character_waits_for_its_end():
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(alphabet, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = tokenizer("né €")["input_ids"]
    assert len(ids) == 1 + 2 + 1 + 3
    texts = command.token_texts(SimpleNamespace(decode=tokenizer.decode), ids)
    assert texts == ["n", "", "é", " ", "", "", "€"]
    cut = command.token_texts(SimpleNamespace(decode=tokenizer.decode), ids[:-1])
    assert "".join(cut) == tokenizer.decode(ids[:-1])


def test_a_mistake_ends_with_one_message(house, tmp_path):
    save_tiny_llama(tmp_path / "stranger", seed=9, vocab_size=VOCAB)
    shifted = make_tokenizer(WORDS[1:])
    save_tiny_llama(tmp_path / "shifted", vocab_size=VOCAB)
    shifted.save_pretrained(tmp_path / "shifted")
    (tmp_path / "none.jsonl").write_text('{"text": "a"}\n')
    long = " ".join(["a"] * 2040)
    for options, sentence in (
        (["--target", str(tmp_path / "gone"), "--prompt", "a"], "--target .*gone: the directory does not exist"),
        (["--target", str(tmp_path / "stranger"), "--scorer", str(house / "scorer_target"), "--prompt", "a"],
         "belongs to the model .*target' .*; the model here, .*stranger'"),
        (["--draft", str(tmp_path / "shifted"), "--prompt", "a"],
         r"--draft .*shifted has another vocabulary than the target \(58 and 59 tokens; '\*' is id 52 and 53\)"),
        (["--prompt", "a", "  "], "prompt 2 is empty"),
        (["--prompt", long], "a prompt of 2040 tokens and 24 new ones do not fit into the 2048 positions"),
        (["--prompts", str(tmp_path / "none.jsonl")], "prompt 1 is empty or no text .--prompts reads the columns"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=sentence) as error:
            run(house, *options)
        assert "\n" not in str(error.value)


def test_a_broken_base_model_of_adapters_is_named(house, tmp_path):
    shutil.copytree(house / "target", tmp_path / "base")
    config = ScoringModelConfig(base_model_path=str(tmp_path / "base"), backbone="own", lora_rank=2)
    AutoModelForSPDScoring.from_config(config).save_pretrained(tmp_path / "scorer")
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SystemExit, match="the model in .*/base cannot be loaded .*; copy that folder again"):
        run(house, "--scorer", str(tmp_path / "scorer"), "--prompt", "a")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rule", "margin"], "needs --threshold"), (["--rule", "exact", "--threshold", "1"], "has no --threshold"),
        (["--rule", "scorer"], "name a scorer"), (["--rule", "all", "--scorer", "x"], "name a scorer"),
        (["--gamma", "0"], "give at least 1"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(options, sentence, capsys):
    with pytest.raises(SystemExit):
        command.parse(["--target", "t", "--draft", "d", "--prompt", "a", *options])
    assert sentence in capsys.readouterr().err


def test_models_have_the_dtype_that_is_asked_for_or_the_cpus(house):
    folders = [f"--{name}={house / name}" for name in ("target", "draft")] + ["--device", "cpu"]
    for dtype in ("float32", "bfloat16", default_dtype("cpu")):
        session = command.Session(command.parse([*folders, f"--dtype={dtype}"]))
        assert session.target.dtype == session.draft.dtype == getattr(torch, dtype)
    assert command.parse(folders).dtype == dtype


def test_the_summary_by_hand():
    fast = SpecResult([[5] * 9, [5] * 3], [[0] * 9, [0] * 3], [2, 1], [7, 2], [4, 1], [3, 0], [True, False], 2.0)
    plain = SpecResult([[5] * 9, [6]], [[0] * 9, [0]], [9, 1], [0, 0], [0, 0], [0, 0], [True, True], 5.0)
    assert command.summary(fast, plain) == [
        "draft tokens accepted: 9 in 3 target forwards, 3.00 a forward", "mismatches accepted: 3 of 5 judged",
        "same text as plain greedy decoding: 1 of 2; output length ratio 1.200; 2.50 times as fast",
    ]  # fmt: skip
