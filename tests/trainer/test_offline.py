"""Generation and scoring without training: all that is asked is answered, in order; mistakes are named."""

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.helpers.configs import compose_ppo
from tests.helpers.engines import leave_group
from tests.helpers.logs import logged
from tests.helpers.models import make_tokenizer, save_tiny_llama
from tests.helpers.ranks import run_ranks
from verl.config.compose import to_settings
from verl.config.offline import EvaluationConfig
from verl.planning.offline import generation_entry
from verl.reward.rows import RewardError
from verl.rollout.vllm_rollout import vLLMRollout
from verl.single_controller.base import Worker
from verl.trainer import main_eval, main_generation
from verl.trainer.main_eval import evaluate
from verl.trainer.main_generation import run_generation
from verl.utils.problems import ConfigError
from verl.workers.config import HFModelConfig, RolloutConfig

ROOT = Path(__file__).resolve().parents[2]
CPU = ("trainer.device=cpu", "rollout.name=hf", "rollout.dtype=float32", "rollout.prompt_length=12",
       "rollout.response_length=5", "rollout.ignore_eos=true", "data.batch_size=2")  # fmt: skip


@pytest.fixture(autouse=True)
def no_group():
    yield
    leave_group()


@pytest.fixture
def prompts(tmp_path):
    rows = [
        {"data_source": "even" if i % 2 else "odd", "prompt": [{"role": "user", "content": f"{i} + {2 * i} ="}],
         "reward_model": {"style": "rule", "ground_truth": str(3 * i)}, "extra_info": {"index": i}}
        for i in range(5)
    ]  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def generate(prompts, model, out, *overrides):
    given = (f"model.path={model}", f"data.path={prompts}", f"data.output_path={out}", *CPU, *overrides)
    run_generation(compose_ppo(*given, config_name="generation"))
    return pq.read_table(out).to_pylist()


def test_an_engine_of_its_own_keeps_the_weights_it_started_with(monkeypatch):
    """Asleep it would lose them, and nothing hands them over again."""
    made = []
    monkeypatch.setattr(main_generation, "get_rollout_class", lambda *name: lambda config, *parts: made.append(config))
    settings = RolloutConfig(name="vllm", load_format="auto")
    main_generation.make_rollout(None, settings, None)
    assert settings.enable_sleep_mode and not made[0].enable_sleep_mode


def test_greedy_answers_are_those_of_plain_transformers(tiny_llama, prompts, tmp_path):
    rows = generate(prompts, tiny_llama, tmp_path / "out.parquet", "rollout.do_sample=false", "data.n_samples=1")
    tokenizer, model = make_tokenizer(), AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows:
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        asked = ids.shape[1]
        with torch.no_grad():
            for _ in range(5):
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        assert row["responses"] == [tokenizer.decode(ids[0, asked:], skip_special_tokens=True)]


@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=[pytest.mark.process, pytest.mark.slow])])
def test_answers_end_where_generation_config_or_the_key_says(tiny_llama, prompts, tmp_path, name):
    """`ends` is the second token of the first answer: named by generation_config.json, and not named by the key."""
    settings = ("rollout.do_sample=false", "data.n_samples=1", "rollout.ignore_eos=false", f"rollout.name={name}")
    tokenizer, model = make_tokenizer(), AutoModelForCausalLM.from_pretrained(tiny_llama)
    free = generate(prompts, tiny_llama, tmp_path / "free.parquet", *CPU, "rollout.do_sample=false", "data.n_samples=1")
    texts = [row["responses"][0].split() for row in free]
    ends = tokenizer.convert_tokens_to_ids(texts[0][1])
    model.generation_config = GenerationConfig(eos_token_id=[2, ends])
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    leave_group()
    rows = generate(prompts, tmp_path / "model", tmp_path / "out.parquet", *settings)
    stop = texts[0][1]
    assert [row["responses"][0].split() for row in rows] == [
        text[: text.index(stop) + 1] if stop in text else text for text in texts
    ]
    leave_group()
    with logged() as said:
        rows = generate(prompts, tmp_path / "model", tmp_path / "key.parquet", *settings, "rollout.stop_token_ids=[3]")
    assert [row["responses"][0].split() for row in rows] == texts
    (line,) = [line for line in said if "were cut" in line]
    assert "of the answers were cut at a limit of tokens; raise rollout.response_length" in line


