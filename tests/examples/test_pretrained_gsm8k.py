"""The demo on GSM8K: prompts, reward, commands, report, exported models in vLLM's server, benchmark.

Not covered: the figures of the pretrained model (`make demo-gsm8k` shows them).
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import gsm8k as benchmark
from benchmarks.run import WANTED
from examples.data_preprocess.gsm8k import DATA_SOURCE, convert
from examples.pretrained import demo as grpo
from examples.pretrained import stages
from examples.pretrained.gsm8k import demo, questions, select, serve
from examples.pretrained.gsm8k.reward import compute_score, number_after
from tests.examples.test_grpo_demo import trained_config
from tests.helpers.chat_templates import Format, byte_tokenizer
from verl.agents.agent_loop.tool_parser import ToolParser
from verl.data.chat_template import render_chat
from verl.utils.accelerator import default_dtype
from verl.utils.tokenizer import use_chat_template


@pytest.fixture
def gsm8k(tmp_path):
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for split, count in (("train", 8), ("test", 4)):
        rows = ({"question": f"What is {i} + {i} in {split}?", "answer": f"It is {i} + {i} = {2 * i}.\n#### {2 * i}"}
                for i in range(count))  # fmt: skip
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("prompt", questions.CANDIDATES.values(), ids=questions.CANDIDATES)
def test_the_reward_reads_the_ending_that_the_worked_answers_have(prompt):
    turns = questions.messages(prompt, "How many?\n")
    assert turns[-1]["content"].startswith("How many?") and turns[-1]["role"] == "user"
    worked = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    assert [number_after(prompt.marker, text) for text in worked] == ["26", "60"][: prompt.turns]
    assert number_after(prompt.marker, prompt.ending.format("1,234.5")) == "1234.5"
    assert all(text.endswith(prompt.ending.format(n)) for text, n in zip(worked, (26, 60), strict=False))


def test_there_are_five_prompts_of_which_one_is_upstreams():
    asked = questions.messages(questions.CANDIDATES["instruction"], "How many?")
    assert asked == convert({"question": "How many?", "answer": "#### 1"}, 0, "train")["prompt"]
    assert len(questions.CANDIDATES) == 5
    if select.SELECTION.exists():
        prompts = json.loads(select.SELECTION.read_text())["prompts"]
        assert prompts.keys() == questions.CANDIDATES.keys()
        assert questions.CHOSEN == max(prompts, key=lambda name: prompts[name]["right"])


@pytest.mark.parametrize(
    ("marker", "text", "pred", "right", "last"),
    [
        ("####", "2 * 9 = 18\n#### 18", "18", 1, 1),
        ("####", "#### $1,800", "1800", 0, 0),
        ("####", "The answer is 18.", None, 0, 1),
        ("####", "#### 18\nwhich is 9 twice", "18", 1, 0),
        ("####", "print(9 * 2)", None, 0, 0),
        ("####", "no number", None, 0, 0),
        ("The answer is", "So **the answer is: 18.0**.", "18.0", 1, 1),
        ("The answer is", "The answer is 17. No, the answer is 18.", "18", 1, 1),
        ("The answer is", "The answer is eighteen, 18.", None, 0, 1),
        ("\\boxed{", "The answer is \\boxed{18}.", "18", 1, 1),
        ("\\boxed{", "The answer is \\(18\\).", None, 0, 1),
    ],
)
def test_both_accuracies_by_hand(marker, text, pred, right, last):
    expected = {"score": right, "acc": right, "last_number": last, "answered": float(pred is not None), "pred": pred}
    assert compute_score(DATA_SOURCE, text, "18", {"marker": marker}) == expected


def test_the_files_have_all_training_questions_and_the_first_test_questions(gsm8k, tmp_path, capsys):
    questions.main(["--gsm8k", str(gsm8k), "--prompt", "boxed", "--out", str(tmp_path / "data")])
    assert "train.parquet and test.parquet, with the prompt boxed" in capsys.readouterr().out
    assert {row["marker"] for row in pd.read_parquet(tmp_path / "data" / "train.parquet")["extra_info"]} == {"\\boxed{"}
    questions.main(["--gsm8k", str(gsm8k), "--prompt", "hashes", "--test", "3", "--out", str(tmp_path / "data")])
    train, test = (pd.read_parquet(tmp_path / "data" / f"{split}.parquet") for split in ("train", "test"))
    assert (len(train), len(test)) == (8, 3)
    assert [row[-1]["content"] for row in test["prompt"]] == [f"What is {i} + {i} in test?" for i in range(3)]
    assert [truth["ground_truth"] for truth in test["reward_model"]] == ["0", "2", "4"]
    with open(gsm8k / "train.jsonl", "a") as file:
        file.write(json.dumps({"question": "?", "answer": "two"}) + "\n")
    with pytest.raises(SystemExit, match="train.jsonl, row 8: the answer does not end in '#### <number>': 'two'"):
        questions.write(gsm8k, tmp_path / "data", questions.CANDIDATES["hashes"])


@pytest.mark.parametrize("name", questions.CANDIDATES)
def test_the_rows_have_the_prompts_marker_and_the_training_command_its_limit(tmp_path, name):
    prompt = questions.CANDIDATES[name]
    row = questions.asked(prompt, {"question": "How many?", "answer": "#### 1"}, 0, "train")
    assert row["extra_info"]["marker"] == prompt.marker
    command = grpo.training_command(tmp_path, demo.source(tmp_path), tmp_path / "run", 10, 1,
                                    *demo.settings(prompt, 0), "trainer.device=cuda", lr=0.0)  # fmt: skip
    config = trained_config(command)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (512, prompt.limit)
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (16, 8)
    assert config.actor_rollout_ref.model.lora_rank == 0 and config.trainer.device == "cuda"
    assert config.actor_rollout_ref.actor.optim.lr == 0 and not config.actor_rollout_ref.rollout.val_kwargs.do_sample


def test_lora_is_a_setting_of_all_runs_and_is_served_as_an_adapter_too(tmp_path):
    prompt = questions.CANDIDATES["hashes"]
    command = grpo.training_command(tmp_path, demo.source(tmp_path), tmp_path / "run", 4, 0,
                                    *demo.settings(prompt, 32))  # fmt: skip
    model = trained_config(command).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (32, 32)
    run = stages.Stage("seed0", command, tmp_path / "run", training=(tmp_path / "run", 4))
    plain, lora = (demo.served_stages(run, tmp_path, prompt, rank, tmp_path)[-1].command for rank in (0, 32))
    actor = tmp_path / "run" / "global_step_4" / "actor"
    assert lora == [*plain, "--adapter", str(actor / "lora_adapter")]


def test_each_criterion_can_be_missed():
    def met(gains=(11.0, 13.0), last=(3.0, 5.0), moved=(0.0, 0.0), seconds=5400.0):
        criteria = demo.criteria_of((gains, moved[0]), (last, moved[1]), seconds)
        return [criterion.met for criterion in criteria.values()]

    assert met() == [True, True, True, True]
    assert met(gains=(11.0, 12.0)) == [False, True, True, True]
    assert met(last=(3.0, 4.0)) == [True, False, True, True]
    assert met(moved=(0.4, 0.0)) == [True, True, False, True] == met(moved=(0.0, -0.4))
    assert met(seconds=5401.0) == [True, True, True, False]


def leave_results(command, log, *more):
    """Leaves what a command of the demo would: the accuracies of seed 0, seed 1 and the control."""
    if "verl.trainer.main_ppo" in command:
        config = trained_config(command)
        run = Path(config.trainer.default_local_dir)
        ends = {"seed0": (0.5, 0.5), "seed1": (0.75, 0.625), "control": (0.25, 0.375)}[run.name]
        last = config.trainer.total_training_steps
        run.mkdir(parents=True)
        of_step = {"timing_s/step": 20.0, "critic/score/mean": 0.5, "response_length/mean": 90.0}
        lines = [{"step": step, "data": {demo.ACCURACY: right, demo.LAST_NUMBER: number, demo.ANSWERED: 0.5, **more}}
                 for step, (right, number), more in ((0, (0.25, 0.375), {}), (last, ends, of_step))]  # fmt: skip
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif "examples.pretrained.gsm8k.serve" in command:
        out = Path(command[command.index("--out") + 1])
        row = {"acc": 0.5, "last_number": 0.625, "answered": 1.0, "as_merged": 1.0}
        out.write_text(json.dumps({"questions": 8, "models": {"merged": row}}))


def test_the_report_and_the_benchmark_have_both_accuracies(gsm8k, tmp_path, tiny_llama, monkeypatch, capsys):
    monkeypatch.setattr(stages, "run_logged", leave_results)
    out = tmp_path / "out"
    arguments = ["--gsm8k", str(gsm8k), "--model", tiny_llama, "--out", str(out), "--seeds", "0", "1"]
    assert demo.main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    gained = "gained on 256 test questions, mean of 2 seeds (each)"
    assert f"accuracy by the reward {gained}: 37.5 points (25.0, 50.0); required: at least 12: met" in printed
    assert f"accuracy by the last number {gained}: 18.8 points (12.5, 25.0); required: at least 4: met" in printed
    assert f"report {out / 'seed1' / 'report.html'}" in printed and "median: seed 0: 20.0" in printed
    rows = {row.name: row for row in benchmark.measured(json.loads((out / "result.json").read_text()))}
    assert {name: row.value for name, row in rows.items() if name != "gsm8k_seconds"} == {
        "gsm8k_gain_points": 37.5, "gsm8k_gain_last_number": 18.75, "gsm8k_gain_control": 0.0,
        "gsm8k_start_acc": 25.0, "gsm8k_end_acc": 62.5, "gsm8k_start_last_number": 37.5,
        "gsm8k_end_last_number": 56.25, "gsm8k_step_seconds": 20.0,
    }  # fmt: skip
    beside = {"gsm8k_step_vs_trl", "gsm8k_step_over_parts"}  # benchmarks.gsm8k.steps() measures these
    assert {name for name in WANTED if name.startswith("gsm8k")} == rows.keys() & WANTED.keys() | beside
    assert demo.main(arguments) == 0  # nothing runs again: a second metrics.jsonl could not be made
    with pytest.raises(SystemExit, match="seed0 was made by another command.*lora_rank=4.*--out"):
        demo.main([*arguments, "--lora", "4"])
    with pytest.raises(SystemExit, match="seed0 was made by another command"):
        demo.main([*arguments, "--prompt", "boxed"])


def test_a_folder_without_gsm8k_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="there is no train.jsonl and no test.jsonl"):
        demo.main(["--gsm8k", str(tmp_path), "--out", str(tmp_path / "out")])


def test_prompts_are_compared_by_the_shares_of_their_answers(gsm8k, tmp_path, tiny_llama, monkeypatch):
    """An engine whose first answers are right with the marker, whose second have no marker, and whose rest are cut."""
    pytest.importorskip("vllm")

    def chat(conversations, settings, use_tqdm):
        texts = [("#### 0", "stop"), ("It is 2", "stop"), *[("It is", "length")] * (len(conversations) - 2)]
        outputs = [SimpleNamespace(text=text, finish_reason=reason, token_ids=[0] * 4) for text, reason in texts]
        return [SimpleNamespace(prompt_token_ids=[0] * 10, outputs=[output]) for output in outputs]

    monkeypatch.setattr(select, "engine", lambda model, seed: SimpleNamespace(chat=chat))
    out = tmp_path / "selection.json"
    select.main(["--gsm8k", str(gsm8k), "--model", tiny_llama, "--questions", "4", "--out", str(out)])
    record = json.loads(out.read_text())
    assert record["questions"] == 4 and record["prompts"].keys() == questions.CANDIDATES.keys()
    shares = {name: record["prompts"]["hashes"][name] for name in (*select.SHARES, "answer_tokens", "marker")}
    assert shares == {"right": 0.25, "right_by_last_number": 0.5, "with_marker": 0.25, "cut": 0.5, "answer_tokens": 4,
                      "marker": "####"}  # fmt: skip
    assert record["prompts"]["boxed"]["right"] == 0
    del record["prompts"]["hashes"]
    record["prompts"]["boxed"]["right"] = 0.75
    out.write_text(json.dumps(record))  # as if the command had been stopped
    select.main(["--gsm8k", str(gsm8k), "--model", tiny_llama, "--questions", "4", "--out", str(out)])
    prompts = json.loads(out.read_text())["prompts"]
    assert (prompts["boxed"]["right"], prompts["hashes"]["right"]) == (0.75, 0.25)


@pytest.mark.process
@pytest.mark.slow
def test_an_adapter_is_served_merged_and_as_an_adapter(gsm8k, tmp_path, tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=default_dtype("cpu"))
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path / "merged")
    questions.write(gsm8k, tmp_path / "data", questions.CANDIDATES["hashes"])
    serve.main(["--model", tiny_llama, "--merged", str(tmp_path / "merged"), "--adapter", str(tmp_path / "adapter"),
                "--questions", str(tmp_path / "data" / "test.parquet"), "--max-new-tokens", "4",
                "--out", str(tmp_path / "served.json")])  # fmt: skip
    record = json.loads((tmp_path / "served.json").read_text())
    assert record["questions"] == 4 and record["models"].keys() == {"merged", "adapter"}
    assert record["models"]["merged"]["as_merged"] == 1.0


def test_the_template_for_coder_models_writes_calls_that_the_parser_json_reads():
    template = Path(questions.__file__).with_name("json_calls.jinja")
    tokenizer = byte_tokenizer(Format("", "<|im_end|>", None, None, ("<|im_start|>",)))
    use_chat_template(tokenizer, str(template))
    tools = [{"type": "function", "function": {"name": "check_answer"}}]
    text = render_chat(tokenizer, questions.tool_messages("How many?"), tools=tools, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n")
    assert '\n{"name": "check_answer"}\n' in text and text.count("<|im_start|>") == 1 + 2 * 4 + 2
    read = [ToolParser.get_tool_parser("json", tokenizer).parse(turn) for turn in text.split("<|im_start|>assistant\n")]
    assert [[(call.name, json.loads(call.arguments)) for call in calls] for _, calls in read[1:]] == [
        [("check_answer", {"answer": "26"})], [], [("check_answer", {"answer": "60"})], [], []
    ]


def test_questions_for_the_tool_have_its_right_answer(gsm8k, tmp_path):
    questions.main(["--gsm8k", str(gsm8k), "--tool", "--out", str(tmp_path / "rows")])
    row = pd.read_parquet(tmp_path / "rows" / "train.parquet").iloc[3]
    assert row["agent_name"] == "tool_agent" and row["prompt"][-1]["content"] == "What is 3 + 3 in train?"
    assert row["extra_info"]["tools_kwargs"] == {"check_answer": {"create_kwargs": {"ground_truth": "6"}}}
