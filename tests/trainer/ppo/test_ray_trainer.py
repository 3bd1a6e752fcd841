"""The loop on the driver, with workers that need no Ray: order of steps, drops, stops, resume."""

import time

import pytest
import torch

from tests.helpers.rl_run import FakeGroup, compose_run, fake_run, fake_trainer, group_with, metrics_rows, read_rows
from verl.protocol import DataProto
from verl.trainer.ppo.utils import Role
from verl.trainer.run.failure import NonFiniteRun
from verl.trainer.run.timing import StepFailed
from verl.training.checkpoint.publish import published_steps

pytestmark = pytest.mark.process
LOSING = group_with(lost_rows=(0, 1, 2, 5))  # prompt 0 keeps one of four samples, prompt 1 three
NEVER_FINITE = group_with(nonfinite=True)
BROKEN = "custom_reward_function__reward_kwargs__broken"  # the rows whose reward raises
HANGING = "custom_reward_function__reward_kwargs__hanging"


def test_a_run_draws_scores_and_updates_each_step_and_logs_it(tmp_path):
    trainer = fake_run(tmp_path)
    rows = metrics_rows(tmp_path)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]  # 24 prompts, 8 a step, 2 epochs
    assert [r["training/epoch"] for r in rows] == [0, 0, 0, 1, 1, 1]
    assert [r["training/weights_version"] for r in rows] == [0, 1, 2, 3, 4, 5]
    assert all(r["training/requested_samples"] == r["training/scored_samples"] == 32 for r in rows)
    # sample j of a prompt: j + 2 numbers among 6 words
    assert rows[0]["critic/score/mean"] == pytest.approx((2 + 3 + 4 + 5) / 4 / 6)
    assert rows[0]["reward/words/mean"] == 6
    group = trainer.actor_rollout_wg
    # no old-log-prob pass: its result would be the same
    assert group.calls == ["init_model"] + ["send_weights", "generate", "update"] * 6
    update = group.updates[0]
    assert {"advantages", "response_mask", "group_index"} <= set(update.batch.keys())
    assert update.meta_info["temperature"] == 1.0
    samples = read_rows(tmp_path / "out" / "samples.jsonl")
    assert {s["kind"] for s in samples} == {"best", "worst", "random"}
    assert max(s["score"] for s in samples if s["step"] == 1) == pytest.approx(5 / 6)


def test_grpo_advantages_reach_the_rows_they_belong_to(tmp_path):
    batch = fake_run(tmp_path, algorithm__norm_adv_by_std_in_grpo="false").actor_rollout_wg.updates[0].batch
    numbers = (batch["responses"] != 30).sum(-1)  # score of a row in sixths
    assert torch.allclose(batch["advantages"][:, 0], (numbers - 3.5) / 6, atol=1e-6)


CLASHING = '''
import numpy as np

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    words = solution_str.split()
    score = sum(w.isdigit() for w in words) / 6
    extras = {"uid": "same", "reward_model": 2 * score, "reward": 7, "responses": 1, "input": "x", "step": None}
    extras |= {"steps": [1.0] * (1 + int(6 * score) % 3), "pred": np.str_("p"), "right": np.bool_(score > 0.5)}
    return {"score": np.float32(score), **extras, **({"fmt": 3.0} if score < 0.4 else {})}
'''