@pytest.mark.process
@pytest.mark.slow
def test_two_ranks_as_a_user_starts_them_and_vllm_answer_as_one_rank_does(tiny_llama, prompts, tmp_path):
    settings = ("rollout.do_sample=false", "data.n_samples=1")
    one = generate(prompts, tiny_llama, tmp_path / "one.parquet", *settings)
    out = tmp_path / "two.parquet"
    given = [f"model.path={tiny_llama}", f"data.path={prompts}", f"data.output_path={out}", *CPU, *settings]
    command = [sys.executable, "-m", "verl.trainer.main_generation", *given, "trainer.n_gpus_per_node=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert pq.read_table(out).to_pylist() == one
    leave_group()
    assert generate(prompts, tiny_llama, tmp_path / "vllm.parquet", *settings, "rollout.name=vllm") == one


@pytest.mark.process
@pytest.mark.slow
def test_vllm_rounds_float32_weights_as_their_conversion_does(tiny_llama, prompts, tmp_path):
    settings = ("data.n_samples=2", "rollout.name=vllm", "rollout.dtype=bfloat16")
    rounded = generate(prompts, tiny_llama, tmp_path / "1.parquet", *settings)
    leave_group()
    converted = tmp_path / "converted"
    shutil.copytree(tiny_llama, converted)
    AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).save_pretrained(converted)
    assert generate(prompts, converted, tmp_path / "2.parquet", *settings) == rounded


def taken_from_the_queue(rank, world_size, together):
    """The numbers below 50 that each `shares` of this rank gave; the last rank takes its time."""
    taken = []
    for share in main_generation.shares(50, 3, together):
        taken.append(share)
        if len(taken) == 1:
            dist.barrier()  # a rank that starts late still finds a share
        if rank == world_size - 1:
            time.sleep(0.5)
    return taken


@pytest.mark.process
@pytest.mark.slow
def test_no_rank_waits_for_a_slow_one_and_ranks_of_one_engine_step_together():
    quick, slow = run_ranks(taken_from_the_queue, 2, 1)
    assert sorted(i for share in (*quick, *slow) for i in share) == list(range(50))
    assert len(quick) > len(slow) > 0
    pairs = run_ranks(taken_from_the_queue, 4, 2)
    assert {i for taken in pairs for share in taken for i in share} == set(range(50))
    for a, b in (pairs[:2], pairs[2:]):
        assert [len(share) for share in a] == [len(share) for share in b]
    assert len(pairs[0]) > len(pairs[2])


