"""DAPO on the driver: filtered groups, surplus prompts, limits, counts, resume; the overlong buffer by hand numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.columns import object_columns
from tests.helpers.logs import logged
from tests.helpers.models import make_tokenizer, save_tiny_llama
from tests.helpers.rl_run import FakeGroup, compose_run, fake_trainer, metrics_rows, write_prompts
from verl.protocol import DataProto
from verl.trainer.ppo.dapo_trainer import RayDAPOTrainer, _merged
from verl.trainer.ppo.utils import Role
from verl.trainer.run.timing import StepFailed
from verl.workers.reward_manager import get_reward_manager_cls

ROOT = Path(__file__).resolve().parents[2]
TREE = "recipe.dapo.config/dapo_trainer"


class OddPromptsAlike(FakeGroup):
    """All samples of a prompt with an odd number in the data set are the same."""

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        output = super().generate_sequences(prompts)
        odd = np.repeat(prompts.non_tensor_batch["sample_index"] % 2 == 1, prompts.meta_info["n"])
        output.batch["responses"][torch.from_numpy(odd)] = 30
        return output


class AllAlike(FakeGroup):
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        output = super().generate_sequences(prompts)
        output.batch["responses"][:] = 30
        return output


def dapo_config(directory, **more):
    settings = {"algorithm__filter_groups__enable": "true", "algorithm__filter_groups__metric": "seq_reward",
                "algorithm__filter_groups__keep_surplus": "true",
                "data__train_batch_size": 4, "data__gen_batch_size": 6,
                "actor_rollout_ref__actor__ppo_mini_batch_size": 4, "trainer__total_training_steps": 3, **more}
    return compose_run(directory, "unused", TREE, **settings)


def dapo(directory, group_class=OddPromptsAlike, **more):
    return fake_trainer(dapo_config(directory, **more), group_class, RayDAPOTrainer)


def fitted(directory, group_class=OddPromptsAlike, **more):
    """The trainer after its training."""
    trainer = dapo(directory, group_class, **more)
    trainer.fit()
    return trainer


@pytest.mark.process
def test_batches_are_filled_with_groups_that_differ(tmp_path):
    trainer = fitted(tmp_path)
    rows = metrics_rows(tmp_path)
    assert len(rows) == 3
    for row, update in zip(rows, trainer.actor_rollout_wg.updates, strict=True):
        assert len(update) == 16 and row["training/scored_samples"] == 16
        assert row["training/requested_samples"] == 16 + row["training/dropped_samples"]
        dropped = [row[f"training/dropped_samples/{why}"] for why in ("filtered", "surplus", "lost")]
        assert sum(dropped) == row["training/dropped_samples"]
        for index in update.batch["group_index"].unique():
            scores = (update.batch["responses"] != 30).sum(-1)[update.batch["group_index"] == index]
            assert scores.unique().numel() == 4
    drawn = [uid for asked in trainer.actor_rollout_wg.generated for uid in asked]
    assert sum(row["train/num_gen_batches"] for row in rows) == len(trainer.actor_rollout_wg.generated)
    assert set(drawn) == {str(i) for i in range(len(set(drawn)))}  # no prompt of the stream is passed over


@pytest.mark.process
def test_surplus_prompts_come_first_and_are_answered_anew(tmp_path):
    trainer = fitted(tmp_path, FakeGroup)  # all 6 groups differ: 2 are left over, then 4
    generated = trainer.actor_rollout_wg.generated
    assert generated == [["0", "1", "2", "3", "4", "5"], ["4", "5", "6", "7", "8", "9", "10", "11"],
                         ["8", "9", "10", "11"]]
    assert [row["training/dropped_samples/surplus"] for row in metrics_rows(tmp_path)] == [8, 16, 0]
    assert [row["training/weights_version"] for row in metrics_rows(tmp_path)] == [0, 1, 2]


@pytest.mark.process
def test_surplus_prompts_survive_a_resume(tmp_path):
    fitted(tmp_path, FakeGroup, trainer__save_freq=1, trainer__total_training_steps=2)
    state = json.loads((tmp_path / "out" / "global_step_2" / "trainer_state.json").read_text())
    assert [row["uid"] for row in state["variant"]["surplus"]] == ["8", "9", "10", "11"]
    whole = fitted(tmp_path / "whole", FakeGroup)
    again = fitted(tmp_path, FakeGroup, trainer__save_freq=1)
    assert again.actor_rollout_wg.generated == whole.actor_rollout_wg.generated[2:]
    assert torch.equal(again.actor_rollout_wg.updates[0].batch["input_ids"],
                       whole.actor_rollout_wg.updates[2].batch["input_ids"])


@pytest.mark.process
def test_surplus_prompts_of_other_data_are_dropped(tmp_path):
    fitted(tmp_path, FakeGroup, trainer__save_freq=1, trainer__total_training_steps=1)  # leaves 4 and 5 over
    config = dapo_config(tmp_path, trainer__allow_data_change="true", trainer__total_training_steps=2)
    rows = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:8]))
    again = fake_trainer(config, FakeGroup, RayDAPOTrainer)
    with logged() as warnings:
        again.fit()
    assert again.actor_rollout_wg.generated == [["6", "7", "8", "9", "10", "11"]]
    assert [line for line in warnings if "surplus" in line] == [
        "2 surplus prompts of the checkpoint are dropped: they are rows of other data"
    ]


@pytest.mark.process
def test_a_run_of_the_plain_trainer_is_resumed_as_dapo(tmp_path):
    plain = {"trainer__save_freq": 1, "trainer__total_training_steps": 1, "data__gen_batch_size": 4}
    fake_trainer(dapo_config(tmp_path, **plain), FakeGroup).fit()
    again = fitted(tmp_path, FakeGroup, data__gen_batch_size=4, trainer__total_training_steps=2)
    assert again.actor_rollout_wg.generated == [["4", "5", "6", "7"]]


UNNUMBERED = """
from verl.data.rl_dataset import RLHFDataset

