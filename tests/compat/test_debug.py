"""verl.utils.debug: figures by hand, and the profiler's names under upstream's older paths."""

import importlib

import psutil
import pytest
import torch

from verl.algos import log_prob_metrics as metrics
from verl.profiling.performance import peak_memory
from verl.protocol import DataProto
from verl.utils import debug, profiler
from verl.utils.debug import performance
from verl.utils.metric import reduce_metrics

ROLLOUT, ACTOR = torch.tensor([[0.5, 0.2, 0.9], [0.4, 0.8, 0.1]]), torch.tensor([[0.3, 0.2, 0.1], [0.4, 0.4, 0.7]])
LOG_PROBS = {"rollout_log_probs": ROLLOUT.log(), "old_log_probs": ACTOR.log()}
MASK = torch.tensor([[1, 1, 0], [1, 1, 0]])


@pytest.mark.parametrize(
    "masks",
    [
        {"response_mask": MASK},
        {"attention_mask": torch.cat([torch.ones(2, 2, dtype=torch.long), MASK], 1)},
        {"response_mask": MASK, "attention_mask": torch.ones(2, 5)},
    ],
)
def test_probabilities_of_counted_tokens_are_compared(masks):
    compared = metrics.calculate_debug_metrics(DataProto.from_dict({**LOG_PROBS, **masks}))
    # differences 0.2, 0, 0, 0.4; deviations of the rollout 0.025, -0.275, -0.075, 0.325, of the actor
    # -0.025, -0.125, 0.075, 0.075: covariance (-0.000625 + 0.034375 - 0.005625 + 0.024375) / 4 = 0.013125, variances
    # 0.046875 and 0.006875
    assert compared == pytest.approx(
        {
            "training/rollout_probs_diff_valid": 1,
            "training/rollout_probs_diff_max": 0.4,
            "training/rollout_probs_diff_mean": 0.15,
            "training/rollout_probs_diff_std": 0.0275**0.5,
            "training/rollout_actor_probs_pearson_corr": 0.013125 / (0.046875 * 0.006875) ** 0.5,
        },
        abs=1e-6,
    )


def test_without_a_mask_all_tokens_count_and_without_a_token_nothing_is_valid():
    compared = metrics.calculate_debug_metrics(DataProto.from_dict(dict(LOG_PROBS)))
    assert compared["training/rollout_probs_diff_max"] == pytest.approx(0.8)
    none = DataProto.from_dict({**LOG_PROBS, "response_mask": torch.zeros(2, 3)})
    assert metrics.calculate_debug_metrics(none) == {"training/rollout_probs_diff_valid": 0}


def test_a_constant_column_correlates_with_anything():
    assert metrics.pearson_correlation_coefficient(torch.ones(4), torch.arange(4.0), torch.ones(4)) == 1.0


def test_the_peak_of_a_rank_on_a_cpu_stays_after_its_memory_is_given_back():
    mine = psutil.Process()
    block = torch.ones(64 << 20)  # 256 MiB
    held = mine.memory_info().rss / 2**30
    del block
    (name, peak), *others = peak_memory("cpu").items()
    assert name == "perf/max_memory_resident_gb" and not others
    assert peak >= held - 0.01 and held > mine.memory_info().rss / 2**30 + 0.2
    assert reduce_metrics({name: [1.0, 3.0, 2.0]}) == {name: 3.0}  # of ranks


def test_the_profilers_names_are_those_of_debug():
    for name in ("DistProfiler", "DistProfilerExtension", "GPUMemoryLogger", "ProfilerConfig", "log_gpu_memory_usage",
                 "marked_timer", "simple_timer"):  # fmt: skip
        assert getattr(debug, name) is getattr(profiler, name)
    with pytest.raises(AttributeError, match="module 'verl.utils.debug' has no attribute 'nothing'"):
        _ = debug.nothing
    original = importlib.import_module("verl.utils.profiler.performance")
    assert performance.GPUMemoryLogger is original.GPUMemoryLogger