@pytest.mark.parametrize(("gpus", "local_rank", "expected"), [(8, 3, 3), (1, 3, 0)])
def test_each_ranks_engine_is_on_that_ranks_gpu(monkeypatch, tiny_llama, gpus, local_rank, expected):
    """Without device_ids vLLM takes the first visible GPU; torchrun shows all of them, as Ray does with NOSET."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    rollout = vLLMRollout.__new__(vLLMRollout)
    rollout.config, rollout.model_config = RolloutConfig(name="vllm"), HFModelConfig(path=tiny_llama)
    rollout.on_cuda, rollout.can_sleep = True, True
    assert rollout._engine_arguments()["device_ids"] == [expected]
    rollout.config = RolloutConfig(name="vllm", tensor_model_parallel_size=2)
    arguments = rollout._engine_arguments()  # its launcher takes LOCAL_RANK
    assert "device_ids" not in arguments and arguments["distributed_executor_backend"] == "external_launcher"


@pytest.mark.parametrize(
    ("noset", "visible", "ids", "expected"),
    [("1", "4,5,6,7", ["6"], "2"), ("1", None, ["6"], "6"), ("1", "4,5", [], "0"), ("", "6", ["6"], "0"),
     ("", None, [], "3")],
)  # fmt: skip
def test_a_worker_of_ray_selects_the_gpu_that_ray_gave_it(monkeypatch, noset, visible, ids, expected):
    import ray

    for name, value in {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": noset, "CUDA_VISIBLE_DEVICES": visible}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    for name, value in {"WG_BACKEND": "ray", "LOCAL_RANK": "3", "RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ids})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert Worker().local_rank == int(expected)


def test_a_long_prompt_anywhere_is_found_at_the_start(tiny_llama, prompts, tmp_path):
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    rows[4]["prompt"][0]["content"] = "1 + " * 9
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = f"{prompts}, row 4: the prompt has 22 tokens, rollout.prompt_length=12. Raise it"
    with pytest.raises(ConfigError, match=said):
        generate(prompts, tiny_llama, tmp_path / "out.parquet")


def test_a_stopped_command_keeps_its_answers_and_resumes_with_the_same_settings_only(
    tiny_llama, prompts, tmp_path, monkeypatch
):
    settings = ("data.n_samples=2", "rollout.top_p=1.0", "rollout.top_k=-1")
    whole = generate(prompts, tiny_llama, tmp_path / "whole.parquet", *settings)
    assert all(len(set(row["responses"])) == 2 for row in whole)
    out, folder = tmp_path / "out.parquet", tmp_path / "out.parquet.partial"
    real, asked = main_generation.answers, []

    def answers(rollout, rows, *parts):
        asked.append([int(row["sample_index"]) for row in rows])
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(rollout, rows, *parts)

    monkeypatch.setattr(main_generation, "answers", answers)
    with pytest.raises(KeyboardInterrupt):
        generate(prompts, tiny_llama, out, *settings)
    leave_group()
    assert not out.exists() and asked == [[0, 1], [2, 3], [4]]
    (kept,) = folder.glob("*.jsonl")
    lines = kept.read_text().splitlines(keepends=True)
    assert [json.loads(line) for line in lines] == [{"row": i, "responses": whole[i]["responses"]} for i in range(4)]
    kept.write_text("".join(lines[:3]) + lines[3][:-9])  # killed while it wrote
    for change, key in (("rollout.temperature=0.5", "rollout.temperature"), ("data.n_samples=1", "data.n_samples")):
        with pytest.raises(ConfigError, match=f"since then changed: {key}. Restore the former settings"):
            generate(prompts, tiny_llama, out, *settings, change)
    other = save_tiny_llama(tmp_path / "other", seed=1)
    (tmp_path / "fewer.jsonl").write_text("".join(prompts.read_text().splitlines(keepends=True)[:4]))
    with pytest.raises(ConfigError, match=r"since then changed: data.path, model.path\."):
        generate(tmp_path / "fewer.jsonl", other, out, *settings)
    assert len(asked) == 3 and len([*folder.glob("*.jsonl")]) == 1
    asked.clear()
    assert generate(prompts, tiny_llama, out, *settings, "data.batch_size=4", "rollout.max_num_seqs=2") == whole
    assert asked == [[3, 4]] and not folder.exists()


def test_columns_that_cannot_be_written_are_refused_before_answers_are_generated(tiny_llama, prompts, tmp_path):
    rows = [json.loads(line) | {"note": "text"} for line in prompts.read_text().splitlines()]
    rows[2]["note"] = 5
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="column 'note' cannot be written as parquet next to the answers: .* Give it"):
        generate(prompts, tiny_llama, tmp_path / "out.parquet")


def test_all_mistakes_of_a_start_stand_in_one_message(tiny_llama, prompts, tmp_path):
    with pytest.raises(ConfigError) as raised:
        generate(
            prompts, tiny_llama, tmp_path / "out.parquet", "rollout.temperature=0", "data.prompt_key=question",
            "+data.n_sample=1", "rollout.top_p=2", "trainer.n_gpus_per_node=9", "trainer.device=cuda",
            "rollout.name=vllm", "rollout.load_format=dummy", "rollout.response_length=4096",
        )  # fmt: skip
    for said in ("7 problems in the config", "would be one text 5 times", "no column 'question'", "rollout.top_p=2",
                 "data.n_sample is not a known key; did you mean data.n_samples?", "trainer.n_gpus_per_node=9 with",
                 "load_format=dummy", "is 4108 tokens, but the model has 2048 positions"):  # fmt: skip
        assert said in str(raised.value), said
    with pytest.raises(ConfigError) as raised:
        generate(tmp_path / "absent.jsonl", "/no/model", tmp_path / "out.parquet")
    assert "absent.jsonl: file does not exist" in str(raised.value) and "model.path=/no/model" in str(raised.value)
    assert not [*tmp_path.glob("out.parquet*")]
    (tmp_path / "out.parquet.partial").touch()
    for path, there in ((tmp_path, "a folder, not a file"), (prompts / "a", "not a folder"),
                        (tmp_path / "out.parquet", "out.parquet.partial is not a folder")):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"data.output_path: {path}\S* cannot be written: .* is {there}|{there}"):
            generate(prompts, tiny_llama, path)


def test_a_fault_of_the_check_is_hidden_by_problems_but_not_by_warnings(tiny_llama, prompts):
    def fails(config):
        raise RuntimeError("a fault")

    given = (f"model.path={tiny_llama}", f"data.path={prompts}", "data.output_path=a.parquet", *CPU)
    entry = dataclasses.replace(generation_entry(), input_problems=fails)
    warned = compose_ppo(*given, "model.fused_kernel_options.impl_backend=triton", config_name="generation")
    with pytest.raises(RuntimeError, match="a fault"):
        entry.refuse_problems(warned)
    wrong = compose_ppo(*given, "data.batch_size=0", config_name="generation")
    with pytest.raises(ConfigError, match="data.batch_size=0"):
        entry.refuse_problems(wrong)


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    if solution_str == "raise":
        raise ZeroDivisionError("nothing to divide")
    return float(solution_str == ground_truth) + bonus

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": True}
"""