@pytest.mark.parametrize("launched", ["false", "true"])
def test_extras_of_rewards_have_any_name_and_shape(tmp_path, launched):
    """Names of the batch's columns, lists of several lengths, and names that only some rows have."""
    (tmp_path / "clashing.py").write_text(CLASHING)
    trainer = fake_run(
        tmp_path, trainer__total_training_steps=1, trainer__val_before_train="true",
        trainer__rollout_data_dir=tmp_path / "d", trainer__validation_data_dir=tmp_path / "v",
        custom_reward_function__path=tmp_path / "clashing.py", reward_model__launch_reward_fn_async=launched,
    )  # fmt: skip
    before, row = metrics_rows(tmp_path)
    assert before["val-core/letters/reward/mean@1"] == pytest.approx(2 / 6)
    assert before["val-aux/letters/reward_extra/mean@1"] == 7 and before["val-aux/letters/fmt/mean@1"] == 3
    assert row["reward/reward_model/mean"] == pytest.approx(2 * 3.5 / 6) and row["reward/right/mean"] == 0.5
    assert row["reward/fmt/mean"] == 3  # of the rows that have it
    assert not {"reward/steps/mean", "reward/pred/mean", "reward/uid/mean", "reward/step/mean"} & set(row)
    sent = trainer.actor_rollout_wg.updates[0]
    assert len(set(sent.batch["group_index"].tolist())) == 8  # groups by the run's uid
    first, *others = read_rows(tmp_path / "d" / "1.jsonl")
    assert len(others) == 31 and first["input"].startswith("q : ") and {"output", "gts", "score"} <= first.keys()
    assert first["input_extra"] == "x" and first["uid"] == "same" and first["step"] == 1
    assert first["steps"] == [1.0] * (1 + round(6 * first["score"]) % 3)
    first, *_ = read_rows(tmp_path / "v" / "0.jsonl")
    assert first["reward"] == first["score"] == pytest.approx(2 / 6) and first["reward_extra"] == 7


def test_lost_samples_are_counted_and_ranks_still_get_equal_rows(tmp_path):
    trainer = fake_run(tmp_path, LOSING, trainer__total_training_steps=1)
    row = metrics_rows(tmp_path)[0]
    # lost 4; the one left of prompt 0; then 7 prompts on 2 ranks: the last prompt goes
    assert row["training/dropped_samples/lost"] == 4
    assert row["training/dropped_samples/small_group"] == 1
    assert row["training/dropped_samples/uneven"] == 4
    assert row["training/requested_samples"] == row["training/scored_samples"] + row["training/dropped_samples"] == 32
    update = trainer.actor_rollout_wg.updates[0]
    assert len(update) == 24  # 6 prompts x 4: the lost place is filled, and counts nowhere
    counted = update.batch["response_mask"].sum(-1)
    assert counted.tolist().count(0) == 1
    # the baseline of the group of three is made of its three real samples
    index = update.batch["group_index"]
    short = index[counted == 0].item()
    kept = (index == short) & (counted > 0)
    assert update.batch["advantages"][kept][:, 0].sum().item() == pytest.approx(0, abs=1e-5)
    for rank in range(2):
        assert index[rank * 12 : rank * 12 + 12].unique().numel() == 3


def test_shared_prompts_stay_whole_on_a_rank(tmp_path):
    trainer = fake_run(tmp_path, actor_rollout_ref__actor__share_prompt_forward="true")
    for update in trainer.actor_rollout_wg.updates:
        assert torch.unique_consecutive(update.batch["group_index"]).numel() == 8
        assert not set(update.batch["group_index"][:16].tolist()) & set(update.batch["group_index"][16:].tolist())


def test_samples_without_a_reward_are_left_out_and_counted(tmp_path):
    broken = {BROKEN: [3], "trainer__total_training_steps": 3}  # one epoch
    trainer = fake_run(tmp_path, reward_model__error="drop", **broken)
    rows = metrics_rows(tmp_path)
    for row in rows:
        dropped = row["training/dropped_samples"]
        assert row["training/requested_samples"] == row["training/scored_samples"] + dropped == 32
        # the prompt of row 3 goes whole; 28 samples are an even share for 2 ranks
        assert dropped == row["training/dropped_samples/no_reward"] in (0, 4)
        assert row["reward/errors"] == row["training/dropped_samples/no_reward"] and row["reward/timeouts"] == 0
        assert row["reward/words/mean"] > 0
    assert sum(row["reward/errors"] for row in rows) == 4
    assert sorted(len(update) for update in trainer.actor_rollout_wg.updates) == [28, 32, 32]


def test_samples_whose_reward_hangs_are_left_out_and_counted(tmp_path):
    settings = {"reward_model__error": "drop", "reward_model__item_timeout": 1.0, "trainer__total_training_steps": 3}
    fake_run(tmp_path, **settings, **{HANGING: [5]})
    assert sum(row["reward/timeouts"] for row in metrics_rows(tmp_path)) == 4  # the samples of one prompt
    assert sum(row["training/scored_samples"] for row in metrics_rows(tmp_path)) == 3 * 32 - 4


