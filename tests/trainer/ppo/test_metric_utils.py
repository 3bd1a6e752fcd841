"""Names and figures of step and validation metrics."""

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.metric_utils import bootstrap_metric, compute_data_metrics, process_validation_metrics
from verl.trainer.ppo.rollout_phase import end_reasons


def batch(response_lengths=(2, 3, 0), prompt_lengths=(1, 2, 2), limit=3, prompt_limit=2):
    response_mask = (torch.arange(limit)[None] < torch.tensor(response_lengths)[:, None]).long()
    prompt_mask = (torch.arange(prompt_limit)[None] >= prompt_limit - torch.tensor(prompt_lengths)[:, None]).long()
    rewards = torch.zeros(response_mask.shape)
    rewards[:, 0] = torch.tensor([1.0, 3.0, 100.0])
    return DataProto.from_dict(
        tensors={
            "responses": torch.zeros_like(response_mask), "response_mask": response_mask,
            "attention_mask": torch.cat([prompt_mask, response_mask], 1),
            "token_level_scores": rewards, "token_level_rewards": rewards - 0.5,
            "advantages": response_mask * 2.0 + 50.0 * (1 - response_mask),
            "returns": torch.tensor([[0.0, 1.0, 9.0], [2.0, 3.0, 4.0], [9.0, 9.0, 9.0]]),
            "values": torch.tensor([[0.0, 1.0, 9.0], [2.0, 3.0, 4.0], [9.0, 9.0, 9.0]]),
        },
        non_tensors={"__num_turns__": np.array([2, 4, 6])},
        meta_info={"global_token_num": [3, 5, 2]},
    )  # fmt: skip


def test_data_metrics_by_hand():
    metrics = compute_data_metrics(batch())
    assert [metrics[f"critic/score/{how}"] for how in ("mean", "max", "min")] == [2.0, 3.0, 1.0]  # the empty one is out
    assert metrics["critic/rewards/max"] < 3.0
    assert metrics["critic/advantages/max"] == 2.0  # padding is out
    assert metrics["critic/returns/mean"] == 2.0
    assert metrics["critic/values/max"] == 4.0
    assert metrics["critic/vf_explained_var"] == pytest.approx(1.0)
    assert metrics["response_length/mean"] == pytest.approx(5 / 3)
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length_non_aborted/mean"] == 2.5
    assert metrics["response_length_non_aborted/clip_ratio"] == 0.5
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert metrics["prompt_length/clip_ratio"] == pytest.approx(2 / 3)
    assert [metrics[f"num_turns/{how}"] for how in ("min", "max", "mean")] == [2, 6, 4]
    assert "critic/values/mean" not in compute_data_metrics(batch(), use_critic=False)