def scored(tmp_path, rows, *overrides):
    (tmp_path / "reward.py").write_text(REWARD)
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"data.path={path}", f"custom_reward_function.path={tmp_path / 'reward.py'}", *overrides)
    return evaluate(to_settings(compose_ppo(*given, config_name="evaluation"), EvaluationConfig))


def answer(source, truth, responses):
    return {"data_source": source, "reward_model": {"ground_truth": truth}, "responses": responses}


@pytest.mark.process
def test_scores_are_means_over_rows_of_the_means_over_answers(tmp_path):
    rows = [answer("a", "3", ["3", "4"]), answer("a", "5", ["5"]), answer("b", "1", "2")]
    assert scored(tmp_path, rows) == {"test_score/a": 0.75, "test_score/b": 0.0}
    assert scored(tmp_path, rows, "custom_reward_function.name=later") == {"test_score/a": 0.75, "test_score/b": 0.0}
    more = "+custom_reward_function.reward_kwargs.bonus=1"
    assert scored(tmp_path, rows, more) == {"test_score/a": 1.75, "test_score/b": 1.0}
    gsm = [answer("openai/gsm8k", "18", ["so #### 18", "so #### 17"])]
    assert scored(tmp_path, gsm, "custom_reward_function.path=null") == {"test_score/openai/gsm8k": 0.5}