@pytest.mark.parametrize(
    ("lost", "broken", "why"), [((), range(24), "32 have no reward"), (range(32), (), "32 generations failed")]
)
def test_a_step_without_a_sample_left_says_so(tmp_path, lost, broken, why):
    settings = {BROKEN: [*broken], "reward_model__error": "drop"}
    with pytest.raises(StepFailed, match=f"none of the 32 samples can be trained on: .*{why}"):
        fake_run(tmp_path, group_with(lost_rows=lost), **settings)


class MoreColumns(FakeGroup):
    """Also log-probs of the rollout and of the trained model: -0.25 and -0.5 for every token."""

    def generate_sequences(self, prompts):
        output = super().generate_sequences(prompts)
        output.batch["rollout_log_probs"] = torch.full(output.batch["responses"].shape, -0.25)
        return output

    def compute_log_prob(self, data):
        self.calls.append("log_prob")
        shape = data.batch["responses"].shape
        return DataProto.from_dict({"old_log_probs": torch.full(shape, -0.5), "entropys": torch.ones(shape)})


@pytest.mark.parametrize("broken", [[], [3]])
def test_rewards_computed_meanwhile_give_the_same_updates(tmp_path, broken):
    updates, rows = [], []
    for launched in ("false", "true"):
        trainer = fake_run(
            tmp_path / launched, MoreColumns, reward_model__error="drop", trainer__total_training_steps=3,
            reward_model__launch_reward_fn_async=launched, actor_rollout_ref__rollout__calculate_log_probs="true",
            **{BROKEN: broken},
        )  # fmt: skip
        updates.append(trainer.actor_rollout_wg.updates)
        rows.append(metrics_rows(tmp_path / launched))
    assert sum(row["reward/errors"] for row in rows[0]) == 4 * len(broken)
    for one, other in zip(*rows, strict=True):
        assert one == pytest.approx(other, abs=1e-7)
    for one, other in zip(*updates, strict=True):
        columns = ("input_ids", "advantages", "old_log_probs")  # dropped rows may leave the others in another order
        one, other = (sorted(torch.cat([u.batch[c] for c in columns], 1).tolist()) for u in (one, other))
        assert one == [pytest.approx(row) for row in other] if broken else one == other


def test_the_rollouts_log_probs_are_the_old_ones_where_asked_for(tmp_path):
    used = {"actor_rollout_ref__rollout__calculate_log_probs": "true", "trainer__total_training_steps": 1}
    for asked, value in (("false", -0.5), ("true", -0.25)):
        more = {"actor_rollout_ref__actor__use_rollout_log_probs": asked, **used}
        trainer = fake_run(tmp_path / asked, MoreColumns, **more)
        assert trainer.actor_rollout_wg.updates[0].batch["old_log_probs"].unique().tolist() == [value]
        assert ("log_prob" in trainer.actor_rollout_wg.calls) is (asked == "false")
        row = metrics_rows(tmp_path / asked)[0]
        names = {name.partition("/")[2] for name in row if name.startswith("rollout_corr/")}
        assert names and all(row[f"mismatch/{name}"] == row[f"rollout_corr/{name}"] for name in names)


