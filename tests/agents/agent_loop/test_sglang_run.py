"""GRPO with rollout.name=sglang and agent loops on Ray, in the environment of make sglang-env."""

import pytest

from tests.helpers.rl_run import compose_run, metrics_rows
from verl.trainer.main_ppo import TaskRunner
from verl.utils.import_utils import is_sglang_available

pytestmark = [pytest.mark.sglang, pytest.mark.process, pytest.mark.slow]


@pytest.mark.skipif(not is_sglang_available(), reason="needs the environment of make sglang-env")
def test_agent_loops_train_with_sglang(ray_cluster, tmp_path, tiny_llama):
    rollout = {"name": "sglang", "mode": "async", "dtype": "float32", "calculate_log_probs": "true",
               "max_num_seqs": 64, "agent__num_workers": 2}  # fmt: skip
    config = compose_run(
        tmp_path, tiny_llama, trainer__total_training_steps=3, trainer__test_freq=3, trainer__save_freq=-1,
        reward_model__num_workers=0, **{f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()},
    )  # fmt: skip
    TaskRunner().run(config)
    rows = metrics_rows(tmp_path)
    assert [row["training/weights_version"] for row in rows if "num_turns/mean" in row] == [0, 1, 2]
    for row in rows[:3]:
        assert row["num_turns/mean"] == 2 and row["actor/grad_norm"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-3  # the log-probs of the weights that were sent
    assert "val-core/letters/reward/mean@1" in rows[-1]
