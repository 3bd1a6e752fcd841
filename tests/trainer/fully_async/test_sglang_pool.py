"""Asynchronous runs whose servers are SGLang's, in the environment of make sglang-env."""

import pytest

from tests.helpers.rl_run import metrics_rows
from tests.trainer.fully_async.test_runs import OFF_BY_ONE, check_journal, recorded_samples, train
from verl.utils.import_utils import is_sglang_available

pytestmark = [
    pytest.mark.sglang, pytest.mark.process, pytest.mark.slow,
    pytest.mark.skipif(not is_sglang_available(), reason="needs the environment of make sglang-env"),
]  # fmt: skip


def test_samples_go_on_after_a_sync_with_the_log_probs_of_each_version(ray_cluster, tmp_path, tiny_llama):
    rollout = {"name": "sglang", "max_num_seqs": 16, "ignore_eos": "true", "verify_weights_every": 1}
    steps = 4
    out = train(
        tmp_path, tiny_llama, steps, data__max_response_length=96, async_training__partial_rollout="true", **OFF_BY_ONE,
        **{f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()},
    )  # fmt: skip
    check_journal(out, steps)
    samples = recorded_samples(out)
    for sample in samples:
        assert sum(count for _, count in sample["spans"]) == sum(sample["output"]["response_mask"]) == 96
    assert any(len(sample["spans"]) > 1 for sample in samples)  # interrupted by a sync
    metrics = [row for row in metrics_rows(tmp_path) if "actor/pg_loss" in row]
    assert len(metrics) == steps and max(row["fully_async/count/versions_behind_max"] for row in metrics) <= 1
