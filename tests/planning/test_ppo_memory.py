"""What does not fit a GPU is named, with settings that do; calibration gives the seconds of a step."""

import io
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console
from transformers import LlamaConfig

from tests.helpers.engines import leave_group
from tests.helpers.rl_run import compose_run
from verl.config.batch_sizes import plan_batches
from verl.config.compose import to_settings, with_values
from verl.config.ppo import PPOConfig
from verl.planning.calibration import print_step_time
from verl.planning.ppo_memory import print_memory
from verl.trainer.main_ppo import run_ppo

CONFIG = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=3, vocab_size=512, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip
GPUS = {"trainer.device": "cuda", "trainer.n_gpus_per_node": 2, "actor_rollout_ref.rollout.name": "vllm",
        "data.max_prompt_length": 100, "data.max_response_length": 100, "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32, "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16}  # fmt: skip


@pytest.fixture(autouse=True)
def no_group():
    leave_group()
    yield
    leave_group()


def printed(tmp_path, **settings):
    keys = {key.replace(".", "__"): value for key, value in {**GPUS, **settings}.items()}
    console = Console(file=io.StringIO(), width=200)
    print_memory(console, to_settings(compose_run(tmp_path, "none", **keys), PPOConfig), CONFIG)
    return console.file.getvalue()


def total(text):
    """MiB of update and generation."""
    line = next(line for line in text.splitlines() if " together " in line)
    return [float(cell.replace(",", "")) for cell in line.split("│")[2:4]]


def test_a_gpu_that_has_the_memory(tmp_path):
    text = printed(tmp_path, **{"trainer.gpu_memory_gib": 10})
    update, generation = total(text)
    assert "A GPU of 10 GiB has this memory." in text
    assert generation == pytest.approx(5120, abs=20)  # half of it is vLLM's, the rest weights and moments
    assert 40 < update < 400


def test_the_nearest_settings_that_fit_are_those_that_change_least(tmp_path):
    update, _ = total(printed(tmp_path, **{"trainer.gpu_memory_gib": 10}))
    text = printed(tmp_path, **{"trainer.gpu_memory_gib": 0.8 * update / 1024})
    assert "update does not fit" in text
    line = next(line for line in text.splitlines() if line.startswith("The nearest settings that fit: "))
    changes = dict(change.split("=") for change in line.removeprefix("The nearest settings that fit: ").split())
    assert changes.pop("actor_rollout_ref.model.enable_gradient_checkpointing", "true") == "true"
    fits = printed(tmp_path, **{"trainer.gpu_memory_gib": 0.8 * update / 1024, **changes,
                                "actor_rollout_ref.model.enable_gradient_checkpointing": "true"})  # fmt: skip
    assert "has this memory" in fits


def test_a_reward_model_on_the_same_gpus_and_an_engine_that_never_sleeps_are_counted(tmp_path):
    size = {"trainer.gpu_memory_gib": 10, "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3}
    update, generation = total(printed(tmp_path, **size))
    served = {"reward_model.enable": "true", "reward_model.rollout.name": "vllm",
              "reward_model.rollout.gpu_memory_utilization": 0.25}  # fmt: skip
    share = pytest.approx(2560, abs=2)
    with_server = total(printed(tmp_path, **size, **served))
    assert [with_server[0] - update, with_server[1] - generation] == [share, share]
    own = {"reward_model.enable_resource_pool": "true", "reward_model.nnodes": 1}
    assert total(printed(tmp_path, **size, **served, **own)) == [update, generation]
    in_ranks = {"reward_model.enable": "true", "reward_model.micro_batch_size_per_gpu": 4}
    assert 0.5 < total(printed(tmp_path, **size, **in_ranks))[1] - generation < 20  # half of the weights
    awake = total(printed(tmp_path, **size, **{"actor_rollout_ref.rollout.enable_sleep_mode": "false"}))
    assert awake[0] - update == pytest.approx(3072, abs=2)


def printed_seconds(text):
    lines = [line for line in text.splitlines() if "│" in line]
    return {name.strip(): float(value) for _, name, value, _ in (line.split("│") for line in lines)}


def costs(config, response):
    """Seconds of each phase, by known rates; prompts have 100 tokens."""
    plan = plan_batches(config)
    samples = plan.prompts * plan.samples_per_prompt
    tokens = samples * (100 + response)
    return {"gen": response * (0.01 + 0.001 * samples), "reward": 0.1 + 0.01 * samples, "balance": 0.05,
            "old_log_prob": 0.2 + 1e-4 * tokens, "update_actor": plan.mini_batches * 0.5 + 3e-4 * tokens}  # fmt: skip


@pytest.mark.parametrize("prompts", [64, 2])
def test_known_rates_are_found(tmp_path, capfd, prompts):
    """With two prompts on two ranks there is one small run, which has the size of the run itself."""
    trained = []

    def train(changes):
        small = with_values(settings, changes)
        seconds = costs(small, small.data.max_response_length) | {"step": 99.0, "data": 9.0}
        row = {"prompt_length/mean": 100, "response_length/mean": small.data.max_response_length}
        row |= {f"timing_s/{phase}": s for phase, s in seconds.items()}
        rows = [{"data": row | {"timing_s/gen": 1e3}}, {"data": row}, {"data": row}]  # the first warms up
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        Path(small.trainer.default_local_dir, "metrics.jsonl").write_text(lines)
        trained.append(small.data.train_batch_size)

    longest = 512 if prompts > 2 else 128
    config = compose_run(tmp_path, "none", trainer__n_gpus_per_node=2, data__train_batch_size=prompts,
                         data__max_response_length=longest, trainer__critic_warmup=9,
                         actor_rollout_ref__actor__ppo_mini_batch_size=min(16, prompts))  # fmt: skip
    settings = to_settings(config, PPOConfig)
    print_step_time(settings, train)
    expected = costs(settings, longest)
    assert trained == ([2, 8] if prompts > 2 else [2])
    assert printed_seconds(capfd.readouterr().out) == pytest.approx(
        expected | {"step": sum(expected.values())}, abs=0.006
    )


@pytest.mark.process
@pytest.mark.slow
def test_calibration_trains_small_steps_and_keeps_nothing(tiny_llama, tmp_path, capfd):
    config = compose_run(tmp_path, tiny_llama, trainer__local="true", trainer__dry_run="true")

    def train(changes):
        small = config.copy()
        for key, value in changes.items():
            OmegaConf.update(small, key, value)
        run_ppo(small)

    print_step_time(to_settings(config, PPOConfig), train)
    seconds = printed_seconds(capfd.readouterr().out)
    assert seconds["gen"] > 0 and seconds["update_actor"] > 0
    assert seconds.pop("step") == pytest.approx(sum(seconds.values()), abs=0.01 * len(seconds))
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
