"""The dLLM demo's corpus, evaluation and plots; its benchmark on a small shape. Not covered: trained results."""

import json
import re
import sys
import time

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.demo_runner import PhaseFailed, run_side_by_side
from examples.dllm_arithmetic import acceptance, corpus, demo, evaluate


def test_every_worked_step_is_right_and_leads_to_the_answer():
    tables = corpus.draw({"train": 60, "val": 20, "test": 20}, seed=4)
    rows = pd.concat(tables.values())
    assert rows["instruction"].is_unique and [len(t) for t in tables.values()] == [60, 20, 20]
    calculated = 0
    for _, (_, output, answer) in rows.iterrows():
        for a, op, b, c in re.findall(r"((?:\d ?)+)([-+*/]) ((?:\d ?)+)= ((?:\d ?)+)", output):
            a, b, c = (int(x.replace(" ", "")) for x in (a, b, c))
            assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[op] == c
            calculated += 1
        assert corpus.final_answer(output) == answer and corpus.compute_score("", output, answer) == 1.0
        assert corpus.compute_score("", output, str(int(answer) + 1)) == 0.0
    assert calculated > 150 and corpus.draw({"train": 5}, 4)["train"].equals(tables["train"][:5])


def test_every_word_has_a_token_and_numbers_are_digits():
    tokenizer = corpus.build_tokenizer()
    rows = corpus.draw({"train": 300}, seed=1)["train"]
    for text in [*rows["instruction"], *rows["output"]]:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
    assert corpus.digits("15 + 7 = 22") == "1 5 + 7 = 2 2" and corpus.final_answer("no number") is None


def test_paired_interval_by_hand():
    results = evaluate.paired([True, True, False, True], [True, False, False, False])
    # differences 0, 100, 0, 100: mean 50, standard deviation 57.735, standard error 28.868
    assert results["difference"] == 50 and results["low"] == pytest.approx(50 - 1.96 * 28.8675, abs=1e-3)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arithmetic")
    torch.manual_seed(0)
    tokenizer = corpus.build_tokenizer()
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )).save_pretrained(folder / "model")  # fmt: skip
    tokenizer.save_pretrained(folder / "model")
    corpus.write(corpus.draw({"train": 2, "val": 2, "test": 6}, 0), folder)
    return folder


def test_files_have_the_columns_of_sft_and_of_rl(small):
    row = pd.read_parquet(small / "val.parquet").iloc[0]
    assert row.prompt[0]["content"] == row.instruction and row.data_source == corpus.DATA_SOURCE
    assert corpus.compute_score(row.data_source, row.output, row.reward_model["ground_truth"]) == 1.0


def test_evaluation_has_a_row_for_each_mode(small, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.os, "sched_getaffinity", lambda pid: {0})  # a thread, however busy the machine is
    out = tmp_path / "rows.json"
    threads = torch.get_num_threads()
    evaluate.main(["--model", f"tiny={small / 'model'}", "--questions", str(small / "test.parquet"), "--block", "4",
                   "--batch", "4", "--out", str(out)])  # fmt: skip
    torch.set_num_threads(threads)
    results = json.loads(out.read_text())
    assert results["questions"] == 6 == len(results["correct"])
    assert [row["mode"] for row in results["rows"]] == [*evaluate.MODES]
    rows = {row["mode"]: row for row in results["rows"]}
    assert set(rows["slide"]) == {"model", "mode", "block", "accuracy", "accuracy_se", "tokens_per_forward",
                                  "same_as_greedy"}  # fmt: skip
    assert rows["greedy"]["tokens_per_forward"] == 1.0 and rows["greedy"]["block"] == 1 and rows["slide"]["block"] == 4
    for mode in acceptance.LOSSLESS:
        assert rows[mode]["same_as_greedy"] == 1.0 and rows[mode]["accuracy"] == rows["greedy"]["accuracy"]
    assert demo.result_table(results).row_count == len(evaluate.MODES)


def test_parallel_commands_report_their_cpu_seconds_and_stop_together(tmp_path):
    work = "import time; begun = time.process_time()\nwhile time.process_time() - begun < 0.4: pass"
    busy, idle = [sys.executable, "-c", work], [sys.executable, "-c", "pass"]
    seconds = run_side_by_side([(busy, tmp_path / "a"), (idle, tmp_path / "b")])
    assert 0.4 <= seconds[0] < 5 and seconds[1] < seconds[0]
    long = [sys.executable, "-c", "import time; time.sleep(60)"]
    wrong = [sys.executable, "-c", "raise SystemExit(3)"]
    begun = time.monotonic()
    with pytest.raises(PhaseFailed, match="ended with 3"):
        run_side_by_side([(long, tmp_path / "a"), (wrong, tmp_path / "b")])
    assert time.monotonic() - begun < 40
