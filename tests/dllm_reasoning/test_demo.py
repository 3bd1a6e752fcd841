"""Every option of the demo command, and the alignment check on a real model."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from dllm_reasoning.inference import demo, generator
from dllm_reasoning.losses import layouts
from dllm_reasoning.scripts import verify_label_alignment
from tests.dllm_reasoning import runs
from verl.models.loading import create_huggingface_actor
from verl.utils.tokenizer import hf_tokenizer

details_of = partial(generator.iterative_generate, return_details=True)

PROMPTS = ["a 2 + 3 =", "7 + 1 =", "b c 4 + 4 = d"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return runs.save_model(tmp_path_factory.mktemp("dllm") / "model")


def run(model_path, tmp_path, *options, dtype=("--dtype", "float32")):  # that of `tokens_of`
    out = tmp_path / "out.jsonl"
    settings = ["--model_path", model_path, "--output_file", str(out), "--max_new_tokens", "12", *dtype]
    code = demo.main([*settings, *options])
    return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def tokens_of(model_path, prompts, **more):
    tokenizer, model = hf_tokenizer(model_path), create_huggingface_actor(model_path)
    ids = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
    result = details_of(model, ids, 2, 0, **{"max_new_tokens": 12, **more})
    return [tokenizer.decode(t, skip_special_tokens=True) for t in result.tokens], result.stats


def test_one_prompt_with_the_defaults(model_path, tmp_path, capsys):
    code, rows = run(model_path, tmp_path, "--prompt", PROMPTS[0])
    expected, stats = tokens_of(model_path, PROMPTS[:1])
    assert code == 0 and [r["response"] for r in rows] == expected and rows[0]["prompt"] == PROMPTS[0]
    assert rows[0]["tokens"] == stats.tokens[0] and rows[0]["forwards"] == stats.forwards[0]
    assert "tokens per forward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "settings"),
    [(["--refine_iter", "slide", "--add_eos_length", "5"], {"refine_iter": "slide", "add_eos_length": 5}),
     (["--refine_iter", "0", "--add_eos_length", "3"], {"refine_iter": 0, "add_eos_length": 3}),
     (["--max_new_tokens", "3"], {"max_new_tokens": 3}),
     (["--max_length", "9"], {"max_length": 9}),
     (["--noise_token_id", "7", "--refine_iter", "1"], {"noise_token_id": 7, "refine_iter": 1}),
     (["--temperature", "1.1", "--top_k", "9", "--top_p", "0.8", "--seed", "4"],
      {"temperature": 1.1, "top_k": 9, "top_p": 0.8, "seed": 4}),
     (["--refine_iter", "slide", "--confidence_threshold", "0.2"],
      {"refine_iter": "slide", "confidence_threshold": 0.2})],
)  # fmt: skip
def test_options_reach_the_generator(model_path, tmp_path, options, settings):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n\n")
    code, rows = run(model_path, tmp_path, "--prompts_file", str(file), "--batch_size", "3", *options)
    expected, _ = tokens_of(model_path, PROMPTS, **settings)
    assert code == 0 and [r["response"] for r in rows] == expected


def test_draws_do_not_depend_on_the_batch_size(model_path, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    sampled = ("--prompts_file", str(file), "--temperature", "1.3", "--seed", "4", "--refine_iter", "slide")
    expected, _ = tokens_of(model_path, PROMPTS, temperature=1.3, seed=4, refine_iter="slide")
    for size in ("1", "2", "3"):
        _, rows = run(model_path, tmp_path, *sampled, "--batch_size", size)
        assert [row["response"] for row in rows] == expected
    assert len(set(expected)) == 3


def test_every_prompt_is_checked_before_the_first_is_answered(model_path, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "iterative_generate", lambda *_, **__: pytest.fail("answered"))
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join([*PROMPTS, "a " * 30]))
    code, _ = run(model_path, tmp_path, "--prompts_file", str(file), "--max_length", "20")
    assert code == 1 and "prompt 3 has 30 tokens; it needs at least one, and fewer than" in capsys.readouterr().err


def test_batches_display_and_columns(model_path, tmp_path, capsys):
    file = runs.save_rows(tmp_path / "prompts.parquet", [(p, "x") for p in PROMPTS])
    expected, _ = tokens_of(model_path, PROMPTS)
    for size in ("1", "2"):
        code, rows = run(model_path, tmp_path, "--prompts_file", file, "--batch_size", size, "--max_display", "1")
        assert code == 0 and [r["response"] for r in rows] == expected
        shown = capsys.readouterr().out
        assert PROMPTS[0] in shown and PROMPTS[1] not in shown
    code, rows = run(model_path, tmp_path, "--prompts_file", file, "--prompt_key", "output")
    assert code == 0 and [r["prompt"] for r in rows] == ["x"] * 3


def test_chat_template_wraps_the_prompt(model_path, tmp_path):
    code, rows = run(model_path, tmp_path, "--prompt", PROMPTS[0], "--use_chat_template")
    assert code == 0 and [r["response"] for r in rows] == tokens_of(model_path, [f"q : {PROMPTS[0]} a : "])[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--prompts_file", "nowhere.txt"], "--prompts_file nowhere.txt does not exist"),
     (["--prompt", "a", "--refine_iter", "sldie"], "refine_iter='sldie' is unknown; did you mean 'slide'?"),
     (["--prompt", "a", "--dtype", "int3"], "--dtype='int3' is not a dtype"),
     (["--prompt", ""], "prompt 0 has 0 tokens")],
)  # fmt: skip
def test_errors_end_with_one_message(model_path, tmp_path, capsys, options, message):
    code, _ = run(model_path, tmp_path, *options)
    assert code == 1 and message in capsys.readouterr().err


def test_label_alignment_holds_on_a_real_model_and_on_a_case_of_its_own(model_path, capsys):
    real = ["--model_path", model_path, "--instruction", "a 2 + 3 =", "--response", "5 . b c d e"]
    for arguments in (real, []):
        assert verify_label_alignment.main(arguments) == 0
        assert capsys.readouterr().out.count(": ok") == 4


@pytest.mark.parametrize(
    ("broken", "wrong"),
    [("labels", ["next-token labels", "loss"]), ("mask", ["response mask"]), ("shift", ["decode shift"])],
)
def test_broken_label_alignment_is_reported(model_path, capsys, monkeypatch, broken, wrong):
    if broken == "labels":
        monkeypatch.setattr(layouts, "_next_labels", lambda ids, answers: torch.where(answers, ids, -100))
    elif broken == "mask":
        spoil = lambda ids, answers, noised, token: torch.where(noised.roll(1, 1), token, ids)  # noqa: E731
        monkeypatch.setattr(layouts, "q_sample", spoil)
    else:
        unshifted = lambda ids, predicted, region: torch.where(region.bool(), predicted, ids)  # noqa: E731
        monkeypatch.setattr(verify_label_alignment, "greedy_decode_response", unshifted)
    arguments = ["--model_path", model_path, "--instruction", "a 2 + 3 =", "--response", "5 . b c d e"]
    assert verify_label_alignment.main(arguments) == 1
    lines = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _, outcome in lines if outcome.startswith("WRONG: ")] == wrong


def test_label_alignment_says_which_losses_it_does_not_compare(capsys, monkeypatch):
    monkeypatch.setattr(verify_label_alignment, "mask_problem", lambda model: "takes no position_ids")
    assert verify_label_alignment.main([]) == 0
    assert "\nloss (of full rows only: the model takes no position_ids): ok\n" in capsys.readouterr().out


def test_label_alignment_needs_a_tokenizer_with_an_end(model_path, monkeypatch):
    endless = SimpleNamespace(eos_token=None, eos_token_id=None)
    monkeypatch.setattr(verify_label_alignment, "hf_tokenizer", lambda path: endless)
    with pytest.raises(SystemExit, match=f"--model_path {model_path}: the tokenizer has no EOS token; add one to"):
        verify_label_alignment.main(["--model_path", model_path])