class Unnumbered(RLHFDataset):
    def __getitem__(self, item):
        return {name: value for name, value in super().__getitem__(item).items() if name != "sample_index"}
"""


@pytest.mark.process
def test_a_data_set_without_row_numbers_keeps_no_surplus_and_says_so_once(tmp_path):
    (tmp_path / "own.py").write_text(UNNUMBERED)
    own = {"data__custom_cls__path": tmp_path / "own.py", "data__custom_cls__name": "Unnumbered"}
    trainer = dapo(tmp_path, FakeGroup, **own)
    with logged() as warnings:
        trainer.fit()
    assert [asked[0] for asked in trainer.actor_rollout_wg.generated] == ["0", "6", "12"]
    (line,) = [line for line in warnings if "keep_surplus" in line]
    assert "no column 'sample_index'" in line


@pytest.mark.process
def test_several_small_generations_fill_a_batch_and_lose_nothing_to_the_ranks(tmp_path):
    """3 prompts whose samples stay together are no even share of 2 ranks; the batch of 4 is."""
    shared = {"actor_rollout_ref__actor__share_prompt_forward": "true", "trainer__total_training_steps": "null"}
    trainer = dapo(tmp_path, FakeGroup, data__gen_batch_size=3, **shared)
    # 24 prompts are 8 draws, 2 epochs 16 draws of 3, a batch takes 4
    assert trainer.total_training_steps == 12
    trainer.total_training_steps = 2
    trainer.fit()
    asked = [generated[:-1] for generated in trainer.actor_rollout_wg.generated]  # the last one fills up the ranks
    assert asked == [["0", "1", "2"], ["3", "4", "5"], ["4", "5", "6", "7", "8"]]
    rows = metrics_rows(tmp_path)
    assert [row["train/num_gen_batches"] for row in rows] == [2, 1]
    assert [row["training/dropped_samples/uneven"] for row in rows] == [0, 0]
    assert [row["training/dropped_samples/surplus"] for row in rows] == [8, 4]
    assert [len(update) for update in trainer.actor_rollout_wg.updates] == [16, 16]


class LosingOne(FakeGroup):
    lost_rows = (0,)


@pytest.mark.process
def test_a_lost_sample_of_an_odd_batch_leaves_an_even_one(tmp_path):
    odd = {"data__train_batch_size": 5, "actor_rollout_ref__actor__ppo_mini_batch_size": 5}
    trainer = fitted(tmp_path, LosingOne, trainer__total_training_steps=2, **odd)
    # A group of three stays on one rank, so that 2 ranks share 4 prompts; the fifth waits with the sixth.
    assert trainer.actor_rollout_wg.generated == [["0", "1", "2", "3", "4", "5"],
                                                  ["4", "5", "6", "7", "8", "9", "10", "11"]]
    for row, update, surplus in zip(metrics_rows(tmp_path), trainer.actor_rollout_wg.updates, (8, 16), strict=True):
        assert row["training/scored_samples"] == 15 and row["training/dropped_samples/lost"] == 1
        assert row["training/dropped_samples/surplus"] == surplus
        assert len(update) == 16 and (update.batch["response_mask"].sum(-1) == 0).sum() == 1
        halves = [set(update.batch["group_index"][half].tolist()) for half in (slice(8), slice(8, 16))]
        assert [len(half) for half in halves] == [2, 2] and not halves[0] & halves[1]


@pytest.mark.process
def test_a_batch_that_ranks_cannot_share_once_a_sample_is_lost_is_named(tmp_path):
    one = {"data__train_batch_size": 1, "actor_rollout_ref__actor__ppo_mini_batch_size": 1}
    with pytest.raises(StepFailed, match="batch_size=1 with lost samples gives 2 ranks no even share.*=2 or more"):
        fitted(tmp_path, LosingOne, **one)


@pytest.mark.process
def test_the_limit_ends_a_run_whose_groups_are_all_alike(tmp_path):
    trainer = dapo(tmp_path, AllAlike, algorithm__filter_groups__max_num_gen_batches=3)
    said = r"3 generations gave 0 of data.train_batch_size=4 .*max_num_gen_batches=3"
    with logged() as lines, pytest.raises(StepFailed, match=said):
        trainer.fit()
    (line,) = [line for line in lines if "nothing can be learned" in line]  # what the answers look like, once
    assert "step 1: all 24 samples have the reward 0" in line and "100% of the answers were cut" in line


@pytest.mark.process
def test_a_metric_that_no_reward_returns_is_refused(tmp_path):
    with pytest.raises(StepFailed, match="metric='accc' is unknown: the reward returns seq_reward.*words"):
        fitted(tmp_path, FakeGroup, algorithm__filter_groups__metric="accc")


@pytest.mark.process
def test_without_a_filter_it_is_the_plain_trainer(tmp_path):
    trainer = fitted(tmp_path, algorithm__filter_groups__enable="false", data__gen_batch_size=4)
    assert [len(asked) for asked in trainer.actor_rollout_wg.generated] == [4, 4, 4]
    assert "train/num_gen_batches" not in metrics_rows(tmp_path)[0]


class WithLogProbs(OddPromptsAlike):
    """Ranks that also give log-probs, 0.1 apart from the reference's."""

    def compute_log_prob(self, data):
        self.calls.append("old")
        zeros = torch.zeros(data.batch["responses"].shape)
        return DataProto.from_dict({"old_log_probs": zeros, "entropys": zeros})

    def compute_ref_log_prob(self, data):
        self.calls.append("ref")
        return DataProto.from_dict({"ref_log_prob": torch.full(data.batch["responses"].shape, -0.1)})


