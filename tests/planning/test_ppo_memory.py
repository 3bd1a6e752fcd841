"""What does not fit a GPU is named, with settings that do."""

import io

import pytest
from rich.console import Console
from transformers import LlamaConfig

from tests.helpers.rl_run import compose_run
from verl.config.compose import to_settings
from verl.config.ppo import PPOConfig
from verl.planning.ppo_memory import memory_remedies, print_memory

CONFIG = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=3, vocab_size=512, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip
GPUS = {"trainer.device": "cuda", "trainer.n_gpus_per_node": 2, "actor_rollout_ref.rollout.name": "vllm",
        "data.max_prompt_length": 100, "data.max_response_length": 100, "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32, "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16}  # fmt: skip


def printed(tmp_path, **settings):
    keys = {key.replace(".", "__"): value for key, value in {**GPUS, **settings}.items()}
    console = Console(file=io.StringIO(), width=200)
    print_memory(console, to_settings(compose_run(tmp_path, "none", **keys), PPOConfig), CONFIG)
    return console.file.getvalue()


def total(text):
    """MiB of update and generation."""
    line = next(line for line in text.splitlines() if " together " in line)
    return [float(cell.replace(",", "")) for cell in line.split("│")[2:4]]


def activations(tmp_path, limit):
    """MiB of a micro-batch's activations with dynamic batches of at most `limit` tokens."""
    text = printed(tmp_path, **{
        "trainer.gpu_memory_gib": 10, "actor_rollout_ref.actor.use_dynamic_bsz": "true",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "null",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": limit,
    })  # fmt: skip
    line = next(line for line in text.splitlines() if "activations of a micro-batch" in line)
    return float(line.split("│")[2].replace(",", ""))


def test_samples_below_full_length_fill_the_token_limit(tmp_path):
    """Of 200 tokens each at full length, one fits into 390 tokens, two into 400."""
    assert activations(tmp_path, 390) == pytest.approx(activations(tmp_path, 400) * 390 / 400, rel=0.03)


def test_copies_for_a_save_in_the_background_need_memory_on_a_cpu(tmp_path):
    """A weight and two moments of 4 bytes for each of the 574,336 parameters, divided by two ranks; the full weights
    for transformers are written before."""
    on_cpu = {"trainer.device": "cpu", "trainer.n_gpus_per_node": 2, "actor_rollout_ref.rollout.name": "hf",
              "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]"}  # fmt: skip
    line = "copies for a save in the background"
    assert line not in printed(tmp_path, **on_cpu)
    text = printed(tmp_path, **on_cpu, **{"actor_rollout_ref.actor.checkpoint.async_save": "true"})
    cells = next(row for row in text.splitlines() if line in row).split("│")[2:4]
    assert [float(cell.replace(",", "")) for cell in cells] == pytest.approx([12 * 574_336 / 2 / 2**20] * 2, abs=0.5)


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


def test_what_was_tried_is_said_where_nothing_fits(tmp_path):
    text = " ".join(printed(tmp_path, **{"trainer.gpu_memory_gib": 1e-4}).split())
    tried = "gradient checkpointing, offloading, batches, rollout.gpu_memory_utilization, sequence parallel ranks"
    assert f"No change of {tried} or up to 8 times as many nodes makes it fit." in text


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


def test_at_a_peak_without_activations_micro_batches_are_not_to_blame(tmp_path):
    config = to_settings(compose_run(tmp_path, "none", trainer__n_gpus_per_node=1), PPOConfig)
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    assert f"{actor}.ppo_micro_batch_size_per_gpu" in memory_remedies(config)
    adapters = f"{model}.lora_rank"
    assert memory_remedies(config, activations=False) == {adapters: f"train adapters ({adapters}=32)"}