def test_cut_answers_are_those_that_no_stop_token_ended_whatever_their_length():
    """R = 3, stop token 2. A stop token at the limit; cut after 2 tokens, and at the limit; a tool's words; empty."""
    samples = DataProto.from_dict(
        {"responses": torch.tensor([[5, 6, 2], [5, 6, 0], [5, 6, 7], [5, 2, 8], [0, 0, 0], [5, 2, 0]]),
         "response_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 0]]),
         "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1] * 4, [1] * 4, [1, 0, 0, 0], [1, 1, 1, 0]])},
    )  # fmt: skip
    reasons = end_reasons(samples, (2,))
    assert reasons.tolist() == ["stop", "length", "length", None, None, "stop"]
    samples.non_tensor_batch["end_reason"] = reasons
    assert metric_utils.cut_answers(samples).tolist() == [False, True, True, False, False, False]
    assert end_reasons(samples[:1], (2,)).tolist() == ["stop"]
    samples.non_tensor_batch["end_reason"] = np.array(["turns", None, "length", "length", None, None], dtype=object)
    assert end_reasons(samples, (2,)).tolist() == ["turns", "length", "length", "length", None, "stop"]
    del samples.non_tensor_batch["end_reason"]
    assert end_reasons(samples, ()).tolist() == ["length", "length", "length", None, None, "length"]  # ignore_eos
    # nothing but the width is known
    assert metric_utils.cut_answers(samples).tolist() == [True, False, True, True, False, False]


def test_the_metrics_count_what_was_cut_before_the_response_length():
    data = batch()  # 2, 3 and 0 of 3 tokens
    data.non_tensor_batch["end_reason"] = np.array(["length", "stop", None], dtype=object)
    metrics = compute_data_metrics(data)
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length_non_aborted/clip_ratio"] == 0.5
    data.non_tensor_batch["end_reason"][1] = "length"
    assert compute_data_metrics(data)["response_length_non_aborted/clip_ratio"] == 1.0


def test_a_batch_of_empty_answers_has_finite_metrics():
    metrics = compute_data_metrics(batch(response_lengths=(0, 0, 0)))
    assert metrics["response/aborted_ratio"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())


def test_timing_is_per_token_of_the_phase():
    metrics = metric_utils.compute_timing_metrics(batch(), {"gen": 1.0, "update_actor": 2.0, "step": 4.0})
    assert metrics["timing_s/step"] == 4.0
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(1000 / 5)
    assert metrics["timing_per_token_ms/update_actor"] == pytest.approx(2000 / 10)
    assert "timing_per_token_ms/step" not in metrics


def test_throughput_counts_tokens_a_second_a_rank():
    metrics = metric_utils.compute_throughout_metrics(batch(), {"step": 2.0}, n_gpus=5)
    assert metrics == {"perf/total_num_tokens": 10, "perf/time_per_step": 2.0, "perf/throughput": 1.0}


def test_bootstrap_of_the_maximum_meets_its_expectation():
    mean, std = bootstrap_metric([0.0, 0.0, 0.0, 1.0], 2, [np.max], n_bootstrap=20000)[0]
    assert mean == pytest.approx(7 / 16, abs=0.02)
    assert std == pytest.approx((7 / 16 * 9 / 16) ** 0.5, abs=0.02)


def test_validation_by_hand():
    metrics = process_validation_metrics(
        ["s", "s", "s", "s", "t"], ["p", "p", "q", "q", "r"],
        {"reward": [1.0, 0.0, 1.0, 1.0, 5.0], "text": ["x"] * 5},
    )  # fmt: skip
    assert metrics["t"] == {"reward": {"mean@1": 5.0}}
    reward = metrics["s"]["reward"]
    assert reward["mean@2"] == 0.75
    assert reward["std@2"] == 0.25
    assert set(reward) == {"mean@2", "std@2", "best@2/mean", "best@2/std", "worst@2/mean", "worst@2/std"}
    assert reward["best@2/mean"] == pytest.approx((0.75 + 1) / 2, abs=0.03)
    assert reward["worst@2/mean"] == pytest.approx((0.25 + 1) / 2, abs=0.03)
    assert "text" not in metrics["s"]


def test_subset_sizes_are_powers_of_two_and_n():
    reward = process_validation_metrics(["s"] * 6, ["p"] * 6, {"reward": [0.0] * 6})["s"]["reward"]
    assert {name.split("/")[0] for name in reward} == {"mean@6", "std@6"} | {
        f"{how}@{k}" for how in ("best", "worst") for k in (2, 4, 6)
    }


def test_vectorised_bootstrap_equals_the_loop():
    rng = np.random.default_rng(0)
    uids = [f"p{i}" for i, size in enumerate([4, 4, 5]) for _ in range(size)]
    values = rng.normal(size=len(uids)).tolist()
    preds = rng.choice(["a", "b", "c"], size=len(uids)).tolist()
    got = process_validation_metrics(["s"] * len(uids), uids, {"reward": values, "pred": preds}, seed=7)["s"]["reward"]
    for k, prompts in ((2, (0, 1, 2)), (4, (0, 1, 2)), (5, (2,))):
        loops = []
        for prompt in prompts:
            rows = [i for i, uid in enumerate(uids) if uid == f"p{prompt}"]
            mine = [values[i] for i in rows]
            votes = [{"val": values[i], "pred": preds[i]} for i in rows]
            best, worst = bootstrap_metric(mine, k, [np.max, np.min], seed=7)
            maj = bootstrap_metric(votes, k, [lambda d: metric_utils.calc_maj_val(list(d), "pred", "val")], seed=7)[0]
            loops.append((best, worst, maj))
        for i, name in enumerate(("best", "worst", "maj")):
            assert got[f"{name}@{k}/mean"] == pytest.approx(np.mean([loop[i][0] for loop in loops]))
            assert got[f"{name}@{k}/std"] == pytest.approx(np.mean([loop[i][1] for loop in loops]))


def test_samples_without_a_value_leave_their_variable():
    metrics = process_validation_metrics(["s"] * 3, ["p"] * 3, {"reward": [1.0, 2.0, 3.0], "acc": [None, True, None]})
    assert metrics["s"]["acc"] == {"mean@1": 1.0}
    assert "mean@3" in metrics["s"]["reward"]


def test_a_column_of_wrong_length_is_named():
    with pytest.raises(ValueError, match="'acc': 1 values for 2 samples"):
        process_validation_metrics(["s", "s"], ["p", "p"], {"acc": [1.0]})