@pytest.mark.process
def test_a_filter_on_final_rewards_subtracts_the_kl_before_it_and_not_twice(tmp_path):
    config = compose_run(
        tmp_path, "unused", TREE, algorithm__filter_groups__enable="true", data__train_batch_size=4,
        algorithm__filter_groups__metric="seq_final_reward", algorithm__use_kl_in_reward="true",
        algorithm__kl_ctrl__kl_coef=0.5, data__gen_batch_size=4, trainer__total_training_steps=1,
        actor_rollout_ref__actor__ppo_mini_batch_size=4,
    )
    trainer = fake_trainer(config, WithLogProbs, RayDAPOTrainer, {Role.RefPolicy: FakeGroup})
    trainer.fit()
    group, row = trainer.actor_rollout_wg, metrics_rows(tmp_path)[0]
    generations = row["train/num_gen_batches"]
    assert generations > 1
    assert group.calls.count("old") == group.calls.count("ref") == generations  # not asked again by the loop
    # k1 = old - ref = 0.1 on each of 6 tokens, times 0.5
    assert row["critic/rewards/mean"] == pytest.approx(row["critic/score/mean"] - 0.5 * 0.1 * 6, rel=1e-4)
    assert row["actor/reward_kl_penalty"] == pytest.approx(0.1, rel=1e-4)


class Shares(WithLogProbs):
    """Ranks that take whole groups of 4 rows, as many each."""

    def compute_log_prob(self, data):
        assert len(data) % 8 == 0 and all(len(rows.unique()) == 1 for rows in data.batch["group_index"].split(4))
        output = super().compute_log_prob(data)
        output.batch["old_log_probs"] += data.batch["group_index"][:, None]
        return output


