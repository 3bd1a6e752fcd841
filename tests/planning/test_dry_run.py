"""A dry run prints plan and every problem, in two classes, and starts nothing."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import pandas as pd
import pytest
from transformers import AutoConfig

from tests.helpers.configs import compose_ppo
from verl.config.rollout import RolloutConfig
from verl.planning.checks import Findings, check_length
from verl.trainer.main_ppo import dry_run
from verl.utils.problems import CHECKS, UNUSED, WRONG, absent, register_check, wrong


def prompts(count, **changes):
    row = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "1"}}
    rows = [{**row, "prompt": [{"role": "user", "content": "1 + 1"}], "extra_info": {"index": i}} for i in range(count)]
    for row in rows:
        row.update(changes)
    return pd.DataFrame(rows)


@pytest.fixture
def overrides(tmp_path, tiny_llama):
    prompts(70).to_parquet(tmp_path / "train.parquet")
    prompts(6).to_parquet(tmp_path / "val.parquet")
    return [
        f"data.train_files={tmp_path}/train.parquet", f"data.val_files=[{tmp_path}/val.parquet]",
        f"actor_rollout_ref.model.path={tiny_llama}", "actor_rollout_ref.rollout.name=hf",
        "data.train_batch_size=16", "actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4", "trainer.total_epochs=3",
        "data.max_prompt_length=16", "data.max_response_length=8",
    ]  # fmt: skip


def plan(overrides, capsys, **kwargs):
    """(exit code, printed text)"""
    return dry_run(compose_ppo(*overrides), known=compose_ppo(), **kwargs), capsys.readouterr().out


def row(text, name):
    line = next(line for line in text.splitlines() if f" {name} " in line)
    return line.split("│")[2].strip()


# 16 prompts x 4 = 64 samples on 8 ranks: 8 a rank. Two mini-batches of 8 x 4 = 32 samples: 4 a rank, hence two
# micro-batches of at most 3. 70 prompts fill 4 batches an epoch, 12 in 3 epochs.
def test_eight_gpu_ranks_are_planned_without_a_gpu(overrides, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("ray.init", lambda *args, **kwargs: pytest.fail("a dry run starts nothing"))
    code, text = plan(overrides, capsys)
    assert code == 0, text[-3000:]
    assert row(text, "prompts for training") == "70"
    assert row(text, "prompts for validation") == "6"
    assert row(text, "longest of the first 70 prompts") == "7 tokens"
    assert row(text, "ranks") == "8"
    assert row(text, "samples a step") == "64 (16 prompts x 4)"
    assert row(text, "samples a step and rank") == "8"
    assert row(text, "mini-batches a step") == "2 of 32 samples"
    assert row(text, "samples a mini-batch and rank") == "4"
    assert row(text, "micro-batches a mini-batch and rank") == "2 of at most 3 samples"
    assert row(text, "steps per epoch") == "4"
    assert row(text, "steps in all") == "12" and " reward function " not in text
    assert "Memory of one rank" in text
    assert "Wrong on every machine: 0" in text
    assert "this machine has 0 GPUs" in text.partition("Absent on this machine: 1")[2]


def test_every_problem_is_listed_at_once(overrides, capsys, tmp_path):
    code, text = plan(
        [*overrides, "+data.sed=1", "data.truncation=lft", f"data.val_files={tmp_path}/none.parquet",
         "actor_rollout_ref.rollout.name=hff", "actor_rollout_ref.model.policy.name=causal", "trainer.device=cpu",
         "custom_reward_function.path=no/such/file.py", "data.train_batch_size=30"],
        capsys,
    )  # fmt: skip
    wrong_part = text.partition("Wrong on every machine")[2].partition("Absent on this machine")[0]
    assert code == 1
    assert text.index(" Plan ") < text.index(" Problems ") and "max_response_length: " not in text  # print_cfg.py does
    for said in ("did you mean data.seed?", "did you mean 'left'", "none.parquet", "did you mean 'hf'",
                 "did you mean 'causal_lm'", "no/such/file.py"):  # fmt: skip
        assert said in wrong_part, said


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ("actor_rollout_ref.model.path=/no/such/folder", 1, "/no/such/folder: the folder does not exist"),
        ("actor_rollout_ref.model.path=a/model", 0, "a/model is neither a folder nor in the cache"),
        ("actor_rollout_ref.actor.fsdp_config.sequence_parallel=true", 0,
         "actor.fsdp_config.sequence_parallel=True has no effect with"),
        ("data.val_files=null", 1, "data.val_files=null: name the files to validate on"),
        ("data.val_files=[]", 1, "data.val_files=[]: name the files to validate on"),
        ("data.train_max_samples=10 trainer.val_only=true", 0, "Wrong on every machine: 0"),
        ("data.train_max_samples=10", 1,
         "has 10 prompts, which do not fill one batch of 16. Set data.train_batch_size=10"),
        ("data.train_max_samples=20 data.gen_batch_size=32", 1,
         "which do not fill one batch of 32. Set data.gen_batch_size=20 or less"),
        ("data.train_max_samples=10 data.gen_batch_size=32", 1,  # fewer are also too few for data.train_batch_size=16
         "Set data.gen_batch_size=10 and data.train_batch_size=10 or less"),
        ("data.train_max_samples=6", 1,  # fewer than a mini-batch of 8
         "Set data.train_batch_size=6 and actor_rollout_ref.actor.ppo_mini_batch_size=6 or less"),
        ("data.train_max_samples=0", 1, "has 0 prompts, which do not fill one batch of 16. Add some"),
        ("actor_rollout_ref.rollout.temperature=0", 1,
         "actor_rollout_ref.rollout.temperature=0 makes all samples of a prompt the same"),
    ],
)  # fmt: skip
def test_a_setting_has_its_sentence_and_its_class(overrides, capsys, settings, code, said):
    done, text = plan([*overrides, "trainer.device=cpu", *settings.split()], capsys)
    assert done == code and said in text
    assert "train_max_samples" in settings or row(text, "prompts for training") == "70"


def test_an_interpolation_that_cannot_be_resolved_is_a_problem(overrides, capsys):
    code, text = plan([*overrides, "data.truncation=${data.nothing}"], capsys)
    assert code == 1 and "data.truncation cannot be resolved: Interpolation key 'data.nothing' not found" in text


@pytest.mark.parametrize(("n", "end"), [(4, "config. Leave out"), (1, "config, but read the warnings. Leave out")])
def test_the_last_line_refers_to_warnings(overrides, capsys, n, end):
    _, text = plan([*overrides, "trainer.device=cpu", f"actor_rollout_ref.rollout.n={n}"], capsys)
    assert f"Nothing is wrong with this {end} trainer.dry_run=true" in text


def test_rows_that_cannot_be_used_are_named(overrides, capsys, tmp_path):
    prompts(70, prompt="1 + 1").to_parquet(tmp_path / "train.parquet")
    code, text = plan([*overrides, "trainer.device=cpu"], capsys)
    assert code == 1
    assert "train.parquet, row 0: column 'prompt' is a string; expected a list of {role, content}" in text
    assert "65 further rows have errors like these" in text


def test_a_column_that_the_reward_needs_is_asked_for(overrides, capsys, tmp_path):
    prompts(6).drop(columns="reward_model").to_parquet(tmp_path / "val.parquet")
    code, text = plan([*overrides, "trainer.device=cpu"], capsys)
    column = "no column reward_model ({'ground_truth': ...}, which the reward function gets)"
    assert code == 1 and f"data.val_files: {tmp_path}/val.parquet, row 0: {column}" in text


def test_a_mistake_in_tools_is_reported_once_for_both_splits(overrides, capsys, tmp_path):
    (tmp_path / "tools.yaml").write_text("tools:\n  - class_name: no.such.Tool\n")
    added = [f"data.tool_config_path={tmp_path}/tools.yaml", "trainer.device=cpu"]
    code, text = plan([*overrides, *added], capsys)
    assert code == 1 and text.count("data.train_files: ") == 1 and "data.val_files: " not in text


def test_a_ground_truth_that_no_answer_equals_is_named_wherever_it_is(overrides, capsys, tmp_path):
    table = prompts(70)
    table.at[66, "reward_model"] = {"style": "rule", "ground_truth": "so\n#### 18"}
    table.to_parquet(tmp_path / "train.parquet")
    given = [*overrides, "trainer.device=cpu"]
    code, text = plan(given, capsys)
    assert code == 1 and f"data.train_files: {tmp_path}/train.parquet, row 66: ground_truth=" in text
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): ...")
    assert plan([*given, f"custom_reward_function.path={tmp_path}/reward.py"], capsys)[0] == 0


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gpg", "reinforce_plus_plus_baseline", "reinforce_plus_plus"])
def test_an_estimator_that_compares_samples_warns_of_a_single_one(overrides, capsys, estimator):
    given = [*overrides, "trainer.device=cpu", "actor_rollout_ref.rollout.n=1", f"algorithm.adv_estimator={estimator}"]
    code, text = plan(given, capsys)
    warned = f"n=1 with algorithm.adv_estimator={estimator}, which compares the samples of a prompt" in text
    assert code == 0 and warned == (estimator != "reinforce_plus_plus")


@pytest.mark.parametrize(
    ("loss", "mode", "warns"),
    [("gspo", "seq-mean-token-sum", True), ("geo_mean", "seq-mean-token-sum-norm", True), ("gspo", "token-mean", False),
     ("sapo", "seq-mean-token-mean", False), ("vanilla", "seq-mean-token-sum", False)],
)  # fmt: skip
def test_an_aggregation_that_the_loss_does_not_read_is_named(overrides, capsys, loss, mode, warns):
    actor = "actor_rollout_ref.actor"
    words = [f"{actor}.policy_loss.loss_mode={loss}", f"{actor}.loss_agg_mode={mode}", "trainer.device=cpu"]
    code, text = plan([*overrides, *words], capsys)
    assert code == 0 and (f"loss_agg_mode={mode} has no effect with policy_loss.loss_mode={loss}" in text) == warns


@pytest.fixture
def own_checks():
    """Checks that a test registers end with it; those of modules that it is the first to import stay."""
    yield
    CHECKS[:] = [check for check in CHECKS if check.__module__ != __name__]


def test_a_recipe_adds_its_own_checks(overrides, capsys, own_checks):
    @register_check
    def servers(config, findings):
        yield absent("spd.servers", f"spd.servers does not answer; eos is {findings.tokenizer.eos_token_id}")

    cpu = [*overrides, "trainer.device=cpu"]
    code, text = plan(cpu, capsys)
    assert code == 0 and "spd.servers does not answer; eos is 2" in text.partition("Absent on this machine: 1")[2]
    assert "but this machine lacks something" in text and "to start it" not in text
    register_check(lambda config, findings: [wrong("spd.backbone", "spd.backbone=x is unknown")])
    code, text = plan(cpu, capsys)
    assert code == 1 and "spd.backbone=x is unknown" in text


def test_settings_without_effect_are_reported_and_harm_nothing(overrides, capsys):
    key = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
    changes = ["trainer.device=cpu", f"{key}=triton", "trainer.default_hdfs_dir=hdfs://a"]
    code, text = plan([*overrides, *changes], capsys)
    assert code == 0 and "trainer.default_hdfs_dir=hdfs://a: the `hdfs` command is not on PATH" in text
    message = f"{key}=triton has no effect in this version: log-probs are always computed by PyTorch"
    assert message in text.partition("Warnings: 1")[2]


def test_a_reward_function_must_take_what_it_is_called_with(overrides, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(solution_str, ground_truth):\n    return 1.0\n")
    given = [*overrides, "trainer.device=cpu", f"custom_reward_function.path={file}"]
    code, text = plan(given, capsys)
    assert code == 1 and "compute_score (" in text
    assert "got an unexpected keyword argument 'data_source'; reward manager naive calls it with data_source," in text
    assert plan([*given, "reward_manager.name=batch"], capsys)[0] == 0  # it passes lists by other names


def test_secrets_are_not_printed(overrides, capsys):
    _, text = plan(
        [*overrides, "+trainer.wandb_proxy='http://user:hush1@proxy:80'",
         "+actor_rollout_ref.rollout.custom.api_key=hush2", "+ray_kwargs.ray_init.runtime_env.env_vars.ANY=hush3"],
        capsys,
    )  # fmt: skip
    assert "hush" not in text


def test_a_context_that_cuts_answers_is_named():
    """A prompt of 8 tokens and an answer of 16 need 24: with 21, prompts of more than 5 tokens cut it."""
    config = RolloutConfig(name="vllm", prompt_length=8, response_length=16, max_model_len=21)
    (problem,) = check_length(config, Findings(), "rollout")
    what = "max_model_len=21 is less than rollout.prompt_length + rollout.response_length = 24"
    assert problem.kind == UNUSED and what in problem.message
    assert "answers to prompts of more than 5 tokens are cut before response_length. Raise it." in problem.message
    for more in ({"max_model_len": 24}, {"max_model_len": None}, {"max_model_len": 21, "name": "hf"}):
        assert not list(check_length(dataclasses.replace(config, **more), Findings(), "rollout"))


@pytest.mark.parametrize(
    ("limit", "kind", "advice"),  # a model of 16 positions, a prompt of 8 tokens and an answer of 16
    [(None, WRONG, "Lower data.max_prompt_length + data.max_response_length to 16 or less."),
     (17, WRONG, "Lower actor_rollout_ref.rollout.max_model_len to 16 or less."),
     (16, UNUSED, "Lower data.max_prompt_length + data.max_response_length.")],
)  # fmt: skip
def test_the_limit_to_lower_is_named_and_no_advice_leads_above_the_positions(limit, kind, advice):
    config = RolloutConfig(name="vllm", prompt_length=8, response_length=16, max_model_len=limit)
    model = AutoConfig.for_model("llama", max_position_embeddings=16)
    problem, *_ = check_length(config, Findings(hf_config=model), "actor_rollout_ref.rollout")
    assert problem.kind == kind and problem.message.endswith(advice)


def test_loggers_nodes_and_rules_of_data_sources_are_checked(overrides, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code, text = plan([*overrides, "trainer.logger=[wandbb]", "trainer.nnodes=2"], capsys)
    assert code == 1 and "trainer.logger='wandbb' is unknown; did you mean 'wandb'?" in text
    assert "trainer.nnodes=2: this command alone starts one node" in text.partition("Absent on this machine")[2]
    prompts(20, data_source="openai/gsm8").to_parquet(tmp_path / "train.parquet")
    code, text = plan(overrides, capsys)
    rule = "no rule reward for data_source='openai/gsm8'; did you mean 'openai/gsm8k'?"
    assert code == 1 and f"data.train_files: {tmp_path}/train.parquet, row 0: {rule}" in text
    (tmp_path / "mine.py").write_text("def compute_score(*args, **kwargs): return 1.0\n")
    code, text = plan([*overrides, f"custom_reward_function.path={tmp_path}/mine.py"], capsys)
    assert code == 0 and row(text, "reward function") == "compute_score of mine.py"


def test_memory_of_all_cpu_ranks_and_room_for_the_checkpoints_are_those_of_this_machine(
    overrides, capsys, monkeypatch
):
    vllm = "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes"
    cpu = [*overrides, "trainer.device=cpu", "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.name=vllm",
           "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"]  # fmt: skip
    monkeypatch.setattr("verl.planning.machine.available_memory", lambda: 3 << 30)
    code, text = plan([*cpu, "trainer.save_freq=1", f"+{vllm}={2 << 30}"], capsys)
    # Three processes of 600 MiB, and two caches of 2 GiB; the model has 0.1 million parameters.
    assert code == 0 and "the driver and 2 ranks (trainer.n_gpus_per_node) need about 5.8 GiB of memory, and" in text
    keys = {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2, vllm: 2 << 30, "trainer.n_gpus_per_node": 2}
    advice = ", ".join(f"lower {key} (now {value})" for key, value in keys.items())
    advice = f"set actor_rollout_ref.model.enable_gradient_checkpointing=true, {advice}"
    assert f"this machine has 3.0 GiB available. To need less: {advice}." in text
    assert "at a time" not in text
    (per_rank, *_), on = keys, "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    old = per_rank.removesuffix("_per_gpu")  # of all ranks; both are refused
    _, text = plan([*cpu, f"{per_rank}=null", f"{old}=4", f"+{vllm}={2 << 30}", on], capsys)
    assert f"To need less: lower {old} (now 4), lower" in text
    monkeypatch.setattr("verl.planning.machine.available_memory", lambda: 1 << 20)  # too little: it turns itself on
    assert f"To need less: lower {per_rank} (now 2), lower" in plan(cpu, capsys)[1]
    monkeypatch.setattr("verl.planning.machine.available_memory", lambda: 8 << 30)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10 << 20))
    _, text = plan([*cpu, "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=9"], capsys)
    assert "GiB available" not in text and "the run has up to 10 checkpoints of 0.00 GiB at a time, and 0.01" in text
    assert "Lower trainer.max_actor_ckpt_to_keep, leave parts out of actor_rollout_ref.actor.checkpoint" in text
    _, text = plan([*cpu, "trainer.save_freq=0"], capsys)
    assert "at a time, and" not in text


def test_sglang_that_is_not_installed_is_absent_here(overrides, capsys, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "sgl_kernel" else real(name, *a))
    options = ["actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.mode=async", "trainer.device=cpu"]
    _, text = plan([*overrides, *options, "actor_rollout_ref.rollout.lora_as_adapter=true"], capsys)
    flat = " ".join(text.replace("│", " ").split())
    assert "rollout.name=sglang: the package" in flat and "make sglang-env" in flat and "Absent on this machine" in flat
    rollout = "actor_rollout_ref.rollout"
    what = f"{rollout}.lora_as_adapter=true does not work with {rollout}.name=sglang: SGLang receives merged weights"
    assert what in flat
