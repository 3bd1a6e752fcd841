"""Short runs on one rank: PPO with a critic, ReMax, LoRA through vLLM, DAPO, rollout correction, a reward model.

Each run learns to generate numbers from scratch; a control with learning rate 0 does not. Not covered: CUDA ranks, Ray.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from tests.helpers.models import WORDS, make_tokenizer, save_markov_llama, save_tiny_llama
from tests.helpers.rl_run import compose_run, metrics_rows
from verl.report.metric_names import unknown_metrics

STEPS = 14
ROLLOUT, ACTOR = "actor_rollout_ref__rollout__", "actor_rollout_ref__actor__"
BASE = {
    "trainer__local": "true", "trainer__total_training_steps": STEPS, "trainer__total_epochs": 10,
    f"{ACTOR}optim__lr": "5e-3", f"{ROLLOUT}n": 8, f"{ACTOR}ppo_micro_batch_size_per_gpu": 64,
    f"{ROLLOUT}log_prob_micro_batch_size_per_gpu": 64,
}  # fmt: skip
VLLM = {f"{ROLLOUT}name": "vllm", f"{ROLLOUT}dtype": "float32", f"{ROLLOUT}max_num_seqs": 64,
        f"{ROLLOUT}calculate_log_probs": "true"}  # fmt: skip
LORA = {"actor_rollout_ref__model__lora_rank": 16, "actor_rollout_ref__model__lora_alpha": 32,
        "actor_rollout_ref__model__target_modules": "[q_proj,v_proj,down_proj,lm_head]",
        f"{ACTOR}optim__lr": "2e-2"}  # fmt: skip
PPO = {"algorithm__adv_estimator": "gae", "critic__optim__lr": "5e-3", "trainer__critic_warmup": 2,
       "critic__ppo_micro_batch_size_per_gpu": 64, "critic__model__use_remove_padding": "true"}  # fmt: skip
DAPO = {"algorithm__filter_groups__enable": "true", "algorithm__filter_groups__metric": "seq_reward",
        "algorithm__filter_groups__max_num_gen_batches": 6, "data__gen_batch_size": 8,
        "reward_model__overlong_buffer__enable": "true", "reward_model__overlong_buffer__len": 2,
        "reward_model__overlong_buffer__penalty_factor": 0.1, f"{ACTOR}clip_ratio_high": 0.28}  # fmt: skip
CORRECTED = {**VLLM, "algorithm__rollout_correction__rollout_is": "token",
             "algorithm__rollout_correction__rollout_rs": "geometric",
             "algorithm__rollout_correction__rollout_rs_threshold": 1.5,
             "algorithm__rollout_correction__rollout_token_veto_threshold": 1e-4}  # fmt: skip

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]


def run(directory: Path, model: str, tree: str = "verl.trainer.config/ppo_trainer", **more) -> list[dict]:
    from recipe.dapo.dapo_ray_trainer import RayDAPOTrainer
    from verl.trainer.main_ppo import TaskRunner
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    directory.mkdir(exist_ok=True)
    config = compose_run(directory, model, tree, **{**BASE, "critic__model__path": model, **more})
    trainer = TaskRunner().build(RayDAPOTrainer if "dapo" in tree else RayPPOTrainer, config, None)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()
    rows = metrics_rows(directory)
    assert unknown_metrics([name for row in rows for name in row if name != "step"]) == []
    return rows


def gain(rows: list[dict]) -> float:
    """Mean score of the last four steps less that of the first four."""
    scores = [row["critic/score/mean"] for row in rows]

    return sum(scores[-4:]) / 4 - sum(scores[:4]) / 4


@pytest.fixture(scope="module")
def control(tiny_llama, tmp_path_factory) -> float:
    rows = run(tmp_path_factory.mktemp("control"), tiny_llama, **{f"{ACTOR}optim__lr": 0})
    assert len({row["critic/score/mean"] for row in rows}) > 1
    return gain(rows)


def test_a_control_without_learning_gains_nothing(control):
    assert abs(control) < 0.05


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {}),
        ("shared", {f"{ACTOR}share_prompt_forward": "true"}),
        ("lora_vllm", {**VLLM, **LORA}),
        ("remax", {"algorithm__adv_estimator": "remax"}),
        ("corrected", CORRECTED),
    ],
)
def test_it_learns_more_than_the_control(control, tiny_llama, tmp_path, name, settings):
    rows = run(tmp_path / name, tiny_llama, **settings)
    assert gain(rows) > control + 0.15
    if "vllm" in settings.values():
        assert all(row["training/rollout_probs_diff_mean"] < 1e-4 for row in rows)
        assert all(abs(row["rollout_corr/kl"]) < 1e-4 for row in rows)
    if name == "corrected":
        assert all(row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-3) for row in rows)
        assert all(row["rollout_corr/rollout_rs_masked_fraction"] == 0 for row in rows)


def test_ppo_with_a_critic_learns_and_continues_after_a_resume(control, tiny_llama, tmp_path):
    first = run(tmp_path / "ppo", tiny_llama, **PPO, trainer__save_freq=STEPS)
    assert gain(first) > control + 0.15
    losses = [row["critic/vf_loss"] for row in first]
    assert sum(losses[-4:]) < sum(losses[:4])
    assert "actor/pg_loss" not in first[0] and "actor/pg_loss" in first[2]  # critic_warmup=2
    folder = tmp_path / "ppo" / "out" / f"global_step_{STEPS}"
    assert (folder / "critic" / "model").is_dir() and (folder / "actor" / "model").is_dir()
    again = run(tmp_path / "ppo", tiny_llama, **{**PPO, "trainer__total_training_steps": STEPS + 2})
    assert [row["step"] for row in again] == list(range(1, STEPS + 3))
    assert again[-1]["critic/vf_loss"] < losses[0]


def test_dapo_learns_from_groups_that_differ(control, tiny_llama, tmp_path):
    rows = run(tmp_path / "dapo", tiny_llama, "recipe.dapo.config/dapo_trainer", **DAPO)
    assert gain(rows) > control + 0.15
    assert all(row["training/requested_samples"] == row["training/scored_samples"] + row["training/dropped_samples"]
               for row in rows)  # fmt: skip
    assert all(row["train/num_gen_batches"] >= 1 for row in rows)


def test_on_policy_distillation_brings_the_student_to_its_teacher(tmp_path):
    student = save_tiny_llama(tmp_path / "student", vocab_size=len(make_tokenizer()))
    teacher = save_markov_llama(tmp_path / "teacher", WORDS, dict.fromkeys(WORDS, "7"), sharpness=7.0)
    distil = {"algorithm__adv_estimator": "opd", "actor_rollout_ref__ref__model_path": teacher}
    rows = run(tmp_path / "run", student, **distil)
    kl = [-row["critic/advantages/mean"] for row in rows]  # log student - log teacher, per token
    assert kl[0] > 1 and sum(kl[-3:]) / 3 < 0.5 * kl[0]
    make_tokenizer(["other", *WORDS[1:]]).save_pretrained(teacher)
    with pytest.raises(ValueError, match=r"ref.model_path=.* has another vocabulary .* differ at the token '0'"):
        run(tmp_path / "foreign", student, **distil)


def test_a_reward_model_scores_the_last_token_of_each_answer(tiny_llama, tmp_path):
    torch.manual_seed(3)
    model = AutoModelForTokenClassification.from_pretrained(tiny_llama, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(tmp_path / "rm")
    make_tokenizer().save_pretrained(tmp_path / "rm")
    rows = run(
        tmp_path / "run", tiny_llama, reward_model__enable="true", reward_model__model__path=tmp_path / "rm",
        reward_model__micro_batch_size_per_gpu=16, custom_reward_function__path="null",
        trainer__rollout_data_dir=tmp_path / "dump", trainer__total_training_steps=2,
    )
    dumped = [json.loads(line) for line in (tmp_path / "dump" / "1.jsonl").read_text().splitlines()]
    assert rows[0]["critic/score/mean"] == pytest.approx(sum(row["score"] for row in dumped) / len(dumped), rel=1e-4)
    tokenizer, matches = make_tokenizer(), 0
    for row in dumped:
        ids = tokenizer(row["input"] + " " + row["output"])["input_ids"]
        ends = [ids, [*ids, tokenizer.eos_token_id]]  # the dump leaves special tokens out
        with torch.no_grad():
            values = [model(input_ids=torch.tensor([i])).logits[0, -1, 0].item() for i in ends]
        matches += any(value == pytest.approx(row["score"], rel=1e-3, abs=1e-4) for value in values)
    assert matches > len(dumped) / 4  # an untrained model says special tokens in the middle of many answers