@pytest.mark.process
def test_ranks_share_the_forward_of_a_generation_that_is_no_even_share(tmp_path):
    config = dapo_config(
        tmp_path, algorithm__filter_groups__metric="seq_final_reward", algorithm__use_kl_in_reward="true",
        algorithm__kl_ctrl__kl_coef=0.5, data__gen_batch_size=3, trainer__total_training_steps=1,
        actor_rollout_ref__actor__share_prompt_forward="true",
    )  # fmt: skip
    trainer = fake_trainer(config, Shares, RayDAPOTrainer, {Role.RefPolicy: FakeGroup})
    with trainer._rollout_awake():
        samples, _ = trainer._gather_from(trainer._next_prompts()[0])
    trainer._reward_with_penalty(samples)
    assert len(samples) == 12
    # old log-probs 0, 1, 2 by group, reference -0.1, 6 tokens
    penalty = (samples.batch["token_level_scores"] - samples.batch["token_level_rewards"]).sum(-1)
    wanted = [0.5 * 6 * (group + 0.1) for group in range(3) for _ in range(4)]
    assert penalty.tolist() == pytest.approx(wanted, rel=1e-4)


def answers(lengths):
    tokens = 10
    mask = (torch.arange(tokens)[None] < torch.tensor(lengths)[:, None]).long()
    prompt = torch.ones(len(lengths), 2, dtype=torch.int64)
    return DataProto.from_dict(
        tensors={"prompts": prompt, "responses": torch.full((len(lengths), tokens), 7),
                 "attention_mask": torch.cat([prompt, mask], 1), "response_mask": mask},
        non_tensors=object_columns(
            data_source=["x"] * len(lengths), reward_model=[{"ground_truth": "a"}] * len(lengths)
        ),
    )


def manager(**buffer):
    return get_reward_manager_cls("dapo")(
        tokenizer=make_tokenizer(), num_examine=0, compute_score=lambda **kw: 1.0, max_resp_len=10,
        overlong_buffer_cfg={"enable": True, "len": 4, "penalty_factor": 0.5, "log": True, **buffer},
    )


def test_the_buffer_takes_points_in_a_straight_line():
    # 10 - 4 = 6 tokens are free; then 0.5 / 4 a token.
    result = manager()(answers([6, 7, 10]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == pytest.approx([1.0, 0.875, 0.5])
    assert result["reward_extra_info"]["overlong"] == [False, True, True]
    assert result["reward_extra_info"]["overlong_reward"] == pytest.approx([0.0, -0.125, -0.5])
    assert result["reward_extra_info"]["acc"] == [1.0, 1.0, 1.0]
    quiet = manager(enable=False)(answers([10]), return_dict=True)
    assert quiet["reward_tensor"].sum().item() == 1.0 and "overlong" not in quiet["reward_extra_info"]


def test_a_buffer_longer_than_the_answers_is_refused():
    with pytest.raises(ValueError, match="reward_model.overlong_buffer.len=11 must lie between 1 and"):
        manager(len=11)


@pytest.mark.process
def test_weights_are_sent_once_per_step_with_validation_and_two_draws(tmp_path):
    config = dapo_config(tmp_path, data__gen_batch_size=3, algorithm__filter_groups__keep_surplus="false",
                         trainer__test_freq=1, trainer__val_before_train="true")  # fmt: skip
    trainer = fake_trainer(config, FakeGroup, RayDAPOTrainer)
    trainer.fit()
    calls, rows = trainer.actor_rollout_wg.calls, metrics_rows(tmp_path)
    assert [row["train/num_gen_batches"] for row in rows[1:]] == [2, 2, 2]
    # before training; then after each update, for the validation: the next step's draws find the weights there
    assert calls.count("send_weights") == 1 + 3
    assert [row["rollout/weight_syncs"] for row in rows] == [1, 1, 1, 1]
    assert all(row["val-aux/requested_samples"] == 4 for row in rows)


@pytest.mark.process
def test_the_papers_script_passes_the_dry_run(tmp_path):
    files = write_prompts(tmp_path, prompts=1536)
    model = save_tiny_llama(tmp_path / "model", positions=32768)
    env = {**os.environ, "MODEL": model, "TRAIN": files["train.jsonl"], "VAL": files["val.jsonl"], "NNODES": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"  # the script starts python3
    script = ROOT / "recipe" / "dapo" / "run_dapo_qwen2.5_32b.sh"
    more = ["trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.dry_run=true"]
    more += ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    more += [f"custom_reward_function.path={files['reward.py']}"]
    run = subprocess.run([script, *more], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert "512 prompts x 16" in run.stdout and "16 of 512 samples" in run.stdout


def test_metrics_of_all_generations_are_kept():
    draws = [{"actor/reward_kl_penalty": 1.0, "training/requested_samples": 4, "training/epoch": 0},
             {"actor/reward_kl_penalty": 2.0, "training/requested_samples": 8, "training/epoch": 1}]
    assert _merged(draws) == {"actor/reward_kl_penalty": 1.5, "training/requested_samples": 12, "training/epoch": 1,
                              "train/num_gen_batches": 2}
