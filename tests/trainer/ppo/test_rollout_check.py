"""The rollout's log-probs are compared with the trainer's before the first step, and watched in later ones."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.configs import compose_ppo
from tests.helpers.engines import leave_group
from tests.helpers.logs import logged
from tests.helpers.models import save_tiny_llama
from tests.helpers.rl_run import compose_run
from verl.protocol import DataProto
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.weight_sync import RolloutCheck

VLLM = {
    "actor_rollout_ref__rollout__name": "vllm", "actor_rollout_ref__model__use_remove_padding": "true",
    "trainer__local": "true", "trainer__total_training_steps": 1, "trainer__val_before_train": "true",
}  # fmt: skip


def run(directory: Path, **more) -> list[str]:
    """The log of a run with vLLM and a tied model, in this process."""
    model = save_tiny_llama(directory / "model", vocab_size=96, tied=True)
    trainer = TaskRunner().build(RayPPOTrainer, compose_run(directory, model, **{**VLLM, **more}), None)
    with logged("INFO") as lines:
        try:
            trainer.init_workers()
            trainer.fit()
        finally:
            trainer.shutdown()
            leave_group()
    return lines


@pytest.mark.process
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_compares_the_first_weights_before_anything_else(tmp_path, dtype):
    types = {f"actor_rollout_ref__{key}dtype": dtype for key in ("actor__fsdp_config__", "rollout__")}
    (line,) = [line for line in run(tmp_path, **types) if "log-probs of rollout and trainer agree" in line]
    assert f"rollout {dtype}, trainer {dtype}" in line
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    # A CPU keeps the weights that were sent for the comparison: they count where they are first used.
    assert [row["data"]["rollout/weight_syncs"] for row in rows] == [1, 0]


@pytest.mark.process
def test_a_head_that_keeps_its_first_weights_ends_the_run_before_a_validation(tmp_path, monkeypatch):
    from verl.rollout.vllm_rollout.platform_worker import PlatformWorker

    monkeypatch.setattr(PlatformWorker, "_pack_again", staticmethod(lambda model: None))
    with pytest.raises(RuntimeError) as failed:
        run(tmp_path)
    text = str(failed.value)
    assert "rollout.name=vllm: the weights that it received last do not give the trainer's log-probs" in text
    assert not (tmp_path / "out" / "metrics.jsonl").exists() or not (tmp_path / "out" / "metrics.jsonl").read_text()


@pytest.mark.process
def test_later_weights_are_compared_on_the_schedule(tmp_path, monkeypatch):
    from verl.rollout.vllm_rollout.vllm_rollout import vLLMRollout

    every = {"actor_rollout_ref__rollout__verify_weights_every": 2, "trainer__total_training_steps": 3,
             "trainer__test_freq": -1}  # fmt: skip
    lines = run(tmp_path / "right", **every)
    assert sum("log-probs of rollout and trainer agree" in line for line in lines) == 2  # updates 1 and 3 of 3
    update, updates = vLLMRollout.update_weights, []

    def stale(self, weights, **kwargs):
        updates.append(len(updates))
        return update(self, weights, **kwargs) if len(updates) < 3 else list(weights)

    monkeypatch.setattr(vLLMRollout, "update_weights", stale)
    with pytest.raises(RuntimeError, match="received last do not give the trainer's log-probs"):
        run(tmp_path / "stale", **every)
    rows = (tmp_path / "stale" / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1, 2]


def check(*overrides: str) -> RolloutCheck:
    return RolloutCheck(compose_ppo("trainer.device=cpu", "actor_rollout_ref.rollout.name=vllm", *overrides))


def samples(gaps: list[float]) -> DataProto:
    """One row whose log-probs differ by `gaps`; a masked token differs by 9."""
    columns = {
        "rollout_log_probs": torch.tensor([[*gaps, 9.0]]) - 2.0, "old_log_probs": torch.full((1, len(gaps) + 1), -2.0),
        "response_mask": torch.tensor([[1] * len(gaps) + [0]]),
    }  # fmt: skip
    return DataProto.from_dict(columns)


def seen(work) -> list[str]:
    with logged("INFO", "{level}: {message}") as lines:
        work()
    return lines


FLOAT = ["actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.actor.fsdp_config.dtype=fp32"]
HALF = ["actor_rollout_ref.rollout.dtype=bfloat16", "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("types", "gaps", "agree"),
    [(FLOAT, [5e-4, -9e-4], True), (FLOAT, [0.0, 0.0, -2e-3], False), (FLOAT, [float("nan"), 0.0], False),
     (HALF, [0.02, -0.08, 0.04], True), (HALF, [0.02, -0.15], False), (HALF[:1], [0.0, 0.0, -2e-3], True)],
)  # fmt: skip
def test_bounds_are_of_the_largest_difference_in_float32_and_of_the_mean_in_bfloat16(types, gaps, agree):
    if agree:
        (line,) = seen(lambda: check(*types).compare(samples(gaps)))
        assert line.startswith("INFO: log-probs of rollout and trainer agree") and f"{len(gaps)} tokens" in line
    else:
        with pytest.raises(RuntimeError, match="do not give the trainer's log-probs"):
            check(*types).compare(samples(gaps))


@pytest.mark.parametrize("key", ["quantization", "+engine_kwargs.vllm.quantization"])
def test_a_quantized_engine_gets_a_warning(key):
    plus, name = key[: key.startswith("+")], key.removeprefix("+")
    quantized = check(*HALF, f"{plus}actor_rollout_ref.rollout.{name}=fp8")
    (line,) = seen(lambda: quantized.compare(samples([0.2])))
    assert line.startswith("WARNING") and "do not give the trainer's log-probs" in line


def test_rollouts_without_weights_or_log_probs_of_their_own_are_not_compared():
    assert check().applies
    for override in ("name=hf", "skip_rollout=true", "logprobs_mode=raw_logits"):
        assert not check(f"actor_rollout_ref.rollout.{override}").applies
    data = samples([1.0])
    data.pop(["rollout_log_probs"])
    (line,) = seen(lambda: check().compare(data))
    assert "returns no log-probs" in line


def test_samples_without_comparable_log_probs_are_not_watched():
    unmasked, masked = samples([1.0]), samples([1.0])
    masked.batch["response_mask"].zero_()
    watched = [(check("actor_rollout_ref.rollout.logprobs_mode=raw_logits"), unmasked),
               (check("actor_rollout_ref.rollout.skip_rollout=true"), unmasked), (check(), masked)]  # fmt: skip
    assert not [line for of, data in watched for line in seen(lambda of=of, data=data: [of.watch(data)] * 3)]
    assert not any(of.disagreed for of, _ in watched)


def test_a_mismatch_of_three_steps_in_a_row_is_a_warning():
    watched = check(*HALF)
    steps = [0.1, 0.1, 0.01, 0.1, 0.1, 0.1, 0.1]
    warned = [bool(seen(lambda gap=gap: watched.watch(samples([gap])))) for gap in steps]
    assert warned == [False] * 5 + [True, False]