@pytest.mark.process
def test_what_cannot_be_scored_is_named_by_row(tmp_path):
    good = answer("a", "3", ["3"])
    with pytest.raises(RewardError, match="row 1 .*raised ZeroDivisionError: nothing to divide"):
        scored(tmp_path, [good, answer("a", "3", ["raise"])])
    with logged() as lines:
        dropped = scored(tmp_path, [good, answer("a", "3", ["raise", "2"])], "reward_model.error=drop")
    assert dropped == {"test_score/a": 0.5}
    assert any("33% of the answers, 1 of 3, could not be graded and are left out" in line for line in lines)
    with pytest.raises(ValueError, match="row 1: no column 'responses'.*Set data.response_key"):
        scored(tmp_path, [good, {k: v for k, v in good.items() if k != "responses"}])
    for given in ([], 3, [3]):
        with pytest.raises(ValueError, match="row 0: column 'responses' must hold answers as text, not .*response_key"):
            scored(tmp_path, [answer("a", "3", given)])
    with pytest.raises(RewardError, match="no rule reward for data_source='a'"):
        scored(tmp_path, [good], "custom_reward_function.path=null")


@pytest.mark.process
def test_answers_that_are_programs_are_confined_as_in_training(tmp_path):
    """By the same keys, with the same defaults; what they say is done."""
    evaluation = OmegaConf.to_container(compose_ppo(config_name="evaluation"))["reward_model"]
    training = OmegaConf.to_container(compose_ppo())["reward_model"]
    assert {**evaluation, "num_workers": None} == {key: training[key] for key in evaluation} | {"num_workers": None}
    assert {"sandbox", "sandbox_fusion"} <= set(evaluation)
    code = "```python\nimport time\ntime.sleep(1)\nprint('x' * int(input()))\n```"
    tests = {"inputs": ["3", "2000"], "outputs": ["xxx", "x" * 2000]}
    given = ("custom_reward_function.path=null", "reward_model.sandbox.unconfined=true")
    for more, share in (((), 1.0), (("output_kb=1",), 0.5), (("seconds=0.5",), 0.0)):
        limits = [f"reward_model.sandbox.{limit}" for limit in more]
        assert scored(tmp_path, [answer("taco", tests, [code])], *given, *limits) == {"test_score/taco": share}


def planned(capsys, entry, config_name, *overrides):
    with pytest.raises(SystemExit) as ended:
        entry.__wrapped__(compose_ppo("trainer.dry_run=true", *overrides, config_name=config_name))
    return ended.value.code, " ".join(capsys.readouterr().out.split())


def test_a_dry_run_of_offline_entries_lists_every_problem_and_starts_nothing(tmp_path, tiny_llama, prompts, capsys):
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps(answer("a", "3", ["3", "4"])) + "\n")
    code, said = planned(capsys, main_eval.main, "evaluation", f"data.path={answers}")
    assert code == 0 and "Nothing is wrong" in said and "test_score" not in said
    wrong = (f"data.path={tmp_path}/none.jsonl", "custom_reward_function.path=nowhere.py")
    code, said = planned(capsys, main_eval.main, "evaluation", *wrong)
    assert code == 1 and "data.path: " in said and "custom_reward_function: no Python file at 'nowhere.py'" in said
    code, said = planned(capsys, main_eval.main, "evaluation", "+data.pth=x")
    assert code == 1 and "data.pth" in said and "No plan" in said
    out = tmp_path / "out.parquet"
    given = (f"data.path={prompts}", f"model.path={tiny_llama}", f"data.output_path={out}", *CPU)
    code, said = planned(capsys, main_generation.main, "generation", *given, "trainer.n_gpus_per_node=2")
    assert code == 0 and not out.exists()
    for row in ("tokens of all prompts │ 40", "tokens of a prompt │ mean 8.0, median 8, longest 8 (row 0)",
                "answers │ 25", "new tokens, at most │ 125"):  # fmt: skip
        assert row in said, row
    short = ("rollout.prompt_length=4", "data.truncation=left")
    code, said = planned(capsys, main_generation.main, "generation", *given, *short)
    assert code == 0 and "prompts that are too long │ 5" in said
    code, said = planned(capsys, main_generation.main, "generation", *given, "data.n_samples=0", "trainer.nnodes=2")
    assert code == 1 and "data.n_samples" in said and "trainer.nnodes" in said