def test_a_checkpoint_is_saved_before_a_rented_instance_expires(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEMAKER_EXPIRATION_TIMESTAMP", str(time.time() + 500))
    # 60 s to save and a short step end before 500 s, not so 660 s; save_freq=0 saves nothing.
    for spare, freq, saved in ((0, -1, [3]), (600, -1, [1, 2, 3]), (601, 0, [])):
        directory = tmp_path / str(spare)
        settings = {"trainer__total_training_steps": 3, "trainer__save_freq": freq}
        fake_run(directory, trainer__esi_redundant_time=spare, **settings)
        assert published_steps(directory / "out") == saved


def test_run_stops_after_updates_skipped_in_a_row(tmp_path):
    trainer = fake_trainer(compose_run(tmp_path, "unused", trainer__nonfinite_steps_max=3), NEVER_FINITE)
    with pytest.raises(StepFailed, match="NaN or infinite in 3 steps in a row") as failure:
        trainer.fit()
    assert isinstance(failure.value.__cause__, NonFiniteRun)
    assert len(trainer.actor_rollout_wg.updates) == 3


class NothingCounted(FakeGroup):
    def update_actor(self, data):
        super().update_actor(data)
        return DataProto(meta_info={"metrics": {"actor/nonfinite_steps": [0.0], "actor/empty_steps": [1.0]}})


@pytest.mark.parametrize(
    ("group", "why"), [(NEVER_FINITE, "NaN or infinite"), (NothingCounted, "no token was counted")]
)
def test_a_run_whose_few_updates_are_all_skipped_is_no_success(tmp_path, group, why):
    with pytest.raises(StepFailed, match=f"{why} in every one of the 2 steps; those updates were skipped"):
        fake_run(tmp_path, group, trainer__total_training_steps=2)


def test_a_value_model_whose_updates_are_skipped_ends_the_run_as_well(tmp_path):
    trainer = fake_trainer(compose_run(tmp_path, "unused", trainer__nonfinite_steps_max=3))
    for skipped in (1.0, 1.0, 0.0, 1.0, 2.0):  # the third is no step in a row
        metrics = {"critic/nonfinite_steps": skipped, "actor/nonfinite_steps": 0.0}
        trainer._watch_nonfinite(metrics)
    with pytest.raises(NonFiniteRun, match="3 steps in a row"):
        trainer._watch_nonfinite(metrics)


def whole_and_part(tmp_path, stop_at, **more):
    """A run in `whole`, to its end, and one in `parts` that stops after a step."""
    return fake_run(tmp_path / "whole", **more), fake_run(tmp_path / "parts", stop_at=stop_at, **more)


@pytest.mark.parametrize("stop_at", [2, 3, 4])  # 3 is the end of an epoch
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, stop_at):
    """It validates before training no second time."""
    validated = {"trainer__val_before_train": "true"}
    whole, first = whole_and_part(tmp_path, stop_at, **validated)
    with open(tmp_path / "parts" / "out" / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "data": {}}\n{"step": 6, "da')  # written by a run that was killed later
    second = fake_run(tmp_path / "parts", data__seed=77, **validated)
    drawn = first.actor_rollout_wg.generated + second.actor_rollout_wg.generated
    assert drawn == whole.actor_rollout_wg.generated
    rows = metrics_rows(tmp_path / "parts")
    assert rows == metrics_rows(tmp_path / "whole") and [row["step"] for row in rows] == list(range(7))
    ids = [u.batch["input_ids"] for t in (first, second) for u in t.actor_rollout_wg.updates]
    assert all(torch.equal(a, u.batch["input_ids"]) for a, u in zip(ids, whole.actor_rollout_wg.updates, strict=True))
    assert second.counters == whole.counters


class SlowDisk(FakeGroup):
    """Ranks that write a checkpoint during the two following questions, then report `failure`, if any."""

    failure: Exception | None = None

    def save_checkpoint(self, path, *args) -> None:
        super().save_checkpoint(path, *args)
        self.calls.append("save")
        self.left = 2

    def save_is_finished(self) -> list[bool]:
        self.left -= 1
        if self.left < 0 and self.failure is not None:
            raise self.failure
        return [True, self.left < 0]


def test_training_continues_while_a_checkpoint_is_written(tmp_path):
    trainer = fake_trainer(compose_run(tmp_path, "unused", trainer__save_freq=2), SlowDisk)
    seen = {}
    trainer.stop_requested = lambda: bool(seen.update({trainer.global_steps: published_steps(tmp_path / "out")}))
    trainer.fit()
    assert seen[2] == [] and seen[4] == [2]  # published between steps 3 and 4, at the latest before the next save
    calls = trainer.actor_rollout_wg.calls
    assert calls[calls.index("save") + 1] == "send_weights"
    assert published_steps(tmp_path / "out") == [2, 4, 6] and trainer.checkpoints.saved_step == 6
    again = fake_run(tmp_path, SlowDisk, trainer__total_epochs=3)
    assert again.resumed_step == 6 and again.actor_rollout_wg.generated[0][0] == "48"


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_keeps_the_one_before(tmp_path):
    fake_run(tmp_path, trainer__save_freq=1, trainer__total_training_steps=1)
    with pytest.raises(StepFailed, match="step 'save_checkpoint' of global step 4 failed: OSError: no space"):
        fake_run(tmp_path, group_with(SlowDisk, failure=OSError("no space")), trainer__save_freq=2)
    assert [p.name for p in (tmp_path / "out").glob("global_step_*")] == ["global_step_1"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_of_two_ranks_continues_with_the_same_prompts_on_another_number(tmp_path, ranks):
    whole, first = whole_and_part(tmp_path, 2)
    second = fake_run(tmp_path / "parts", group_with(world_size=ranks))
    assert first.actor_rollout_wg.generated + second.actor_rollout_wg.generated == whole.actor_rollout_wg.generated
    balance = "global_seqlen"  # says how the ranks share tokens
    of = [[{k: v for k, v in row.items() if not k.startswith(balance)} for row in metrics_rows(tmp_path / name)]
          for name in ("whole", "parts")]  # fmt: skip
    assert len(of[0]) == len(of[1]) and all(a == pytest.approx(b, abs=1e-6) for a, b in zip(*of, strict=True))


class WithReference(FakeGroup):
    """Ranks whose log-probs move away from the reference's, 0.1 nearer to 0 each version."""

    def compute_log_prob(self, data):
        value = torch.full(data.batch["responses"].shape, -2.0 + 0.1 * self.version)
        return DataProto.from_dict({"old_log_probs": value, "entropys": -value})

    def compute_ref_log_prob(self, data):
        return DataProto.from_dict({"ref_log_prob": torch.full(data.batch["responses"].shape, -2.05)})


@pytest.mark.parametrize(("mini", "passes"), [(8, True), (12, False)])
def test_without_a_filter_a_step_trains_on_all_that_is_drawn(tmp_path, mini, passes):
    trainer = fake_run(
        tmp_path, WithReference, data__gen_batch_size=12, actor_rollout_ref__actor__ppo_mini_batch_size=mini,
    )  # fmt: skip
    assert [len(update) for update in trainer.actor_rollout_wg.updates] == [48] * 4  # 2 draws an epoch
    # 12 prompts are two mini-batches of 8, whose second step needs the log-probs of before the first
    assert all(("old_log_probs" in update.batch) == passes for update in trainer.actor_rollout_wg.updates)


def test_the_entropy_of_the_old_policy_is_aggregated_as_the_updates(tmp_path):
    fake_run(
        tmp_path, WithReference, trainer__total_training_steps=1, actor_rollout_ref__actor__ppo_mini_batch_size=4,
        actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-sum-norm",
        actor_rollout_ref__actor__loss_scale_factor=24,
    )  # fmt: skip
    assert metrics_rows(tmp_path)[0]["actor/entropy"] == pytest.approx(6 * 2.0 / 24)  # 6 tokens of 2.0


def test_the_adaptive_kl_coefficient_survives_a_resume(tmp_path):
    settings = {
        "group_class": WithReference, "roles": {Role.RefPolicy: FakeGroup}, "algorithm__use_kl_in_reward": "true",
        "algorithm__kl_ctrl__type": "adaptive", "algorithm__kl_ctrl__horizon": 100,
        "algorithm__kl_ctrl__target_kl": 0.1, "algorithm__kl_ctrl__kl_coef": 0.5, "trainer__total_training_steps": 4,
    }  # fmt: skip
    whole, first = whole_and_part(tmp_path, 2, **settings)
    second = fake_run(tmp_path / "parts", **settings)
    # 32 samples a step: value *= 1 + clip(kl / 0.1 - 1, -0.2, 0.2) * 32 / 100; the KL is 0.05, 0.15, 0.25, 0.35
    fall, rise = 1 - 0.2 * 0.32, 1 + 0.2 * 0.32
    assert first.kl_ctrl.value == pytest.approx(0.5 * fall * rise)
    assert second.kl_ctrl.value == whole.kl_ctrl.value == pytest.approx(0.5 * fall * rise**3)
    rows = metrics_rows(tmp_path / "parts")
    assert rows == metrics_rows(tmp_path / "whole")
    assert rows[2]["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * fall * rise)


def test_changed_training_data_are_refused_unless_allowed(tmp_path):
    fake_run(tmp_path, trainer__total_training_steps=1, trainer__save_freq=1)
    config = compose_run(tmp_path, "unused", trainer__total_training_steps=2)
    with open(tmp_path / "train.jsonl") as f:
        rows = f.readlines()
    (tmp_path / "train.jsonl").write_text("".join(rows[:-8]))
    with pytest.raises(StepFailed, match="training data .* changed .* trainer.allow_data_change=true"):
        fake_trainer(config).fit()
    config.trainer.allow_data_change = True
    again = fake_trainer(config)
    again.fit()
    assert len(again.actor_rollout_wg.updates) == 1


def test_altered_checkpoint_is_passed_over_for_the_one_before(tmp_path):
    fake_run(tmp_path, trainer__total_training_steps=2, trainer__save_freq=1)
    (tmp_path / "out" / "global_step_2" / "actor" / "version").write_text("7")
    again = fake_run(tmp_path, trainer__total_training_steps=2)
    assert [len(g) for g in again.actor_rollout_wg.generated] == [8]
    assert [r["training/weights_version"] for r in metrics_rows(tmp_path)] == [0, 1]


class LosingGreedy(FakeGroup):
    """Loses the greedy answers of these prompts of each batch."""

    lost_greedy = (1, 4)

    def generate_sequences(self, prompts):
        self.lost_rows = () if prompts.meta_info["do_sample"] else self.lost_greedy
        return super().generate_sequences(prompts)


REMAX = {"algorithm__adv_estimator": "remax", "trainer__total_training_steps": 3}


def test_prompts_whose_greedy_answer_is_lost_are_dropped_and_counted(tmp_path):
    trainer = fake_run(tmp_path, LosingGreedy, **REMAX)
    for row in metrics_rows(tmp_path):
        assert row["training/requested_samples"] == 32 and row["training/scored_samples"] == 24
        assert row["training/dropped_samples"] == row["training/dropped_samples/no_baseline"] == 2 * 4
    update = trainer.actor_rollout_wg.updates[0].batch
    assert len(update) == 24
    numbers = (update["responses"] != 30).sum(-1)  # score of a row in sixths; the greedy answer's is 2
    assert (update["advantages"][:, 0] * 6 - (numbers - 2)).abs().max() < 1e-5


def test_prompts_whose_greedy_answer_has_no_reward_are_dropped_and_counted(tmp_path):
    fake_run(tmp_path, reward_model__error="drop", **REMAX, **{BROKEN: [3]})
    rows = metrics_rows(tmp_path)
    assert sum(row["training/dropped_samples/no_baseline"] for row in rows) == 4  # one prompt of the epoch
    assert all(row["training/requested_samples"] == row["training/scored_samples"] + row["training/dropped_samples"]
               for row in rows)  # fmt: skip


def test_the_last_lines_name_the_share_of_prompts_and_samples_that_were_left_out(tmp_path, capsys):
    trainer = fake_trainer(compose_run(tmp_path, "unused", trainer__total_training_steps=2), LOSING)
    trainer.train_dataset.dropped_overlong = 6  # of 30 rows
    trainer.fit()
    lines = capsys.readouterr().out.splitlines()
    rows = metrics_rows(tmp_path)
    assert rows[0]["training/overlong_prompts"] == pytest.approx(6 / 30)
    share = rows[0]["training/dropped_samples"] / rows[0]["training/requested_samples"]
    for said in ("20% of the prompts are longer", f"{share:.0%} of the requested samples were dropped"):
        assert any(line.startswith(f"Over a tenth: {said}") for line in lines), lines


def test_the_last_lines_name_the_share_of_validation_prompts_that_were_left_out(tmp_path, capsys):
    trainer = fake_trainer(compose_run(tmp_path, "unused", trainer__val_only="true"))
    trainer.val_dataset.dropped_overlong = 2  # of 6 rows
    trainer.fit()
    said = "Over a tenth: 33% of the validation prompts are longer than data.max_prompt_length"
    assert any(line.startswith(said) for line in capsys.readouterr().out.splitlines())
