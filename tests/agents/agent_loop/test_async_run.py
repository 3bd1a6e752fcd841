"""GRPO with rollout.mode=async on Ray: two ranks with a server each, two workers; samples as in sync mode, one rank."""

import json

import pytest

from tests.helpers.rl_run import compose_run, metrics_rows
from verl.report.metric_names import unknown_metrics
from verl.trainer.main_ppo import TaskRunner

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_agent_loops_train_as_batches_do(ray_cluster, tmp_path, tiny_llama):
    rows = {}
    for mode, ranks in (("sync", 1), ("async", 2)):
        rollout = {"name": "vllm", "mode": mode, "dtype": "float32", "calculate_log_probs": "true", "max_num_seqs": 64,
                   "agent__num_workers": 2}  # fmt: skip
        config = compose_run(
            tmp_path / mode, tiny_llama, trainer__total_training_steps=2, trainer__n_gpus_per_node=ranks,
            trainer__test_freq=2, trainer__save_freq=-1, reward_model__num_workers=0,
            trainer__rollout_data_dir=tmp_path / mode / "samples",
            **{f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()},
        )  # fmt: skip
        TaskRunner().run(config)
        rows[mode] = metrics_rows(tmp_path / mode)
    same = ("critic/score/mean", "response_length/mean", "training/weights_version", "rollout/weight_syncs",
            "val-core/letters/reward/mean@1", "reward/words/mean")  # fmt: skip
    for one, other in zip(rows["sync"], rows["async"], strict=True):
        assert {key: one.get(key) for key in same} == pytest.approx({key: other.get(key) for key in same})
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-4)
        assert other["num_turns/mean"] == 2 and other["training/rollout_probs_diff_max"] < 1e-4
        assert unknown_metrics([name for name in other if name != "step"]) == []
    files = [tmp_path / mode / "samples" / "1.jsonl" for mode in rows]
    texts = [sorted(json.loads(line)["output"] for line in file.read_text().splitlines()) for file in files]
    assert texts[0] == texts[1] and len(texts[0]) == 32
